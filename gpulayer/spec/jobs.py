"""Jobs: what the user declares, as typed values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulayer.spec.support import Accelerator, Backend, Framework, MemoryKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What a job demands of a device and its host. Sizes are GiB (2^30 bytes); None and () demand nothing.

    `gpus` None means the default of the chosen accelerator: 1 on a GPU, 0 on cpu.
    `compute_capability` is a minimum, `(8, 0)` for `">=8.0"`.
    """

    gpus: int | None = None
    gpu_memory_gb: float | None = None
    gpu_memory_kind: MemoryKind | None = None
    compute_capability: tuple[int, int] | None = None
    cpus: int | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None
    capabilities: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which hosts a job may go to. Every label must match; an empty `hosts` allows all."""

    labels: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    not_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """Shape of a gang: `nodes` distinct hosts with `processes_per_node` ranks each."""

    nodes: int = 1
    processes_per_node: int | None = None
    backend: Backend | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentJob:
    """One process on one host. `command` as a tuple is executed, as a string run by /bin/sh.

    `accelerator` is given as a word or a sequence in the user's order of preference, and kept as a tuple.
    `timeout` and `grace` are seconds. `workdir` is a path on the controller, already resolved, or None.
    """

    name: str
    command: tuple[str, ...] | str
    accelerator: Accelerator | str | Sequence[Accelerator | str] = (Accelerator.CPU,)
    framework: Framework | None = None
    resources: ResourceRequest = field(default_factory=ResourceRequest)
    where: Where = field(default_factory=Where)
    python: str | None = None
    setup: str | None = None
    workdir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    timeout: float | None = None
    grace: float = 10.0
    retries: int = 0

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The accelerators in order of preference."""
        value: Any = self.accelerator
        return value  # type: ignore[no-any-return]  # __post_init__ made it a tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedJob(IndependentJob):
    """A gang of ranks under one fate, launched with torchrun."""

    distributed: Distributed = field(default_factory=Distributed)


JobSpec = IndependentJob | DistributedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSet:
    """All jobs of one document, in its order. `project` is the document's name, else its folder's."""

    project: str
    jobs: Mapping[str, JobSpec]
    path: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the jobs file, beside which `.gpulayer/` lies."""
        return (self.path.parent if self.path else Path()).resolve()


def run_id(job: str, key: str, attempt: int) -> str:
    """Return the id of one attempt, as docs/protocol.md says: `<job, at most 40>-<key, 12 digits>-a<attempt>`."""
    return f"{job[:40]}-{key[:12]}-a{attempt}"


def shape_of(job: JobSpec) -> str:
    """Return a short stable hash of what placement looks at; jobs with an equal shape fit in the same places."""
    resources = job.resources
    asked = {
        "accelerator": list(job.accelerators),
        "framework": job.framework,
        "resources": {name: getattr(resources, name) for name in resources.__slots__},
        "where": [sorted(job.where.labels.items()), job.where.hosts, job.where.not_hosts],
        "distributed": repr(job.distributed) if isinstance(job, DistributedJob) else None,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
