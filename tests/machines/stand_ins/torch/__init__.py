"""A stand-in for PyTorch: answers what `torch.json` beside it says, and multiplies matrices in plain Python.

Simulated: nothing that it computes says anything of a GPU. `torch.json` may hold `version`, `cuda`, `hip`, `mps` (null,
or {"available", "product", "memory"}; `refusal` is the text of its error, `double` makes float64 work), `devices`
(properties of torch.cuda's devices, each with its `product`) and `xpu` (likewise, with `free`: null raises). A
`product` is "ok", "wrong", or the text of the RuntimeError that it raises.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_said: dict[str, Any] = json.loads((Path(__file__).parent / "torch.json").read_text())
_mps: dict[str, Any] | None = _said.get("mps")
_devices: list[dict[str, Any]] = _said.get("devices", [])
_xpus: list[dict[str, Any]] = _said.get("xpu", [])

__version__: str = _said["version"]
version = SimpleNamespace(cuda=_said.get("cuda"), hip=_said.get("hip"), xpu=None)


def _product_of(device: str) -> str:
    """What a product on `device` comes to; raises where there is no such device."""
    if device == "cpu":
        return "ok"
    if device == "mps" and _mps is not None and _mps["available"]:
        return str(_mps.get("product", "ok"))
    if device.startswith("cuda") and _devices:
        return str(_devices[int(device.partition(":")[2] or 0)].get("product", "ok"))
    if device.startswith("xpu") and _xpus:
        return str(_xpus[int(device.partition(":")[2] or 0)].get("product", "ok"))
    raise RuntimeError(f"no such device: {device}")


class Tensor:
    def __init__(self, rows: Any, device: str = "cpu") -> None:
        self._rows = rows
        self.device = device

    def to(self, device: Any) -> Tensor:
        product = _product_of(str(device))
        if product not in {"ok", "wrong"}:
            raise RuntimeError(product)
        return Tensor(self._rows, str(device))

    def cpu(self) -> Tensor:
        return Tensor(self._rows)

    def tolist(self) -> Any:
        return self._rows

    def __matmul__(self, other: Tensor) -> Tensor:
        columns = list(zip(*other._rows))
        rows = [[sum(a * b for a, b in zip(row, column)) for column in columns] for row in self._rows]
        if _product_of(self.device) == "wrong":
            rows[-1][-1] += 1
        return Tensor(rows, self.device)


def tensor(rows: Any, device: str = "cpu") -> Tensor:
    return Tensor(rows).to(device)


float64 = "float64"


def ones(*shape: int, dtype: str | None = None, device: str = "cpu") -> Tensor:
    if _mps is not None and not _mps["available"] and device == "mps":
        raise RuntimeError(_mps.get("refusal", "not available"))
    if device == "mps" and dtype == float64 and not (_mps or {}).get("double"):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
    row = [1.0] * shape[-1]
    return tensor(row if len(shape) == 1 else [list(row) for _ in range(shape[0])], device)


def _cuda_is_available() -> bool:
    for warning in _said.get("warnings", []):
        warnings.warn(warning, stacklevel=2)
    return bool(_devices) and not _said.get("warnings")


backends = SimpleNamespace(
    mps=SimpleNamespace(
        is_built=lambda: _mps is not None,
        is_available=lambda: _mps is not None and _mps["available"],
    )
)
mps = SimpleNamespace(recommended_max_memory=lambda: _mps and _mps["memory"])
cuda = SimpleNamespace(
    is_available=_cuda_is_available,
    device_count=lambda: len(_devices),
    get_arch_list=lambda: _said.get("arch_list", []),
    get_device_properties=lambda index: SimpleNamespace(
        **{key: value for key, value in _devices[index].items() if key != "product"}
    ),
)


def _xpu_memory(index: int) -> tuple[int, int]:
    if _xpus[index].get("free") is None:
        raise RuntimeError("The device doesn't support querying the available free memory.")
    return _xpus[index]["free"], _xpus[index]["total_memory"]


xpu = SimpleNamespace(
    is_available=lambda: bool(_xpus),
    device_count=lambda: len(_xpus),
    get_device_properties=lambda index: SimpleNamespace(**_xpus[index]),
    mem_get_info=_xpu_memory,
)
distributed = SimpleNamespace(
    is_available=lambda: True,
    is_xccl_available=lambda: bool(_xpus),
    is_gloo_available=lambda: True,
    is_nccl_available=lambda: bool(_devices),
    HashStore=lambda: None,
    init_process_group=lambda *_, **__: None,
    all_reduce=lambda _: None,
    destroy_process_group=lambda: None,
)
