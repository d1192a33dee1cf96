"""Facts of a host as typed values, made from its probe report. Pure.

A fact is known, absent, or unknown (None); unknown is never 0 and never satisfies a demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Health = Literal["ok", "degraded", "unusable", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that the probe observed; codes are the closed set of `probe.schema.json`."""

    code: str
    subject: str
    severity: Literal["info", "warning", "error"]
    message: str
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU (or MIG instance), or the CPU of a host. Sizes are bytes; None is unknown.

    `usable_bytes` is what a workload can really get (Metal's recommended working set on a Mac).
    """

    id: str
    accelerator: str
    index: int
    name: str | None = None
    parent_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    virtual: bool | None = None
    memory_kind: str | None = None
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    free_bytes: int | None = None
    health: Health = "unknown"
    select_env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkFact:
    """One framework as the probed interpreter sees it. `ops` holds proven results by operator or dtype."""

    name: str
    version: str | None
    status: str
    ops: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host is, as its report says. Devices are in the report's order."""

    hostname: str | None
    os: str | None
    arch: str | None
    boot_id: str | None
    machine_id: str | None
    cpu_logical: int | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    memory_available_bytes: int | None
    disk_free_bytes: int | None
    python: str | None
    python_version: str | None
    driver_version: str | None
    devices: tuple[Device, ...]
    frameworks: Mapping[str, FrameworkFact]
    capabilities: frozenset[str]
    notes: tuple[Note, ...]
    complete: bool
    probed_at: str
