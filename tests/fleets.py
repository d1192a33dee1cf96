"""Fleets for tests of placement: probe reports, the views that they make, plans of jobs documents against them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpulayer.errors import Stage
from gpulayer.gpu.facts import facts_from_report
from gpulayer.placement.document import to_json
from gpulayer.placement.plan import HostView, KnownRun
from gpulayer.placement.scheduler import make_plan
from gpulayer.spec.documents import parse
from gpulayer.spec.identity import job_key
from gpulayer.spec.inventory import Expectation, Host
from gpulayer.spec.jobs import JobSet, parse_jobs
from tests.oracle import GIB, Known

NOW = "2026-11-30T10:00:00Z"


def gib(size: float | None) -> int | None:
    return None if size is None else int(size * GIB)


def device(accelerator: str, index: int = 0, **facts: Any) -> dict[str, Any]:
    """One entry of a report's `devices`; sizes are `memory` and `usable` in GiB."""
    memory, usable = gib(facts.pop("memory", None)), gib(facts.pop("usable", None))
    kind = {"mps": "unified", "cuda": "dedicated", "rocm": "dedicated"}.get(accelerator)
    prefix = {"mps": "apple:", "cuda": "GPU-", "rocm": "pci:", "cpu": "cpu:"}[accelerator]
    entry = {
        "id": f"{prefix}{index}",
        "accelerator": accelerator,
        "index": index,
        "parent_id": None,
        "name": None,
        "vendor": None,
        "architecture": None,
        "compute_capability": None,
        "gpu_cores": None,
        "metal_family": None,
        "uuid": None,
        "pci_bus_id": None,
        "virtual": None,
        "memory_kind": kind,
        "memory_bytes": memory,
        "memory_gb": None,
        "usable_memory_bytes": usable,
        "usable_memory_gb": None,
        "usable_source": None,
        "free_memory_bytes": None,
        "free_source": None,
        "max_buffer_bytes": None,
        "driver_version": None,
        "runtime_version": None,
        "select_env": {},
        "health": "ok",
    }
    return entry | facts


def framework(
    name: str, *, version: str = "2.13.0", status: str = "ok", ops: Any = None, ops_device: str | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "version": version,
        "python": None,
        "elapsed_ms": 1,
        "status": status,
        "signal": None,
        "detail": {"ops": ops or {}, "ops_device": ops_device},
    }


def report(
    *devices: dict[str, Any],
    memory: float | None = 64,
    limit: float | None = None,
    cpus: int | None = 8,
    disk: float | None = 100,
    capabilities: tuple[str, ...] = (),
    frameworks: tuple[dict[str, Any], ...] = (),
    notes: tuple[str, ...] = (),
    boot: str = "boot",
    arch: str | None = "x86_64",
) -> dict[str, Any]:
    """A probe report; sizes in GiB."""
    host = {
        "hostname": "h",
        "os": "linux",
        "os_name": "Linux",
        "os_version": None,
        "os_build": None,
        "kernel": None,
        "arch": arch,
        "process_arch": "x86_64",
        "translated": None,
        "virtualization": None,
        "machine_model": None,
        "boot_id": boot,
        "machine_id": None,
        "boot_time": None,
        "cpu_model": None,
        "cpu_physical": None,
        "cpu_logical": cpus,
        "cpu_performance": None,
        "cpu_efficiency": None,
        "memory_bytes": gib(memory),
        "memory_gb": memory,
        "memory_limit_bytes": gib(limit),
        "memory_available_bytes": None,
        "memory_pressure": None,
        "memory_includes_device_memory": None,
        "on_ac_power": None,
        "disk_free_bytes": gib(disk),
        "python": {
            "executable": "/usr/bin/python3",
            "version": "3.12.3",
            "implementation": "cpython",
            "arch": "x86_64",
        },
    }
    return {
        "schema": "gpulayer.probe/1",
        "probe_version": "1",
        "started_at": NOW,
        "elapsed_ms": 1,
        "complete": True,
        "host": host,
        "network": {
            "hostname_resolves": True,
            "hostname_is_loopback": False,
            "interfaces": [],
            "thunderbolt_rdma": None,
        },
        "devices": [*devices, device("cpu", memory=memory, usable=memory)],
        "frameworks": list(frameworks),
        "capabilities": sorted(capabilities),
        "notes": [
            {"code": code, "subject": "system", "severity": "warning", "message": "m", "detail": None} for code in notes
        ],
    }


def a_mac(memory: float = 32, usable: float | None = 21, *capabilities: str) -> dict[str, Any]:
    gpu = device("mps", memory=memory, usable=usable)
    return report(gpu, memory=memory, capabilities=capabilities, arch="arm64")


def a_cuda(memory: float = 24, gpus: int = 1, *capabilities: str) -> dict[str, Any]:
    cards = [device("cuda", i, memory=memory, usable=memory, compute_capability="8.9") for i in range(gpus)]
    return report(*cards, capabilities=capabilities)


def fleet_of(reports: Mapping[str, dict[str, Any] | None]) -> dict[str, Any]:
    """A `gpulayer.fleet/1` document; a host without a report could not be reached."""
    return {
        "schema": "gpulayer.fleet/1",
        "hosts": [
            {
                "name": name,
                "reached": one is not None,
                "stage": None if one else "connect",
                "error": None if one else "connection refused",
                "report": one,
            }
            for name, one in reports.items()
        ],
    }


def views_of(fleet: Mapping[str, Any], known: Mapping[str, Known] | None = None) -> list[HostView]:
    views = []
    for entry in fleet["hosts"]:
        beside = (known or {}).get(entry["name"], Known())
        views.append(
            HostView(
                host=Host(
                    name=entry["name"],
                    labels=dict(beside.labels),
                    drain=beside.drain,
                    max_jobs=beside.max_jobs,
                    expect=Expectation(**beside.expect) if beside.expect else None,
                ),
                reached=entry["reached"],
                stage=Stage(entry["stage"]) if entry["stage"] else None,
                error=entry["error"],
                facts=facts_from_report(entry["report"]) if entry["report"] else None,
                pythons={name: facts_from_report(one) for name, one in beside.pythons.items()},
                domain=("boot", beside.machine) if beside.machine else None,
                holders=dict.fromkeys(beside.held, "somebody"),
                slots_held=beside.slots_held,
            )
        )
    return views


def document_of(**jobs: dict[str, Any]) -> dict[str, Any]:
    """A jobs document; underscores in names become hyphens."""
    return {
        "version": 1,
        "name": "tests",
        "jobs": {name.replace("_", "-"): {"command": ["true"], **job} for name, job in jobs.items()},
    }


def gang(job: dict[str, Any], nodes: int = 2, **shape: Any) -> dict[str, Any]:
    """A job's entry as one of a gang of that many hosts."""
    return {**job, "distributed": {"nodes": nodes, **shape}}


def jobs_of(document: Mapping[str, Any]) -> JobSet:
    return parse_jobs(parse(json.dumps(document).encode(), "jobs.yaml"))


def keys_of(jobs: JobSet) -> dict[str, str]:
    return {name: job_key(job, jobs.project, None) for name, job in jobs.jobs.items()}


def plan_json(jobs: JobSet, views: list[HostView], **options: Any) -> dict[str, Any]:
    """The JSON of the plan, as text makes it."""
    plan = make_plan(
        jobs,
        views,
        keys=keys_of(jobs),
        trees=dict.fromkeys(jobs.jobs),
        documents=[("jobs.yaml", "0")],
        now=NOW,
        **options,
    )
    read: dict[str, Any] = json.loads(json.dumps(to_json(plan)))
    return read


def a_run(job: str, key: str, host: str, status: str, **fields: Any) -> KnownRun:
    attempt = fields.pop("attempt", 1)
    return KnownRun(
        run=f"{job}-{key[:12]}-a{attempt}", job=job, key=key, attempt=attempt, host=host, status=status, **fields
    )
