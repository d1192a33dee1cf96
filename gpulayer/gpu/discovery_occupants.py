"""Who computes on the GPUs of this machine at this moment, as far as their driver tells. SHIPPED.

NVIDIA's driver names the compute processes of each device; what only draws on a screen is not among them. Nobody tells
for an Apple GPU. In a container the driver may list nothing although memory is taken: that is unknown, not free.
"""

from __future__ import annotations

import os
import pwd
from typing import Any, NamedTuple

from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_nvidia import Gpu, compute_processes, find_nvidia
from gpulayer.gpu.discovery_process import PROBE
from gpulayer.gpu.discovery_system import System

__all__ = ["LOOK_LIMIT_S", "PROBE", "Occupancy", "occupancies"]

LOOK_LIMIT_S = 20.0

# An idle device has at most a few MiB in use; a process with a CUDA context, hundreds.
_IDLE_BYTES = 128 << 20


class Occupancy(NamedTuple):
    """One device: its compute processes (None: it cannot be told who they are), and the bytes of its memory left.

    A process is `{"device", "pid", "name", "user", "memory_bytes"}`, the last three None where they are not known.
    """

    processes: list[dict[str, Any]] | None
    free: int | None


def occupancies(system: System | None = None) -> dict[str, Occupancy]:
    """Return the occupancy of each device whose driver can be asked, by the id that a report has for it.

    Takes LOOK_LIMIT_S at most. A device that is missing was not asked: nothing is known of it.
    """
    system = system or System(deadline=LOOK_LIMIT_S)
    found = find_nvidia(system, Notes())
    apps = compute_processes(system) if found.source == "nvidia-smi" and found.gpus else None
    result = {}
    for gpu in found.gpus:
        for part in gpu.instances if gpu.mig else (gpu,):
            if part.own_id is not None:
                # nvidia-smi names a whole GPU, not the instance of it that a process is on.
                listed = apps.get(part.own_id, []) if apps is not None and not gpu.mig else part.processes
                result[part.own_id] = Occupancy(_known(system, part, listed), part.free)
    return result


def _known(system: System, gpu: Gpu, listed: Any) -> list[dict[str, Any]] | None:  # noqa: ANN401  # pairs or None
    """Return the processes with their names; None where somebody is there whom this process cannot see."""
    if listed is None or (not listed and (gpu.used or 0) > _IDLE_BYTES):
        return None
    processes = []
    for pid, memory in listed:
        name = system.read(f"/proc/{pid}/comm")
        if name is None:
            return None  # it has ended just now, or it is outside of this container
        processes.append({
            "device": gpu.own_id, "pid": pid, "name": name[:64], "user": _user(pid), "memory_bytes": memory,
        })  # fmt: skip
    return processes


def _user(pid: int) -> str | None:
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        return pwd.getpwuid(owner).pw_name
    except OSError:
        return None
    except KeyError:
        return str(owner)
