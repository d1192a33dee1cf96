"""Operators and dtypes of PyTorch, each tried once on one device. SHIPPED.

Runs in the frame of `discovery_child.py`, in the jobs' interpreter. It says first which `keys` there are, then `step`
and one line for each: "ok", "wrong", or the exception. What is expected is exact in any form (small whole numbers) or
comes from the CPU. Chosen for what has failed on real devices: half precision, integers beyond 32 bits, wrapping sums,
double (which Metal lacks, so that it tells whether a tensor is really there), linear algebra (a virtual Apple GPU
cannot build its pipelines), and strided views in attention and convolution.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.gpu.discovery_child import Report

_SIZE = 64
_TOLERANCE = 5e-3  # a GPU may round its factors (TF32); what is wrong is wrong by far more


def _matrix(torch: Any, dtype: str) -> Any:
    """Return a 64x64 matrix of -1, 0 and 1: its square is exact in half precision too."""
    rows = [[(3 * row + 5 * column) % 3 - 1 for column in range(_SIZE)] for row in range(_SIZE)]
    return torch.tensor(rows, dtype=torch.float32).to(getattr(torch, dtype))


def _product(dtype: str, torch: Any, device: str) -> tuple[Any, Any]:
    """Multiply on the device; the CPU multiplies in float32, which is exact here."""
    plain = _matrix(torch, "float32")
    there = _matrix(torch, dtype).to(device)
    return there @ there, plain @ plain


def _complex(dtype: str, torch: Any, device: str) -> tuple[Any, Any]:
    numbers = torch.tensor([complex(part % 5, part % 3 - 1) for part in range(_SIZE)], dtype=getattr(torch, dtype))
    there = numbers.to(device)
    return there * there, numbers * numbers


def _integers(dtype: str, torch: Any, device: str) -> tuple[Any, Any]:
    """Multiply and add; unsigned numbers must wrap."""
    numbers = torch.arange(0 if dtype == "uint8" else -40, 100 if dtype == "uint8" else 40, dtype=getattr(torch, dtype))
    there = numbers.to(device)
    return there * 3 + 1, numbers * 3 + 1


def _int64(torch: Any, device: str) -> tuple[Any, Any]:
    """Add up numbers that need more than 32 bits."""
    numbers = torch.arange(1000, dtype=torch.int64) + 2**40
    return torch.cumsum(numbers.to(device), 0), torch.cumsum(numbers, 0)


def _bool(torch: Any, device: str) -> tuple[Any, Any]:
    numbers = torch.arange(_SIZE)
    even, third = numbers % 2 == 0, numbers % 3 == 0
    return even.to(device) & ~third.to(device), even & ~third


def _float8(dtype: str, torch: Any, device: str) -> tuple[Any, Any]:
    """Convert there and back; all of these numbers are exact in both forms."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, -3.0, -0.25])
    return numbers.to(device).to(getattr(torch, dtype)).to(torch.float32), numbers


def _linalg_solve(torch: Any, device: str) -> tuple[Any, Any]:
    matrix = _matrix(torch, "float32")[:32, :32] + 64 * torch.eye(32)
    right = torch.arange(32, dtype=torch.float32)
    return torch.linalg.solve(matrix.to(device), right.to(device)), torch.linalg.solve(matrix, right)


def _sdpa_noncontig(torch: Any, device: str) -> tuple[Any, Any]:
    """Attend over permuted views (batch 1, 2 heads of 64, length 8)."""
    attend = torch.nn.functional.scaled_dot_product_attention
    parts = [((torch.arange(1024) * step % 7) / 7).reshape(1, 8, 2, 64) for step in (3, 5, 11)]
    wanted = attend(*(part.permute(0, 2, 1, 3).contiguous() for part in parts))
    return attend(*(part.to(device).permute(0, 2, 1, 3) for part in parts)), wanted


def _conv2d_noncontig_weight(torch: Any, device: str) -> tuple[Any, Any]:
    """Convolve with a slice of a 5-D weight."""
    image = (torch.arange(2 * 8 * 8) * 5 % 11 - 5.0).reshape(1, 2, 8, 8)
    weight = (torch.arange(4 * 2 * 2 * 3 * 3) * 3 % 7 - 3.0).reshape(4, 2, 2, 3, 3)
    convolve = torch.nn.functional.conv2d
    return convolve(image.to(device), weight.to(device)[:, :, 1]), convolve(image, weight[:, :, 1].contiguous())


_ITEMS: dict[str, Callable[[Any, str], tuple[Any, Any]]] = {
    "alloc_compute": partial(_product, "float32"),
    **{dtype: partial(_product, dtype) for dtype in ("float32", "float16", "bfloat16", "float64")},
    **{dtype: partial(_complex, dtype) for dtype in ("complex64", "complex128")},
    **{dtype: partial(_integers, dtype) for dtype in ("int8", "int16", "int32", "uint8")},
    "int64": _int64,
    "bool": _bool,
    **{dtype: partial(_float8, dtype) for dtype in ("float8_e4m3fn", "float8_e5m2")},
    "linalg_solve": _linalg_solve,
    "sdpa_noncontig": _sdpa_noncontig,
    "conv2d_noncontig_weight": _conv2d_noncontig_weight,
}


def _try(key: str, torch: Any, device: str) -> str:
    """Return "ok" or "wrong". Raises what the framework raises, and RuntimeError where the result is elsewhere."""
    found, wanted = _ITEMS[key](torch, device)
    if found.device.type != device.partition(":")[0]:
        raise RuntimeError(f"the result is on {found.device}")
    found = found.cpu()
    if found.shape != wanted.shape:
        return "wrong"
    if not (found.is_floating_point() or found.is_complex()):
        return "ok" if torch.equal(found, wanted) else "wrong"
    found, wanted = (torch.view_as_real(part) if part.is_complex() else part for part in (found, wanted))
    # Not a number compares as false: that is wrong, too.
    return "ok" if bool(((found.float() - wanted.float()).abs() <= _TOLERANCE).all()) else "wrong"


def _memory(torch: Any, device: str) -> dict[str, int]:
    """Return the Apple GPU's memory after all that, in bytes; nothing elsewhere."""
    if device != "mps":
        return {}
    names = ("recommended_max_memory", "driver_allocated_memory", "current_allocated_memory")
    return {name: int(getattr(torch.mps, name)()) for name in names if hasattr(torch.mps, name)}


def main(report: Report, device: str, *chosen: str) -> None:
    """Try the `chosen` keys (none: all) on `device` and write the results to `report`."""
    keys = list(chosen or _ITEMS)
    report.say("keys", keys)
    torch = importlib.import_module("torch")
    for key in keys:
        report.say("step", key)
        report.ask(key, partial(_try, key, torch, device))
    report.say("step", "memory")
    report.ask("memory", partial(_memory, torch, device))
