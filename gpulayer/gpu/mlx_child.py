"""What MLX says of itself, and whether its CPU and its GPU really work. SHIPPED.

Runs as `python -c SOURCE FD` in the jobs' interpreter; `torch_child.py` tells the form of its lines. An import that is
found proves nothing: without a backend's package `mlx.core` is there and fails to load. No deprecated call is made, for
those print on stdout (`mx.metal.device_info` where `mx.device_info` is there).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

_ORPHAN_LIMIT_S = 180  # the end of a child that hangs after its own parent was killed
_SIZE = 64
_TOLERANCE = 1e-3
_BACKENDS = ("ring", "jaccl", "nccl", "mpi")


class _Report:
    """Writes lines; `ask` turns an exception into a line of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, key: str, *value: object) -> None:
        os.write(self._descriptor, json.dumps([key, *value]).encode() + b"\n")

    def ask(self, key: str, question: Callable[[], Any]) -> Any:
        try:
            value = question()
        except BaseException as error:  # noqa: BLE001  # a framework may well raise SystemExit
            self.say(key, None, f"{type(error).__name__}: {error}"[:500])
            return None
        self.say(key, value)
        return value


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


def main(descriptor: int) -> None:
    """Write the answers to `descriptor`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here leaves a note, no gigabytes
    report = _Report(descriptor)
    try:
        mx = importlib.import_module("mlx.core")  # it may be missing, crash, hang or exit
    except BaseException as error:  # noqa: BLE001
        missing = isinstance(error, ModuleNotFoundError) and error.name == "mlx"
        report.say("missing" if missing else "import", None, f"{type(error).__name__}: {error}"[:500])
        report.say("done", True)
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
    report.say("done", True)


if __name__ == "__main__":
    signal.alarm(_ORPHAN_LIMIT_S)
    main(int(sys.argv[1]))
    os._exit(0)  # what frameworks do at their end is not asked for, and may hang
