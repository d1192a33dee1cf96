"""Operators and dtypes of MLX, each tried once on its CPU or its GPU. SHIPPED.

Runs in the frame of `discovery_child.py`; `torch_ops_child.py` tells the form of its lines and why these were chosen.
What is expected is exact in every format, computed by Python itself, or comes from MLX's CPU.
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


def _rows() -> list[list[int]]:
    """Return a 64x64 matrix of -1, 0 and 1: its square is exact in half precision too."""
    return [[(3 * row + 5 * column) % 3 - 1 for column in range(_SIZE)] for row in range(_SIZE)]


def _dtype(mx: Any, name: str) -> Any:
    return mx.bool_ if name == "bool" else getattr(mx, name)


def _plain(mx: Any, array: Any) -> Any:
    """Return an array as numbers of Python."""
    return array.astype(mx.float32, stream=mx.cpu).tolist()


def _product(dtype: str, mx: Any, device: Any) -> tuple[Any, Any]:
    rows = _rows()
    columns = list(zip(*rows))
    there = mx.array(rows).astype(_dtype(mx, dtype), stream=device)
    wanted = [[float(sum(a * b for a, b in zip(row, column))) for column in columns] for row in rows]
    return _plain(mx, mx.matmul(there, there, stream=device)), wanted


def _complex(dtype: str, mx: Any, device: Any) -> tuple[Any, Any]:
    numbers = [complex(part % 5, part % 3 - 1) for part in range(_SIZE)]
    there = mx.array(numbers).astype(_dtype(mx, dtype), stream=device)
    found = mx.multiply(there, there, stream=device)
    return found.tolist(), [number * number for number in numbers]


def _integers(dtype: str, mx: Any, device: Any) -> tuple[Any, Any]:
    """Multiply and add; unsigned numbers must wrap."""
    numbers = list(range(100)) if dtype == "uint8" else list(range(-40, 40))
    there = mx.array(numbers).astype(_dtype(mx, dtype), stream=device)
    three, one = (mx.array(number).astype(_dtype(mx, dtype), stream=device) for number in (3, 1))
    found = mx.add(mx.multiply(there, three, stream=device), one, stream=device)
    return found.tolist(), [(number * 3 + 1) % 256 if dtype == "uint8" else number * 3 + 1 for number in numbers]


def _int64(mx: Any, device: Any) -> tuple[Any, Any]:
    """Add up numbers that need more than 32 bits."""
    numbers = [number + 2**40 for number in range(1000)]
    found = mx.cumsum(mx.array(numbers, dtype=mx.int64), stream=device)
    return found.tolist(), [sum(numbers[: place + 1]) for place in range(len(numbers))]


def _bool(mx: Any, device: Any) -> tuple[Any, Any]:
    even, third = ([number % step == 0 for number in range(_SIZE)] for step in (2, 3))
    there = mx.logical_not(mx.array(third), stream=device)
    found = mx.logical_and(mx.array(even), there, stream=device)
    return found.tolist(), [a and not b for a, b in zip(even, third)]


def _linalg_solve(mx: Any, device: Any) -> tuple[Any, Any]:
    rows = [[float(entry) + 64.0 * (row == column) for column, entry in enumerate(line[:32])]
            for row, line in enumerate(_rows()[:32])]  # fmt: skip
    matrix, right = mx.array(rows), mx.array([float(number) for number in range(32)])
    found, wanted = (mx.linalg.solve(matrix, right, stream=stream) for stream in (device, mx.cpu))
    return found.tolist(), wanted.tolist()


def _sdpa_noncontig(mx: Any, device: Any) -> tuple[Any, Any]:
    """Attend over permuted views (batch 1, 2 heads of 64, length 8)."""
    attend = partial(mx.fast.scaled_dot_product_attention, scale=0.125)
    parts = [mx.array([number * step % 7 / 7 for number in range(1024)]).reshape(1, 8, 2, 64) for step in (3, 5, 11)]
    views = [mx.transpose(part, (0, 2, 1, 3), stream=mx.cpu) for part in parts]
    whole = [mx.contiguous(view, stream=mx.cpu) for view in views]
    return attend(*views, stream=device).tolist(), attend(*whole, stream=mx.cpu).tolist()


def _conv2d_noncontig_weight(mx: Any, device: Any) -> tuple[Any, Any]:
    """Convolve with a slice of a 5-D weight (MLX has the channels last)."""
    image = mx.array([number * 5 % 11 - 5.0 for number in range(128)]).reshape(1, 8, 8, 2)
    weight = mx.array([number * 3 % 7 - 3.0 for number in range(144)]).reshape(4, 3, 3, 2, 2)[..., 1]
    found = mx.conv2d(image, weight, stream=device)
    wanted = mx.conv2d(image, mx.contiguous(weight, stream=mx.cpu), stream=mx.cpu)
    return found.tolist(), wanted.tolist()


_ITEMS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "alloc_compute": partial(_product, "float32"),
    **{
        dtype: partial(_product, dtype)
        for dtype in ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")
    },
    **{dtype: partial(_complex, dtype) for dtype in ("complex64", "complex128")},
    **{dtype: partial(_integers, dtype) for dtype in ("int8", "int16", "int32", "uint8")},
    "int64": _int64,
    "bool": _bool,
    "linalg_solve": _linalg_solve,
    "sdpa_noncontig": _sdpa_noncontig,
    "conv2d_noncontig_weight": _conv2d_noncontig_weight,
}


def _same(found: Any, wanted: Any) -> bool:
    """Compare nested lists; whole numbers exactly, others within the tolerance (not a number is never the same)."""
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(wanted, int):
        return bool(found == wanted)
    return bool(abs(found - wanted) <= _TOLERANCE)


def _try(key: str, mx: Any, device: Any) -> str:
    """Return "ok" or "wrong". Raises what the framework raises."""
    return "ok" if _same(*_ITEMS[key](mx, device)) else "wrong"


def main(report: Report, device: str, *chosen: str) -> None:
    """Try the `chosen` keys (none: all) on `device`, cpu or gpu, and write the results to `report`."""
    keys = list(chosen or _ITEMS)
    report.say("keys", keys)
    mx = importlib.import_module("mlx.core")
    mx.set_default_device(mx.cpu)  # what names no stream only prepares
    for key in keys:
        report.say("step", key)
        report.ask(key, partial(_try, key, mx, getattr(mx, device)))
