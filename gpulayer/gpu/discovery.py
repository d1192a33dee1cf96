"""The probe: what is there on this machine, as one report. SHIPPED.

It observes and never decides. Whatever could hang or crash runs in a child with its own time limit, and all of them
share one deadline. The report's form is `schemas/probe.schema.json`; docs/probe.md tells what each note means.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from gpulayer.gpu.discovery_amd import add_amd_devices
from gpulayer.gpu.discovery_frameworks import FRAMEWORKS, VISIBILITY, Interpreter, add_frameworks
from gpulayer.gpu.discovery_linux import linux_host, rfc3339
from gpulayer.gpu.discovery_macos import add_apple_devices, add_wired_limit, is_stub, macos_host, thunderbolt_rdma
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_nvidia import add_nvidia_devices
from gpulayer.gpu.discovery_process import Outcome
from gpulayer.gpu.discovery_report import Part, Scene, finish_device, gigabytes, new_device, texts
from gpulayer.gpu.discovery_system import Answer, System

__all__ = ["DEADLINE_S", "DEEP_DEADLINE_S", "FRAMEWORKS", "PROBE_VERSION", "SCHEMA", "probe"]

SCHEMA = "gpulayer.probe/1"
PROBE_VERSION = "2"
DEADLINE_S = 120.0
DEEP_DEADLINE_S = 300.0

_HOST_CHILD_LIMIT_S = 10.0


def probe(
    python: str | None = None,
    frameworks: Sequence[str] = (),
    *,
    fresh: bool = False,
    deep: bool = False,
    state_root: str | None = None,
    deadline: float | None = None,
    system: System | None = None,
) -> Part:
    """Return this machine's report; takes about `deadline` seconds at most (DEADLINE_S, or DEEP_DEADLINE_S).

    `python` is the jobs' interpreter (None: the one that runs now), whose `frameworks` are asked; a name that is not
    one of FRAMEWORKS raises ValueError. Their answers are kept in the folder `state_root` (None: nowhere) and used
    again unless `fresh`; the free disk space is told of that folder too (None: of the home). `deep` tries operators and
    dtypes on the first device of each framework, now; without it, what was kept of that is told.
    """
    if unknown := set(frameworks) - set(FRAMEWORKS):
        raise ValueError(f"not a framework: {', '.join(sorted(unknown))}; known are {', '.join(FRAMEWORKS)}")
    started = time.time()
    clock = time.monotonic()
    system = system or System(deadline=deadline or (DEEP_DEADLINE_S if deep else DEADLINE_S))
    notes = Notes()
    interpreter = os.path.expanduser(python or sys.executable)
    mac = system.platform == "darwin"
    host, sysctl = macos_host(system, notes) if mac else (linux_host(system), {})
    inside = _ask_interpreter(interpreter, system, notes)
    host["python"] = {
        key: inside.values.get(key) for key in ("executable", "real_path", "version", "implementation", "arch")
    }
    host["disk_free_bytes"] = system.disk_free(state_root or os.path.expanduser("~"))
    network = _network(inside, notes)
    network["thunderbolt_rdma"] = thunderbolt_rdma(system) if mac else None
    if hidden := [name for name in VISIBILITY if name in system.environ]:
        message = f"{hidden[0]} is set on the host, by an rc file perhaps; jobs get their own."
        notes.add("device_hidden_by_env", hidden[0], message)
    scene = Scene(system, notes, host, [])
    if mac:
        add_apple_devices(scene)
    else:
        add_nvidia_devices(scene, folder=state_root, fresh=fresh)
        add_amd_devices(scene)
    entries, capabilities = add_frameworks(
        frameworks,
        Interpreter(interpreter, inside),
        scene,
        version=PROBE_VERSION,
        folder=state_root,
        fresh=fresh,
        deep=deep,
    )
    if mac:
        add_wired_limit(scene, sysctl)
    host["memory_gb"] = gigabytes(host["memory_bytes"])
    scene.devices.append(_cpu(host))
    for device in scene.devices:
        finish_device(device, notes)
    return {
        "schema": SCHEMA,
        "probe_version": PROBE_VERSION,
        "started_at": rfc3339(int(started)),
        "elapsed_ms": int((time.monotonic() - clock) * 1000),
        "complete": not any(note["code"] in {"child_timeout", "nvidia_smi_timeout"} for note in notes.entries),
        "host": host,
        "network": network,
        "devices": scene.devices,
        "frameworks": entries,
        "capabilities": sorted(set(capabilities)),
        "notes": notes.entries,
    }


def _ask_interpreter(path: str, system: System, notes: Notes) -> Answer:
    """Return what the jobs' interpreter says of itself; adds a note where it cannot be used."""
    if is_stub(path, system):
        message = f"{path} is Apple's stand-in, which asks to install developer tools; name another interpreter."
        notes.add("python_unusable", "python", message)
        return Answer({}, {}, valid=True, outcome=Outcome(error="a stand-in that is never started"))
    inside = system.child("host_child", python=path, limit=_HOST_CHILD_LIMIT_S)
    notes.add_child("python", inside)
    if "executable" not in inside.values:
        notes.add("python_unusable", "python", f"The interpreter {path} cannot be used.", inside.trouble)
    return inside


def _network(inside: Answer, notes: Notes) -> Part:
    addresses = texts(inside.values.get("hostname_addresses"))
    loopback = None
    if addresses:
        loopback = all(address.startswith("127.") or address == "::1" for address in addresses)
    if loopback:
        message = "The host's own name resolves to loopback: other hosts cannot be told to reach it by that name."
        notes.add("hostname_loopback", "network", message)
    return {
        "hostname_resolves": bool(addresses) if "hostname_addresses" in inside.values else None,
        "hostname_is_loopback": loopback,
        "interfaces": inside.values.get("interfaces") or [],
    }


def _cpu(host: Part) -> Part:
    """Return the host's processor as a device; a cgroup's limit is what a job can get of the memory."""
    limit = host["memory_limit_bytes"]
    return new_device(
        id="cpu:0",
        accelerator="cpu",
        index=0,
        name=host["cpu_model"],
        memory_bytes=host["memory_bytes"],
        usable_memory_bytes=host["memory_bytes"] if limit is None else limit,
        free_memory_bytes=host["memory_available_bytes"],
        free_source="host" if host["memory_available_bytes"] is not None else None,
        health="ok",
    )
