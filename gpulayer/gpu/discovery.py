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
from gpulayer.gpu.discovery_cache import cache_key, cached, keep
from gpulayer.gpu.discovery_linux import linux_host, rfc3339
from gpulayer.gpu.discovery_macos import add_apple_devices, macos_host
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_nvidia import add_nvidia_devices
from gpulayer.gpu.discovery_process import Outcome
from gpulayer.gpu.discovery_report import Part, Scene, finish_device, gigabytes, new_device, text, texts
from gpulayer.gpu.discovery_system import Answer, System
from gpulayer.gpu.discovery_torch import TORCH_LIMIT_S, read_torch, settled, status_of

SCHEMA = "gpulayer.probe/1"
PROBE_VERSION = "1"
FRAMEWORKS = ("torch", "mlx", "executorch")
DEADLINE_S = 120.0

_HOST_CHILD_LIMIT_S = 10.0

# A job is told its devices by these, so its framework is probed without what an rc file says of them.
_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

# Variables that change what a framework finds; the ones that start so, too.
_DECISIVE = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTORCH_", "HSA_", "CUDA_")


def probe(
    python: str | None = None,
    frameworks: Sequence[str] = (),
    *,
    fresh: bool = False,
    state_root: str | None = None,
    deadline: float = DEADLINE_S,
    system: System | None = None,
) -> Part:
    """Return this machine's report; takes about `deadline` seconds at most.

    `python` is the jobs' interpreter (None: the one that runs now), whose `frameworks` are asked; a name that is not
    one of FRAMEWORKS raises ValueError. Their answers are kept in the folder `state_root` (None: nowhere) and used
    again unless `fresh`; the free disk space is told of that folder too (None: of the home).
    """
    if unknown := set(frameworks) - set(FRAMEWORKS):
        raise ValueError(f"not a framework: {', '.join(sorted(unknown))}; known are {', '.join(FRAMEWORKS)}")
    started = time.time()
    clock = time.monotonic()
    system = system or System(deadline=deadline)
    notes = Notes()
    interpreter = os.path.expanduser(python or sys.executable)
    mac = system.platform == "darwin"
    host, sysctl = macos_host(system, notes) if mac else (linux_host(system), {})
    inside = system.child("host_child", python=interpreter, limit=_HOST_CHILD_LIMIT_S)
    notes.add_child("python", inside)
    if "executable" not in inside.values:
        notes.add("python_unusable", "python", f"The interpreter {interpreter} cannot be used.", inside.trouble)
    host["python"] = {
        key: inside.values.get(key) for key in ("executable", "real_path", "version", "implementation", "arch")
    }
    host["disk_free_bytes"] = system.disk_free(state_root or os.path.expanduser("~"))
    host["memory_gb"] = gigabytes(host["memory_bytes"])
    network = _network(inside, notes)
    if hidden := [name for name in _VISIBILITY if name in system.environ]:
        message = f"{hidden[0]} is set on the host, by an rc file perhaps; jobs get their own."
        notes.add("device_hidden_by_env", hidden[0], message)
    scene = Scene(system, notes, host, [])
    if mac:
        add_apple_devices(scene, sysctl)
    else:
        add_nvidia_devices(scene)
        add_amd_devices(scene)
    entries, capabilities = [], []
    for name in frameworks:
        if name == "torch" and "executable" in inside.values:
            answer, from_cache = _ask_torch(interpreter, inside, scene, state_root, fresh=fresh)
            detail, found = read_torch(answer, scene)
            entries.append(_entry(name, interpreter, answer, detail, cached=from_cache))
            capabilities += found
        else:
            entries.append(_entry(name, interpreter, None, {}))
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
        "thunderbolt_rdma": None,
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


def _ask_torch(
    interpreter: str, inside: Answer, scene: Scene, folder: str | None, *, fresh: bool
) -> tuple[Answer, bool]:
    """Return PyTorch's answers, and whether they come from the cache in `folder`."""
    environ = scene.system.environ
    decisive = {key: value for key, value in environ.items() if key.startswith(_DECISIVE) and key not in _VISIBILITY}
    devices = [(device["id"], device["driver_version"]) for device in scene.devices]
    known = [inside.values.get(key) for key in ("executable", "real_path", "version", "search_path")]
    boot = scene.host["boot_id"]
    key = cache_key([PROBE_VERSION, "torch", known, boot, devices, decisive])
    if boot is None:
        folder = None  # an answer holds for one boot
    kept = cached(folder, key) if folder is not None and not fresh else None
    if kept is not None:
        outcome = Outcome(code=0, elapsed_ms=kept["elapsed_ms"])
        return Answer(kept["values"], kept["errors"], valid=True, outcome=outcome), True
    env = {key: value for key, value in environ.items() if key not in _VISIBILITY}
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    answer = scene.system.child("torch_child", python=interpreter, limit=TORCH_LIMIT_S, env=env)
    if folder is not None and settled(answer, scene.devices):
        elapsed = answer.outcome.elapsed_ms
        keep(folder, key, {"values": answer.values, "errors": answer.errors, "elapsed_ms": elapsed})
    return answer, False


def _entry(name: str, interpreter: str, answer: Answer | None, detail: Part, *, cached: bool = False) -> Part:
    """Return one entry of `frameworks`; without an answer the framework was not asked."""
    return {
        "name": name,
        "version": text(answer.values.get("version")) if answer else None,
        "python": interpreter,
        "elapsed_ms": answer.outcome.elapsed_ms if answer else 0,
        "status": status_of(answer) if answer else "not_probed",
        "signal": answer.outcome.signal if answer else None,
        "cached": cached,
        "detail": detail,
    }
