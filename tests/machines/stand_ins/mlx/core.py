"""A stand-in for MLX: answers what `mlx.json` beside it says, and multiplies matrices in plain Python.

Simulated: nothing that it computes says anything of a GPU. `mlx.json` may hold `metal`, `cuda` (whether available),
`gpu` (what device_info tells), `distributed` (names that are available), `old` (true: device_info is not there yet),
`cpu_product` and `gpu_product`: "ok", "wrong", or the text of the RuntimeError that it raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_said: dict[str, Any] = json.loads((Path(__file__).parent / "mlx.json").read_text())

cpu, gpu = "cpu", "gpu"


def _gpu_info() -> Any:
    return _said.get("gpu", {})


def _metal_info() -> Any:
    if not _said.get("old"):
        print("mx.metal.device_info is deprecated and will be removed in a future version.")  # noqa: T201
    return _gpu_info()


if not _said.get("old"):
    vars()["device_info"] = lambda device=cpu: _gpu_info() if device == gpu else {"architecture": "x86_64"}

metal = SimpleNamespace(is_available=lambda: bool(_said.get("metal")), device_info=_metal_info)
cuda = SimpleNamespace(is_available=lambda: bool(_said.get("cuda")))
distributed = SimpleNamespace(is_available=lambda name: name in _said.get("distributed", ["ring"]))


class array:  # noqa: N801  # MLX's own name
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def tolist(self) -> Any:
        return self.rows


def matmul(one: array, other: array, *, stream: str) -> array:
    product = _said.get(f"{stream}_product", "ok")
    if product not in {"ok", "wrong"}:
        raise RuntimeError(product)
    columns = list(zip(*other.rows))
    rows = [[sum(a * b for a, b in zip(row, column)) for column in columns] for row in one.rows]
    rows[-1][-1] += product == "wrong"
    return array(rows)
