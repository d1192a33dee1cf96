"""AMD GPUs that ROCm can compute on, from sysfs. SHIPPED."""

from __future__ import annotations

import re

from gpulayer.gpu.discovery_report import Scene, new_device, size
from gpulayer.gpu.discovery_system import System

_NODES = "/sys/class/kfd/kfd/topology/nodes"


def add_amd_devices(scene: Scene) -> None:
    """Add the GPUs of the kernel's compute topology, in its order, which is the order of HIP_VISIBLE_DEVICES.

    A node that has CPU cores too is an APU: unified memory. The kind of any other is what the framework says later.
    """
    system, host, index = scene.system, scene.host, 0
    for node in sorted(system.names(_NODES), key=lambda name: (len(name), name)):
        facts = dict(re.findall(r"^(\w+) (\d+)$", system.read(f"{_NODES}/{node}/properties") or "", re.MULTILINE))
        if int(facts.get("simd_count", 0)) == 0:
            continue
        place, domain = int(facts.get("location_id", 0)), int(facts.get("domain", 0))
        pci = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        folder = f"/sys/bus/pci/devices/{pci}"
        unified = int(facts.get("cpu_cores_count", 0)) > 0
        total, used = (_number(system, f"{folder}/mem_info_vram_{what}") for what in ("total", "used"))
        memory = host["memory_bytes"] if unified else size(total)
        free = host["memory_available_bytes"] if unified else None
        if not unified and memory is not None and used is not None:
            free = max(memory - used, 0)
        scene.devices.append(
            new_device(
                id=f"pci:{pci}",
                accelerator="rocm",
                index=index,
                name=system.read(f"{folder}/product_name"),
                vendor="AMD",
                pci_bus_id=pci,
                memory_kind="unified" if unified else None,
                memory_bytes=memory,
                free_memory_bytes=free,
                free_source=("host" if unified else "sysfs") if free is not None else None,
                driver_version=system.read("/sys/module/amdgpu/version"),
                select_env={"HIP_VISIBLE_DEVICES": str(index)},
                health="ok",
            )
        )
        index += 1


def _number(system: System, path: str) -> int | None:
    content = system.read(path)
    return int(content) if content and content.isdigit() else None
