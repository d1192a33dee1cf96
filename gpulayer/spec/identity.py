"""What tells jobs and runs apart: a job's key, a run's id, and the shape that placement looks at. Pure."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import fields
from typing import Any, Final

from gpulayer.spec.jobs import DistributedJob, JobSpec, ResourceRequest
from gpulayer.spec.support import Accelerator, Framework

_SLUG_LENGTH: Final = 40
_KEY_DIGITS: Final = 12

# Kept out of the hash where it is as it would be by default, so that a new field changes no job's key.
_DEFAULTS: Final = ResourceRequest()
_DEMANDS: Final = tuple(one.name for one in fields(ResourceRequest))
_SIZES: Final = frozenset({"gpu_memory_gb", "memory_gb", "disk_gb"})
_encode: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _demands(resources: ResourceRequest) -> dict[str, Any]:
    demands: dict[str, Any] = {}
    for name in _DEMANDS:
        value = getattr(resources, name)
        if value != getattr(_DEFAULTS, name):
            demands[name] = float(value) if name in _SIZES else value  # 8 and 8.0 GiB are one demand
    return demands


def _gang(job: JobSpec) -> list[Any] | None:
    if not isinstance(job, DistributedJob):
        return None
    gang = job.distributed
    mixed = [gang.mixed_arch] if gang.mixed_arch else []
    return [gang.nodes, gang.processes_per_node, gang.backend, *mixed]


def job_key(job: JobSpec, project: str, tree: str | None) -> str:
    """Return the job's key, 64 hex digits: what it computes, not where, how long or how often.

    `tree` is the sha256 of the shipped folder's manifest, None where nothing is shipped. Jobs with one key do the same
    work, so one that has succeeded is up to date.
    """
    content = {
        "project": project,
        "job": job.name,
        "command": job.command,
        "env": dict(job.env),
        "secrets": sorted(job.secrets),
        "accelerator": job.accelerators,
        "framework": job.framework,
        "python": job.python,
        "setup": job.setup,
        "resources": _demands(job.resources),
        "distributed": _gang(job),
        "tree": tree,
    }
    return hashlib.sha256(_encode(content).encode()).hexdigest()


def run_id(job_name: str, key: str, attempt: int) -> str:
    """Return the id of an attempt (from 1), as docs/protocol.md says; it matches `[a-z0-9][a-z0-9-]{0,62}`."""
    return f"{job_name[:_SLUG_LENGTH].rstrip('-')}-{key[:_KEY_DIGITS]}-a{attempt}"


def node_run(run: str, node: int) -> str:
    """Return the id of the run that one node (from 0) has of a gang's run; up to attempt 9,999 it is an id like any."""
    return f"{run}-n{node}"


def gang_run(run: str, node: int) -> str:
    """Return the gang's run id of a node's."""
    return run.removesuffix(f"-n{node}")


def asked_python(job: JobSpec) -> str | None:
    """Return the job's own interpreter where something is asked of it: a framework, or capabilities.

    None: the inventory's, which also answers for jobs that ask nothing of theirs.
    """
    return job.python if job.framework or job.resources.capabilities else None


def shape_of(job: JobSpec) -> str:
    """Return 12 hex digits for what placement looks at; jobs of one shape fit on the same hosts."""
    where, gang = job.where, _gang(job)
    return _shape(
        job.accelerators,
        job.framework,
        asked_python(job),
        job.resources,
        tuple(sorted(where.labels.items())) if where.labels else (),
        tuple(sorted(where.hosts)) if where.hosts else (),
        tuple(sorted(where.not_hosts)) if where.not_hosts else (),
        tuple(gang) if gang else None,
    )


@functools.lru_cache(maxsize=4096)
def _shape(  # noqa: PLR0917 - the parts of a shape, in the order in which they are hashed
    accelerators: tuple[Accelerator, ...],
    framework: Framework | None,
    python: str | None,
    resources: ResourceRequest,
    labels: tuple[tuple[str, str], ...],
    hosts: tuple[str, ...],
    not_hosts: tuple[str, ...],
    gang: tuple[Any, ...] | None,
) -> str:
    content: list[Any] = [accelerators, framework, _demands(resources), labels, hosts, not_hosts, gang]
    content += [python] if python else []
    return hashlib.sha256(_encode(content).encode()).hexdigest()[:_KEY_DIGITS]
