"""What CUDA's driver says of its devices, asked once a boot: whether they share the host's memory, and how. SHIPPED.

NVML does not tell it, and no name or figure does: a GB10 reports no memory, an N1X a part set aside of the host's, and
a GH200 is coherent and has its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpulayer.gpu.discovery_cache import cache_key, cached, keep
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_report import Part, size, text
from gpulayer.gpu.discovery_system import System

CUDA_LIMIT_S = 15.0

_NUMA_NODE = 1  # CUdeviceNumaConfig of cuda.h
_MOST_NODES = 4096


class CudaDevice(NamedTuple):
    """One device or MIG instance; None is not told. `uuid` has no prefix; its memory is the host's NUMA node `node`."""

    uuid: str | None
    pci: str | None
    name: str | None
    compute: str | None
    total: int | None
    integrated: bool | None
    node: int | None


def ask_cuda(
    system: System, notes: Notes, known: Sequence[object], *, folder: str | None, fresh: bool
) -> tuple[CudaDevice, ...]:
    """Return CUDA's devices; none where its library is not there or does not answer.

    The answer stands on `known` (the boot, the driver and its GPUs) and is kept in `folder` (None: nowhere) for as long
    as that is the same; `fresh` asks again.
    """
    key = cache_key(["cuda", *known])
    kept = cached(folder, key) if folder is not None and not fresh else None
    if kept is not None:
        return _devices(kept["values"])
    env = {name: value for name, value in system.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    answer = system.child("cuda_child", limit=CUDA_LIMIT_S, env={**env, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    notes.add_child("cuda", answer)
    if folder is not None and answer.done and answer.valid and answer.values.get("init") == 0:
        keep(folder, key, {"values": answer.values, "errors": {}, "elapsed_ms": answer.outcome.elapsed_ms})
    return _devices(answer.values)


def count_device_memory(system: System, notes: Notes, host: Part, devices: Sequence[CudaDevice]) -> None:
    """Take out of the host's memory what is a GPU's own: coherent GPUs may lend theirs to the kernel as NUMA nodes.

    Where a node cannot be read, `memory_includes_device_memory` says that the figures are too high.
    """
    nodes = {device.node for device in devices if device.node is not None and not device.integrated}
    if not nodes:
        return
    message = "The kernel counts the GPU's own memory as the host's; it is left out of the host's here."
    total = free = 0
    for node in sorted(nodes):
        meminfo = system.read(f"/sys/devices/system/node/node{node}/meminfo") or ""
        found = {key: int(amount) << 10 for key, amount in re.findall(r"(MemTotal|MemFree): +(\d+) kB", meminfo)}
        if len(found) != len(("MemTotal", "MemFree")):
            message = "The kernel counts the GPU's own memory as the host's: less of it is the host's than is told."
            total = free = 0
            break
        total, free = total + found["MemTotal"], free + found["MemFree"]
    host["memory_includes_device_memory"] = not total
    notes.add("host_memory_includes_device", "host", message)
    for key, amount in (("memory_bytes", total), ("memory_available_bytes", free)):
        if host[key] is not None:
            host[key] = max(host[key] - amount, 1)


def pci_address(value: Any) -> str | None:  # noqa: ANN401  # from outside
    """Return a PCI address in the kernel's form, `0000:c3:00.0`; NVML writes the domain with eight digits."""
    found = re.fullmatch(r"(?:0000)?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", str(value).lower())
    return found[1] if found else None


def _devices(values: Part) -> tuple[CudaDevice, ...]:
    listed = [value for key, value in values.items() if key.startswith("device:") and isinstance(value, dict)]
    return tuple(_device(value) for value in listed)


def _device(value: Part) -> CudaDevice:
    uuid = text(value.get("uuid"))
    major, minor, node = value.get("major"), value.get("minor"), value.get("numa_id")
    shared = value.get("integrated")
    whole = isinstance(major, int) and isinstance(minor, int)
    lent = value.get("numa_config") == _NUMA_NODE and isinstance(node, int) and 0 <= node < _MOST_NODES
    return CudaDevice(
        uuid=uuid if uuid and re.fullmatch(r"[0-9a-f-]{36}", uuid) else None,
        pci=pci_address(value.get("pci")),
        name=text(value.get("name")),
        compute=f"{major}.{minor}" if whole else None,
        total=size(value.get("total")),
        integrated=bool(shared) if shared in (0, 1) else None,
        node=node if lent else None,
    )
