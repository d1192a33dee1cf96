"""The plan: which job goes where, in which order, what is refused and why. A value with a JSON form."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpulayer.errors import Stage
from gpulayer.gpu.facts import HostFacts
from gpulayer.spec.inventory import Host


class Kind(enum.IntEnum):
    """How near a refusal is to yes: wait, fix the host, change the job, never."""

    BUSY = 0
    HOST = 1
    JOB = 2
    NEVER = 3


class Action(enum.StrEnum):
    """What `apply` does with a job."""

    RUN = "run"
    QUEUE = "queue"
    FOLLOW = "follow"
    UP_TO_DATE = "up_to_date"
    RETRY = "retry"
    FAILED = "failed"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a job does not fit on a device or host. `needed` and `found` are values; sentences are made at the edge.

    `code` is one of the contract's words. `device` is None where the reason is the host's.
    """

    code: str
    kind: Kind
    device: str | None = None
    needed: Any = None
    found: Any = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """A run of this project that a host knows. `status` is a word of `remote/states.py`."""

    run: str
    job: str
    key: str
    attempt: int
    host: str
    status: str
    devices: tuple[str, ...] = ()
    code: int | None = None
    signal: int | None = None
    reason: str | None = None
    started_at: str | None = None
    ended_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """All that planning knows of one host at one moment.

    `holders` maps a device id to whoever holds it (a run id, or a process of somebody else); `slots_held` counts
    CPU slots that are taken. `domain` is (boot id, lease folder): two names of one machine share it.
    """

    host: Host
    reached: bool
    stage: Stage | None = None
    error: str | None = None
    facts: HostFacts | None = None
    domain: tuple[str, str] | None = None
    holders: Mapping[str, str] = field(default_factory=dict)
    slots_held: int = 0
    runs: tuple[KnownRun, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A host and the devices taken on it, by id. A CPU job takes no device: `devices` is empty."""

    host: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One job's line in the plan. `position` orders the queue, from 1; None where the job does not wait.

    `run` is the run id that is launched or followed (None for refused jobs).
    """

    job: str
    key: str
    shape: str
    action: Action
    accelerator: str | None = None
    placement: Placement | None = None
    position: int | None = None
    run: str | None = None
    tree: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRefusal:
    """Equal refusals of several hosts as one entry; with several hosts `device` is None and `found` is a range."""

    hosts: tuple[str, ...]
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeVerdict:
    """Where jobs of one shape fit, and every reason of every host where they do not."""

    fits: tuple[str, ...]
    refusals: tuple[GroupedRefusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHost:
    """A host as the plan saw it. `fingerprint` holds the stable facts that the plan stands on (None: no placement)."""

    name: str
    reached: bool
    fingerprint: Mapping[str, Any] | None = None
    probed_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The saved decision. `documents` are (path, sha256) pairs."""

    created_at: str
    project: str
    documents: tuple[tuple[str, str], ...]
    hosts: tuple[PlannedHost, ...]
    jobs: tuple[PlannedJob, ...]
    shapes: Mapping[str, ShapeVerdict]
    applicable: bool
