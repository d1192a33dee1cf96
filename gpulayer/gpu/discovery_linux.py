"""Facts of a Linux host, from /proc, /sys and /etc. SHIPPED."""

from __future__ import annotations

import hashlib
import re
import time

from gpulayer.gpu.discovery_report import Part, new_host, size
from gpulayer.gpu.discovery_system import System

# Parts of a DMI vendor or product name that only virtual machines have.
_VM_WORDS = (
    *("qemu", "kvm", "vmware", "virtualbox", "xen", "bochs", "parallels", "virtual machine", "amazon ec2"),
    *("google compute engine", "openstack", "hvm domu", "firecracker", "apple virtualization"),
)
_CONTAINER_WORDS = ("docker", "kubepods", "containerd", "/lxc", "libpod", "garden")
_V1_NO_LIMIT = 1 << 62  # cgroup v1 writes the largest page-aligned number for "no limit"


def linux_host(system: System) -> Part:
    """Return the `host` part; `python` and `disk_free_bytes` are filled in by the caller."""
    release = _assignments(system.read("/etc/os-release") or system.read("/usr/lib/os-release"))
    cpuinfo = system.read("/proc/cpuinfo")
    memory = _meminfo(system)
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    limit = _cgroup_limit(system)
    if limit is not None and total is not None and limit >= total:
        limit = None
    if available is not None and limit is not None:
        available = min(available, limit)
    return new_host(
        hostname=system.hostname,
        os="linux",
        os_name=release.get("NAME"),
        os_version=release.get("VERSION_ID"),
        os_build=release.get("BUILD_ID"),
        kernel=system.kernel,
        arch=system.machine,
        process_arch=system.machine,
        virtualization=_virtualization(system, cpuinfo),
        machine_model=system.read("/sys/class/dmi/id/product_name") or system.read("/proc/device-tree/model"),
        boot_id=system.read("/proc/sys/kernel/random/boot_id"),
        machine_id=hashed(system.read("/etc/machine-id") or system.read("/var/lib/dbus/machine-id")),
        boot_time=rfc3339(_number(r"^btime (\d+)", system.read("/proc/stat"))),
        cpu_model=_first(r"^model name\s*:\s*(.+)", cpuinfo),
        cpu_physical=_physical_cores(cpuinfo),
        cpu_logical=system.cpus(),
        memory_bytes=total,
        memory_limit_bytes=limit,
        memory_available_bytes=available,
        on_ac_power=_on_ac_power(system),
    )


def hashed(machine_id: str | None) -> str | None:
    """Return a machine's id so that two names of one machine are seen, and the id itself is not."""
    return None if machine_id is None else hashlib.sha256(f"gpulayer {machine_id}".encode()).hexdigest()[:32]


def rfc3339(seconds: int | None) -> str | None:
    """Return a point in time (seconds of the epoch) as text, UTC."""
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _first(pattern: str, content: str | None) -> str | None:
    found = re.search(pattern, content or "", re.MULTILINE)
    return found[1].strip() if found else None


def _number(pattern: str, content: str | None) -> int | None:
    found = _first(pattern, content)
    return int(found) if found else None


def _assignments(content: str | None) -> dict[str, str]:
    """Read `NAME="value"` lines (os-release(5))."""
    pairs = (line.partition("=") for line in (content or "").splitlines() if not line.startswith("#"))
    return {key.strip(): value.strip().strip("\"'") for key, sign, value in pairs if sign}


def _meminfo(system: System) -> dict[str, int]:
    """Read /proc/meminfo as bytes; what is zero or unreadable is left out."""
    found = re.findall(r"^(\w+):\s+(\d+) kB", system.read("/proc/meminfo") or "", re.MULTILINE)
    return {key: amount for key, kilobytes in found if (amount := size(int(kilobytes) * 1024)) is not None}


def _cgroup_limit(system: System) -> int | None:
    """Return the lowest memory limit from this process's cgroup up to the root, for both versions of cgroups."""
    found = []
    for line in (system.read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        # In a container the path may be the host's, and the limit then lies at the mounted root.
        for length in range(len(parts), -1, -1):
            value = system.read("/".join([root, *parts[:length], name]))
            if value is not None and value.isdigit() and 0 < int(value) < _V1_NO_LIMIT:
                found.append(int(value))
    return min(found, default=None)


def _physical_cores(cpuinfo: str | None) -> int | None:
    """Count (socket, core) pairs; None where the kernel does not tell them (Arm)."""
    pairs = {
        (_first(r"^physical id\s*:\s*(\d+)", block), core)
        for block in (cpuinfo or "").split("\n\n")
        if (core := _first(r"^core id\s*:\s*(\d+)", block)) is not None
    }
    return len(pairs) or None


def _virtualization(system: System, cpuinfo: str | None) -> str | None:
    """Say what is nearest to the processes: WSL, a container, a virtual machine, or nothing that can be seen."""
    if "microsoft" in system.kernel.lower():
        return "wsl"
    cgroup = system.read("/proc/1/cgroup") or ""
    marks = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
    if any(system.exists(mark) for mark in marks) or any(word in cgroup for word in _CONTAINER_WORDS):
        return "container"
    dmi = " ".join(system.read(f"/sys/class/dmi/id/{name}") or "" for name in ("sys_vendor", "product_name")).lower()
    flagged = re.search(r"^flags\s*:.*\bhypervisor\b", cpuinfo or "", re.MULTILINE)
    if flagged or any(word in dmi for word in _VM_WORDS) or system.exists("/proc/device-tree/hypervisor"):
        return "vm"
    return "none" if cpuinfo else None


def _on_ac_power(system: System) -> bool | None:
    folder = "/sys/class/power_supply"
    states = [
        system.read(f"{folder}/{name}/online")
        for name in system.names(folder)
        if system.read(f"{folder}/{name}/type") == "Mains"
    ]
    return "1" in states if states else None
