"""Facts of a Mac and its GPUs. Absolute paths: SSH gives a PATH of four folders. SHIPPED."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from gpulayer.gpu.discovery_linux import hashed, rfc3339
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_report import Part, Scene, new_device, new_host, size, text
from gpulayer.gpu.discovery_system import System

FACT_LIMIT_S = 5.0
METAL_LIMIT_S = 10.0
PROFILER_LIMIT_S = 10.0

_SYSCTL = (
    *("hw.memsize", "hw.model", "hw.physicalcpu", "hw.logicalcpu", "hw.perflevel0.physicalcpu"),
    *("hw.perflevel1.physicalcpu", "hw.optional.arm64", "machdep.cpu.brand_string", "kern.bootsessionuuid"),
    *("kern.boottime", "kern.hv_vmm_present", "kern.memorystatus_vm_pressure_level", "sysctl.proc_translated"),
    "iogpu.wired_limit_mb",
)
_PRESSURE = {"1": "normal", "2": "warn", "4": "critical"}


def macos_host(system: System, notes: Notes) -> tuple[Part, dict[str, str]]:
    """Return the `host` part and the sysctl values behind it; `python` and `disk_free_bytes` are the caller's."""
    known = _sysctl(system, _SYSCTL)
    apple_silicon = known.get("hw.optional.arm64") == "1" or system.machine == "arm64"
    model = known.get("hw.model")
    translated = {"0": False, "1": True}.get(known.get("sysctl.proc_translated", ""))
    if translated:
        notes.add(
            "rosetta_process",
            "system",
            "The probe's Python runs under Rosetta; use a native one: frameworks see no Apple GPU from there.",
        )
    virtual = known.get("kern.hv_vmm_present") == "1" or (model or "").startswith("VirtualMac")
    platform_id = _first(r'"IOPlatformUUID" = "([^"]+)"', _tool(system, "/usr/sbin/ioreg", *_IOREG_PLATFORM))
    power = _tool(system, "/usr/bin/pmset", "-g", "batt")
    return new_host(
        hostname=system.hostname,
        os="darwin",
        os_name="macOS",
        os_version=text(_tool(system, "/usr/bin/sw_vers", "-productVersion")),
        os_build=text(_tool(system, "/usr/bin/sw_vers", "-buildVersion")),
        kernel=system.kernel,
        arch="arm64" if apple_silicon else system.machine,
        process_arch=system.machine,
        translated=translated,
        virtualization="vm" if virtual else "none" if known else None,
        machine_model=model,
        boot_id=known.get("kern.bootsessionuuid"),
        machine_id=hashed(platform_id),
        boot_time=rfc3339(_integer(_first(r"sec = (\d+)", known.get("kern.boottime")))),
        cpu_model=known.get("machdep.cpu.brand_string"),
        cpu_physical=_integer(known.get("hw.physicalcpu")),
        cpu_logical=_integer(known.get("hw.logicalcpu")),
        cpu_performance=_integer(known.get("hw.perflevel0.physicalcpu")),
        cpu_efficiency=_integer(known.get("hw.perflevel1.physicalcpu")),
        memory_bytes=size(_integer(known.get("hw.memsize"))),
        memory_available_bytes=_available(_tool(system, "/usr/bin/vm_stat")),
        memory_pressure=_PRESSURE.get(known.get("kern.memorystatus_vm_pressure_level", "")),
        on_ac_power="'AC Power'" in power if power else None,
    ), known


_IOREG_PLATFORM = ("-r", "-d", "1", "-c", "IOPlatformExpertDevice")
_IOREG_GPU = ("-r", "-d", "1", "-w", "0", "-c", "AGXAccelerator")


def add_apple_devices(scene: Scene) -> None:
    """Add the Apple GPU (or an Intel Mac's cards), whose presence the system alone tells.

    On Apple Silicon there is one, whatever happens: where Metal does not answer its health is "unknown".
    """
    notes = scene.notes
    answer = scene.system.child("metal_child", limit=METAL_LIMIT_S)
    metal = [entry for entry in answer.values.get("devices") or [] if isinstance(entry, dict)]
    if not answer.done:
        notes.add("metal_probe_failed", "metal", "Metal could not be asked for its devices.", answer.trouble)
        notes.add_child("metal", answer)
    if scene.host["arch"] == "arm64":
        scene.devices.append(_apple_silicon(scene, metal[0] if metal else {}, listed=answer.done))
        return
    if answer.done and not metal:
        notes.add("metal_no_device", "metal", "Metal lists no device in this session.")
    notes.add("intel_mac", "system", "An Intel Mac: its memory is not unified, and current frameworks leave it out.")
    scene.devices.extend(_intel_cards(scene, [entry for entry in metal if entry.get("low_power") is not True]))


def add_wired_limit(scene: Scene, known: dict[str, str]) -> None:
    """Take the limit that an administrator set for what is usable where neither Metal nor a framework told it.

    0 is the system's own policy, which only Metal knows; it is not "unlimited".
    """
    limit = size((_integer(known.get("iogpu.wired_limit_mb")) or 0) << 20)
    for device in scene.devices:
        if device["memory_kind"] == "unified" and device["usable_memory_bytes"] is None and limit is not None:
            device.update(usable_memory_bytes=limit, usable_source="sysctl")


def _apple_silicon(scene: Scene, metal: Part, *, listed: bool) -> Part:
    """Return the one GPU; `metal` is empty where Metal does not list it, `listed` says that Metal answered."""
    system, notes, host = scene.system, scene.notes, scene.host
    ioreg = _tool(system, "/usr/sbin/ioreg", *_IOREG_GPU)
    model, cores = _first(r'"model" = "([^"]+)"', ioreg), _integer(_first(r'"gpu-core-count" = (\d+)', ioreg))
    family = text(metal.get("family"))
    if listed and not metal and model:
        message = "The system has the Apple GPU, and Metal does not list it to this session, which may be a sandbox."
        notes.add("sandboxed_gpu", "metal", message)
    elif listed and not metal:
        notes.add("metal_no_device", "metal", "Metal lists no device in this session.")
    if not metal and model is None:
        card = next(iter(_displays(system, notes)), {})
        model, cores = text(card.get("sppci_model")), _integer(text(card.get("sppci_cores")))
        family = _first(r"spdisplays_(\w+)", text(card.get("spdisplays_mtlgpufamilysupport")))
    name = text(metal.get("name")) or model or host["cpu_model"]
    virtual = host["virtualization"] == "vm" or "paravirtual" in (name or "").lower()
    if virtual:
        notes.add("virtual_gpu", "apple:0", "A virtual machine's GPU: what works on it may not be what works on a Mac.")
    usable = size(metal.get("working_set"))
    return new_device(
        id="apple:0",
        accelerator="mps",
        index=0,
        name=name,
        vendor="Apple",
        gpu_cores=cores,
        metal_family=family,
        virtual=virtual,
        memory_kind="unified",
        memory_bytes=host["memory_bytes"],
        usable_memory_bytes=usable,
        usable_source="metal" if usable is not None else None,
        free_memory_bytes=host["memory_available_bytes"],
        free_source="host" if host["memory_available_bytes"] is not None else None,
        max_buffer_bytes=size(metal.get("max_buffer")),
        health="ok" if metal else "unknown",
    )


def _intel_cards(scene: Scene, metal: Sequence[Part]) -> list[Part]:
    """Return the discrete cards of an Intel Mac, whose memory is their own."""
    if not metal:
        return []
    sizes = _video_memory(scene.system, scene.notes)
    return [
        new_device(
            id=f"apple:{index}",
            accelerator="mps",
            index=index,
            name=text(entry.get("name")),
            metal_family=text(entry.get("family")),
            virtual=False,
            memory_kind="dedicated",
            memory_bytes=sizes.get(text(entry.get("name")) or ""),
            max_buffer_bytes=size(entry.get("max_buffer")),
            health="ok",
        )
        for index, entry in enumerate(metal)
    ]


def _video_memory(system: System, notes: Notes) -> dict[str, int]:
    """Return the cards' own memory (bytes) by model."""
    found = {}
    for card in _displays(system, notes):
        amount = re.fullmatch(r"(\d{1,6}) ([MG])B", str(card.get("spdisplays_vram")))
        if amount:
            found[str(card.get("sppci_model"))] = int(amount[1]) << (30 if amount[2] == "G" else 20)
    return found


def _displays(system: System, notes: Notes) -> list[Part]:
    """Return what system_profiler tells of GPUs; slow, empty on some virtual machines, and asked only where needed."""
    outcome = system.run(["/usr/sbin/system_profiler", "SPDisplaysDataType", "-json"], limit=PROFILER_LIMIT_S)
    try:
        document: Any = json.loads(outcome.stdout)
        cards = [card for card in document["SPDisplaysDataType"] if isinstance(card, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        cards = []
    if not cards:
        notes.add("system_profiler_empty", "system", "system_profiler tells nothing of this Mac's GPU.")
    return cards


def is_stub(path: str, system: System) -> bool:
    """Say whether `path` is Apple's stand-in for Python, which opens an installer's window when it is started."""
    if system.platform != "darwin" or path != "/usr/bin/python3":
        return False
    return system.run(["/usr/bin/xcode-select", "-p"], limit=FACT_LIMIT_S).code != 0


def thunderbolt_rdma(system: System) -> bool | None:
    """Say whether a device for RDMA over Thunderbolt is on; None where this macOS has no tool that tells."""
    listing = _tool(system, "/usr/bin/ibv_devices")
    return None if listing is None else bool(re.search(r"^\s+rdma_\w+", listing, re.MULTILINE))


def _tool(system: System, *command: str) -> str | None:
    """Return what a tool printed, or None where it failed."""
    outcome = system.run(command, limit=FACT_LIMIT_S)
    return outcome.text if outcome.code == 0 else None


def _sysctl(system: System, names: Sequence[str]) -> dict[str, str]:
    """Ask for all names at once, then for each missing one alone: some releases stop at the first unknown name."""
    values: dict[str, str] = {}
    for asked in (names, *([name] for name in names)):
        if not set(asked) <= values.keys():
            lines = system.run(["/usr/sbin/sysctl", *asked], limit=FACT_LIMIT_S).text.splitlines()
            pairs = (line.partition(": ") for line in lines)
            values.update({key: value.strip() for key, sign, value in pairs if sign and key in names})
    return values


def _available(vm_stat: str | None) -> int | None:
    """Return bytes that can be had without swapping: free, speculative and inactive pages (vm_stat(1))."""
    page = _integer(_first(r"page size of (\d+) bytes", vm_stat))
    pages = [_integer(_first(rf"^Pages {kind}:\s+(\d+)\.", vm_stat)) for kind in ("free", "inactive", "speculative")]
    known = [count for count in pages if count is not None]
    return size(page * sum(known)) if page and known else None


def _first(pattern: str, content: str | None) -> str | None:
    found = re.search(pattern, content or "", re.MULTILINE)
    return found[1].strip() if found else None


def _integer(content: str | None) -> int | None:
    return int(content) if content and re.fullmatch(r"\d{1,18}", content) else None
