"""The parts of a probe report with every key in its place; what is not known is None. SHIPPED."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_system import System

Part = dict[str, Any]


class Scene(NamedTuple):
    """What the devices are found and judged in: the machine, notes, host part, and devices so far."""

    system: System
    notes: Notes
    host: Part
    devices: list[Part]


class Target(NamedTuple):
    """A device on which operators can be tried: the framework's word for it, and its id in the report."""

    word: str
    device: str


class Reading(NamedTuple):
    """What a framework's answer means: its `detail`, its capabilities, and where operators can be tried."""

    detail: Part
    capabilities: list[str]
    target: Target | None


# Bytes beyond this are no memory of any machine (1 EiB); zero and below is unknown.
_ABSURD_BYTES = 1 << 60

_HOST_KEYS = (
    *("hostname", "os", "os_name", "os_version", "os_build", "kernel", "arch", "process_arch", "translated"),
    *("virtualization", "machine_model", "boot_id", "machine_id", "boot_time"),
    *("cpu_model", "cpu_physical", "cpu_logical", "cpu_performance", "cpu_efficiency"),
    *("memory_bytes", "memory_gb", "memory_limit_bytes", "memory_available_bytes", "memory_pressure"),
    *("memory_includes_device_memory", "disk_free_bytes", "on_ac_power", "python"),
)
_DEVICE_KEYS = (
    *("id", "accelerator", "index", "parent_id", "name", "vendor", "architecture", "compute_capability"),
    *("gpu_cores", "metal_family", "uuid", "pci_bus_id", "virtual", "memory_kind", "memory_bytes", "memory_gb"),
    *("usable_memory_bytes", "usable_memory_gb", "usable_source", "free_memory_bytes", "free_source"),
    *("max_buffer_bytes", "driver_version", "runtime_version", "select_env", "health"),
)


def new_host(**known: Any) -> Part:  # noqa: ANN401  # the report's values have many types
    """Return a `host` part; raises KeyError for a key that the contract does not name."""
    return _new(_HOST_KEYS, known)


def new_device(**known: Any) -> Part:  # noqa: ANN401
    """Return one entry of `devices`, of unknown health and with nothing to select it by unless told otherwise."""
    return _new(_DEVICE_KEYS, {"select_env": {}, "health": "unknown", **known})


def _new(keys: tuple[str, ...], known: Part) -> Part:
    if unknown := known.keys() - set(keys):
        raise KeyError(*sorted(unknown))
    return {key: known.get(key) for key in keys}


def finish_device(device: Part, notes: Notes) -> None:
    """Hold `usable <= memory` and `free <= usable`, and add the figures for people (GiB)."""
    memory, usable = device["memory_bytes"], device["usable_memory_bytes"]
    if memory is not None and usable is not None and usable > memory:
        notes.add(
            "usable_exceeds_memory",
            device["id"],
            f"{device['usable_source']} calls more memory usable than there is; it is taken as all of it.",
            f"{usable} of {memory} bytes",
        )
        device["usable_memory_bytes"] = memory
    bounds = [bound for bound in (device["usable_memory_bytes"], memory) if bound is not None]
    if device["free_memory_bytes"] is not None:
        device["free_memory_bytes"] = min([device["free_memory_bytes"], *bounds])
    device["memory_gb"] = gigabytes(memory)
    device["usable_memory_gb"] = gigabytes(device["usable_memory_bytes"])


def gigabytes(size: int | None) -> float | None:
    """Return bytes as GiB with two places, for people."""
    return None if size is None else round(size / 2**30, 2)


def size(value: object) -> int | None:
    """Return a number of bytes as it came from outside; None for what cannot be one. Zero stands for unknown."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _ABSURD_BYTES:
        return value
    return None


def flag(value: object) -> bool | None:
    """Return a truth value as it came from outside; None for what is none."""
    return value if isinstance(value, bool) else None


def texts(value: object) -> list[str]:
    """Return a list of texts as it came from outside; empty for what is none."""
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def text(value: object) -> str | None:
    """Return a text as it came from outside, at most 200 characters; None for what is none, or empty."""
    return (value.strip()[:200] or None) if isinstance(value, str) else None
