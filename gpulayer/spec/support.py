"""The support matrix and the vocabulary: one table from which schemas, validator, command and documents derive.

Nothing here claims that an operator works: a row says that a job may be declared and what its host must have shown.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


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


class JobKind(enum.StrEnum):
    """One process on one host, or a gang of ranks under one fate."""

    INDEPENDENT = "independent"
    DISTRIBUTED = "distributed"


class Evidence(enum.StrEnum):
    """What a row stands on: a real device, a simulated host in the tests, or nothing yet.

    `hardware` needs a file that a real run wrote: `hardware_tests/evidence/<machine>/<Row.name>.json`.
    """

    HARDWARE = "hardware"
    SIMULATED = "simulated"
    NONE = "none"


# A capability means: installed in the probed interpreter, and a minimal use of it just worked.
CAPABILITIES: tuple[str, ...] = (
    "torch",
    "torch.mps",
    "torch.cuda",
    "torch.rocm",
    "torch.xpu",
    "torch.distributed.gloo",
    "torch.distributed.nccl",
    "torch.distributed.xccl",
    "mlx",
    "mlx.cpu",
    "mlx.metal",
    "mlx.cuda",
    "mlx.distributed.ring",
    "mlx.distributed.jaccl",
    "mlx.distributed.nccl",
    "mlx.distributed.mpi",
    "executorch",
    "executorch.xnnpack",
    "executorch.coreml",
    "executorch.mlx",
    "executorch.metal",
    "executorch.cuda",
    "executorch.vulkan",
    "executorch.openvino",
)

# Names that once existed, or that people expect: they get advice, never "unknown".
RETIRED: dict[str, str] = {
    "executorch.mps": (
        "ExecuTorch deprecated its MPS delegate in 1.2 and removed it in 1.5; "
        "use executorch.coreml, executorch.mlx or executorch.metal"
    ),
    "torch.distributed.mps": (
        "no PyTorch release has a collective backend for MPS; "
        "run independent jobs, or a distributed job with `accelerator: cpu` and `backend: gloo`"
    ),
}

DTYPES: tuple[str, ...] = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "complex128",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
)

# Metal's language has no double type, so no framework has them on the Apple GPU and no fallback helps
# (PyTorch's MPS page, "Double-precision types"; MLX raises too).
NEVER_DTYPES: dict[Accelerator, frozenset[str]] = {Accelerator.MPS: frozenset({"float64", "complex128"})}

# What people write instead of the words above, and the word they mean.
OTHER_WORDS: dict[str, str] = {
    "metal": "mps",
    "apple": "mps",
    "nvidia": "cuda",
    "amd": "rocm",
    "hip": "rocm",
    "pytorch": "torch",
    "rccl": "nccl",
    "vram": "dedicated",
    "shared": "unified",
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bf16": "bfloat16",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "long": "int64",
    "int": "int32",
}

# What the user of such a word is told.
ADVICE: dict[str, str] = {
    **RETIRED,
    **{word: f"did you mean {meant!r}?" for word, meant in OTHER_WORDS.items()},
    "gpu": "a GPU is cuda, mps or rocm; a list of them is an order of preference",
    "xpu": "Intel GPUs are reported by the probe, but no job can ask for them",
}

_DEMANDED: dict[Framework, dict[Accelerator, tuple[str, ...]]] = {
    Framework.TORCH: {
        Accelerator.CUDA: ("torch.cuda",),
        Accelerator.MPS: ("torch.mps",),
        Accelerator.ROCM: ("torch.rocm",),
        Accelerator.CPU: ("torch",),
    },
    Framework.MLX: {
        Accelerator.CUDA: ("mlx.cuda",),
        Accelerator.MPS: ("mlx.metal",),
        Accelerator.CPU: ("mlx.cpu",),
    },
    Framework.EXECUTORCH: {
        Accelerator.CUDA: ("executorch.cuda",),
        Accelerator.MPS: ("executorch.coreml", "executorch.mlx", "executorch.metal"),
        Accelerator.CPU: ("executorch.xnnpack",),
    },
}

# A ROCm build of PyTorch answers to `nccl` with RCCL.
BACKEND_ACCELERATORS: dict[Backend, tuple[Accelerator, ...]] = {
    Backend.GLOO: (Accelerator.CUDA, Accelerator.ROCM, Accelerator.CPU),
    Backend.NCCL: (Accelerator.CUDA, Accelerator.ROCM),
}

DISTRIBUTED_MPS = (
    "a distributed job cannot use the Apple GPU (mps): that takes one process per GPU, and no PyTorch release has a "
    "collective backend for MPS. Declare independent jobs, or `accelerator: cpu` with `backend: gloo`: it runs on Macs"
)

# What real devices have run: a test holds these against the files of evidence.
_PROVEN: dict[Accelerator, frozenset[Framework | None]] = {
    Accelerator.CUDA: frozenset({Framework.MLX, Framework.TORCH, None}),
    Accelerator.MPS: frozenset(),
    Accelerator.ROCM: frozenset(),
    Accelerator.CPU: frozenset({*Framework, None}),
}

# Of distributed jobs: with a rank on each device of one host.
_PROVEN_TOGETHER: dict[Accelerator, frozenset[Framework | None]] = {
    Accelerator.CUDA: frozenset({Framework.TORCH, None}),
    Accelerator.CPU: frozenset({Framework.TORCH, None}),
}

# What machines of the simulated fleet in the tests take.
_SIMULATED: dict[Accelerator, frozenset[Framework | None]] = {
    Accelerator.CUDA: frozenset({*Framework, None}),
    Accelerator.MPS: frozenset({*Framework, None}),
    Accelerator.ROCM: frozenset({Framework.TORCH, None}),
    Accelerator.CPU: frozenset({*Framework, None}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the matrix. `capabilities` are any-of: the host must have shown one of them (none: no demand)."""

    accelerator: Accelerator
    kind: JobKind
    framework: Framework | None
    allowed: bool
    why: str
    capabilities: tuple[str, ...]
    evidence: Evidence

    @property
    def name(self) -> str:
        """Name the row, as files of evidence and tests do: `cuda-independent-torch`."""
        return f"{self.accelerator}-{self.kind}-{self.framework or 'none'}"


def demanded(framework: Framework | None, accelerator: Accelerator) -> tuple[str, ...]:
    """Return the capabilities of which a host must have shown one; empty: nothing is demanded.

    Raises KeyError where `framework` cannot use `accelerator`; such a job is invalid and never gets this far.
    """
    return _DEMANDED[framework][accelerator] if framework else ()


def backend_capability(backend: Backend) -> str:
    """Return the capability that a distributed job's backend demands. `nccl` built in says nothing of the network."""
    return f"torch.distributed.{backend}"


def _judge(accelerator: Accelerator, kind: JobKind, framework: Framework | None) -> tuple[bool, str]:
    """Whether such a job may be declared, and why (not)."""
    if framework and accelerator not in _DEMANDED[framework]:
        return False, f"{framework} has no {accelerator} backend"
    if kind is JobKind.INDEPENDENT:
        return True, "one process on one host; the program selects its device"
    if accelerator is Accelerator.MPS:
        return False, DISTRIBUTED_MPS
    if framework in {Framework.MLX, Framework.EXECUTORCH}:
        return (
            False,
            f"a distributed job is a torch.distributed program launched with torchrun; {framework} is not",
        )
    backends = " or ".join(backend for backend, places in BACKEND_ACCELERATORS.items() if accelerator in places)
    return True, f"torch.distributed with {backends}, launched with torchrun"


def _row(accelerator: Accelerator, kind: JobKind, framework: Framework | None) -> Row:
    allowed, why = _judge(accelerator, kind, framework)
    evidence = Evidence.NONE
    proven = _PROVEN if kind is JobKind.INDEPENDENT else _PROVEN_TOGETHER
    if framework in proven.get(accelerator, ()):
        evidence = Evidence.HARDWARE
    elif kind is JobKind.INDEPENDENT and framework in _SIMULATED[accelerator]:
        evidence = Evidence.SIMULATED
    return Row(
        accelerator=accelerator,
        kind=kind,
        framework=framework,
        allowed=allowed,
        why=why,
        capabilities=demanded(framework, accelerator) if allowed else (),
        evidence=evidence,
    )


_MATRIX: dict[tuple[Accelerator, JobKind, Framework | None], Row] = {
    (accelerator, kind, framework): _row(accelerator, kind, framework)
    for kind in JobKind
    for accelerator in Accelerator
    for framework in (*Framework, None)
}


def matrix() -> tuple[Row, ...]:
    """Return every row: job kind x accelerator x framework (None: a program that demands no framework)."""
    return tuple(_MATRIX.values())


def row(accelerator: Accelerator, kind: JobKind, framework: Framework | None) -> Row:
    """Return the one row that a job on `accelerator` falls under."""
    return _MATRIX[accelerator, kind, framework]
