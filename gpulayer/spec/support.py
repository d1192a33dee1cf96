"""The support matrix and the vocabulary: one table from which schemas, validator, command and documents derive."""

from __future__ import annotations

import enum


class Accelerator(enum.StrEnum):
    """What a job may ask for. `mps` is the Apple GPU through Metal, by any framework (ADR-0006, amendment)."""

    CUDA = "cuda"
    MPS = "mps"
    ROCM = "rocm"
    CPU = "cpu"


class Framework(enum.StrEnum):
    """A job's framework demands its capability on the accelerator that is chosen."""

    TORCH = "torch"
    MLX = "mlx"
    EXECUTORCH = "executorch"


class MemoryKind(enum.StrEnum):
    """`dedicated` is the device's own VRAM; `unified` is one pool shared with the CPU. Never shown as each other."""

    DEDICATED = "dedicated"
    UNIFIED = "unified"


class Backend(enum.StrEnum):
    """Collective backends of distributed jobs."""

    GLOO = "gloo"
    NCCL = "nccl"
