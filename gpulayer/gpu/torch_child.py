"""What PyTorch says of itself and of its devices, and whether each device really works. SHIPPED.

Runs in the frame of `discovery_child.py`, in the jobs' interpreter. Nothing is taken from a claim: a device counts once
a product that it computed equals the CPU's. Every call is wrapped by itself, since the exception's class depends on the
build (RuntimeError, AttributeError, AssertionError, NotImplementedError were seen).
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer.gpu.discovery_child import Report

_SIZE = 64
_TOLERANCE = 1e-3


def _product(torch: Any, device: str) -> str:
    """Multiply two 64x64 float32 matrices on `device` and on the CPU: "ok" where both agree, else "wrong".

    The entries are small whole numbers, so that the product is exact in every format a device may compute in.
    """
    rows = [[float((3 * row + 5 * column) % 7 - 3) for column in range(_SIZE)] for row in range(_SIZE)]
    matrix = torch.tensor(rows)
    wanted = (matrix @ matrix).tolist()
    there = matrix.to(device)
    product = there @ there
    if str(product.device).partition(":")[0] != device.partition(":")[0]:
        raise RuntimeError(f"the product of {device} is on {product.device}")
    found = product.cpu().tolist()
    right = all(
        abs(one - other) <= _TOLERANCE
        for wanted_row, found_row in zip(wanted, found)
        for one, other in zip(wanted_row, found_row)
    )
    return "ok" if right and len(found) == _SIZE else "wrong"


def _sum_alone(torch: Any) -> bool:
    """Run one gloo all-reduce in a group of one, over loopback: it proves the build, not the network."""
    loopback = {"darwin": "lo0"}.get(sys.platform, "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    group = torch.distributed
    if not (group.is_available() and group.is_gloo_available()):
        return False
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    ones = torch.ones(4)
    group.all_reduce(ones)
    group.destroy_process_group()
    return bool(ones.tolist() == [1.0] * 4)


def _cuda_available(torch: Any, report: Report) -> bool:
    """Ask whether torch.cuda is available; the driver's complaints come as warnings and are reported."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = report.ask("cuda_available", lambda: bool(torch.cuda.is_available()))
    report.say("cuda_warnings", [str(warning.message)[:500] for warning in caught])
    return bool(available)


def _cuda_devices(torch: Any, report: Report) -> None:
    count = report.ask("cuda_count", lambda: int(torch.cuda.device_count()))
    for index in range(count or 0):
        properties = report.ask(f"cuda:{index}", partial(_properties, torch, index))
        if properties is not None:
            report.say("step", f"a product on cuda:{index}")
            report.ask(f"cuda:{index}.product", partial(_product, torch, f"cuda:{index}"))


def _properties(torch: Any, index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    plain = ("major", "minor", "total_memory", "is_integrated", "multi_processor_count")
    pci = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    values: dict[str, Any] = {key: int(getattr(found, key)) for key in plain + pci if hasattr(found, key)}
    values.update({key: str(getattr(found, key)) for key in ("name", "uuid", "gcnArchName") if hasattr(found, key)})
    return values


def _mps(torch: Any, report: Report) -> None:
    backend = torch.backends.mps
    built = report.ask("mps_built", lambda: bool(backend.is_built()))
    available = report.ask("mps_available", lambda: bool(backend.is_available()))
    if built and available:
        report.ask("mps_memory", lambda: int(torch.mps.recommended_max_memory()))
        report.say("step", "a product on mps")
        report.ask("mps_product", lambda: _product(torch, "mps"))
        report.ask("mps_control", lambda: _refuses_double(torch))
    elif built:
        report.ask("mps_refusal", lambda: str(torch.ones(1, device="mps").device))


def _refuses_double(torch: Any) -> bool:
    """Say whether mps refuses float64: Metal has no double, so that where it works the CPU does the work."""
    try:
        torch.ones(1, dtype=torch.float64, device="mps")
    except (TypeError, RuntimeError):
        return True
    return False


def _xpu(torch: Any, report: Report) -> None:
    """Ask for Intel's GPUs; how much of their memory is free is not known on some parts."""
    if not report.ask("xpu_available", lambda: bool(torch.xpu.is_available())):
        return
    count = report.ask("xpu_count", lambda: int(torch.xpu.device_count()))
    for index in range(count or 0):
        key = f"xpu:{index}"
        if report.ask(key, partial(_xpu_properties, torch, index)) is not None:
            report.say("step", f"a product on {key}")
            report.ask(f"{key}.free", partial(_xpu_free, torch, index))
            report.ask(f"{key}.product", partial(_product, torch, key))


def _xpu_properties(torch: Any, index: int) -> dict[str, Any]:
    found = torch.xpu.get_device_properties(index)
    values: dict[str, Any] = {}
    for key, kind in (("name", str), ("uuid", str), ("driver_version", str), ("total_memory", int)):
        if hasattr(found, key):
            values[key] = kind(getattr(found, key))
    if hasattr(found, "is_integrated_gpu"):
        values["integrated"] = bool(found.is_integrated_gpu)
    return values


def _xpu_free(torch: Any, index: int) -> int:
    return int(torch.xpu.mem_get_info(index)[0])


def main(report: Report) -> None:
    """Write the answers to `report`."""
    torch = report.load("torch", lambda: importlib.import_module("torch"))
    if torch is None:
        return
    report.ask("version", lambda: str(torch.__version__))
    for kind in ("cuda", "hip", "xpu"):
        report.ask(kind, partial(getattr, torch.version, kind, None))
    report.say("step", "a product on the CPU")
    report.ask("cpu_product", lambda: _product(torch, "cpu"))
    report.say("step", "torch.distributed")
    report.ask("gloo", lambda: _sum_alone(torch))
    report.ask("nccl", lambda: bool(torch.distributed.is_available() and torch.distributed.is_nccl_available()))
    report.ask("xccl", lambda: bool(torch.distributed.is_available() and torch.distributed.is_xccl_available()))
    report.say("step", "torch.backends.mps")
    report.ask("mps", lambda: _mps(torch, report))
    report.say("step", "torch.cuda")
    report.ask("arch_list", lambda: [str(arch) for arch in torch.cuda.get_arch_list()])
    if _cuda_available(torch, report):
        _cuda_devices(torch, report)
    report.say("step", "torch.xpu")
    _xpu(torch, report)
