"""What MLX says of itself, and whether its CPU and its GPU really work. SHIPPED.

Runs in the frame of `discovery_child.py`, in the jobs' interpreter. An import that is found proves nothing: without a
backend's package `mlx.core` is there and fails to load. No deprecated call is made, for those print on stdout
(`mx.metal.device_info` where `mx.device_info` is there).
"""

from __future__ import annotations

import importlib
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.gpu.discovery_child import Report

_SIZE = 64
_TOLERANCE = 1e-3
_BACKENDS = ("ring", "jaccl", "nccl", "mpi")


def _product(mx: Any, device: Any) -> str:
    """Multiply two 64x64 float32 matrices on `device`: "ok" where the product is the one computed by Python itself.

    The entries are small whole numbers, so that the product is exact in every format a device may compute in.
    """
    rows = [[float((3 * row + 5 * column) % 7 - 3) for column in range(_SIZE)] for row in range(_SIZE)]
    columns = list(zip(*rows))
    matrix = mx.array(rows)
    found = mx.matmul(matrix, matrix, stream=device).tolist()
    right = all(
        abs(sum(a * b for a, b in zip(row, column)) - entry) <= _TOLERANCE
        for row, found_row in zip(rows, found)
        for column, entry in zip(columns, found_row)
    )
    return "ok" if right and len(found) == _SIZE else "wrong"


def _gpu_facts(mx: Any) -> dict[str, Any]:
    """Return what MLX knows of its GPU: texts and whole numbers alone."""
    facts = mx.device_info(mx.gpu) if hasattr(mx, "device_info") else mx.metal.device_info()
    return {str(key): value for key, value in facts.items() if isinstance(value, (str, int))}


def main(report: Report) -> None:
    """Write the answers to `report`."""
    mx = report.load("mlx", lambda: importlib.import_module("mlx.core"))
    if mx is None:
        return
    report.ask("version", lambda: metadata.version("mlx"))
    report.say("step", "a product on the CPU")
    report.ask("cpu_product", lambda: _product(mx, mx.cpu))
    available = [
        report.ask("metal", lambda: bool(mx.metal.is_available())),
        report.ask("cuda", lambda: bool(mx.cuda.is_available())),
    ]
    report.say("step", "mx.distributed")
    for name in _BACKENDS:
        report.ask(name, partial(mx.distributed.is_available, name))
    if any(available):
        report.say("step", "a product on the GPU")
        report.ask("gpu_product", lambda: _product(mx, mx.gpu))
        report.ask("gpu", lambda: _gpu_facts(mx))
