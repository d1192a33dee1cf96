"""The plan: which job goes where, in which order, what is refused and why. A value with a JSON form."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpulayer.errors import Stage
from gpulayer.gpu.facts import FrameworkFact, HostFacts, fingerprint
from gpulayer.spec.inventory import Host
from gpulayer.spec.support import Framework


class Code(enum.StrEnum):
    """Why a job does not fit. `unknown` is what could not be decided; `Refusal.about` says which question."""

    UNREACHABLE = "unreachable"
    ACCELERATOR = "accelerator"
    CAPABILITY = "capability"
    GPU_COUNT = "gpu-count"
    GPU_MEMORY = "gpu-memory"
    MEMORY_KIND = "memory-kind"
    COMPUTE_CAPABILITY = "compute-capability"
    DTYPE = "dtype"
    CPUS = "cpus"
    MEMORY = "memory"
    DISK = "disk"
    LABELS = "labels"
    WHERE = "where"
    DRAIN = "drain"
    HEALTH = "health"
    EXPECT = "expect"
    BUSY = "busy"
    DISTRIBUTED = "distributed"
    UNKNOWN = "unknown"


# How many different values an entry that covers several hosts shows.
SHOWN = 16


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

    Sizes are bytes. `accelerator` is the one under which the reason holds, None where it holds for the host whatever
    the accelerator; `device` is None where the reason is the host's. `memory_kind` is the kind of the memory that a
    memory refusal is about (ADR-0006: never presented as each other). `about` is the question that `unknown` leaves
    open.
    """

    code: Code
    kind: Kind
    accelerator: str | None = None
    device: str | None = None
    needed: Any = None
    found: Any = None
    memory_kind: str | None = None
    about: Code | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFailure:
    """What ended a gang: the rank that failed first, its host, and how it ended.

    `rank` is None where no rank of the user's program failed, but the host was lost or its torchrun failed by itself.
    """

    rank: int | None
    host: str
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank of a node stands. `status` is a word of `remote/states.py`."""

    rank: int
    status: str
    code: int | None = None
    signal: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """A run of this project that a host knows. `status` is a word of `remote/states.py`.

    `nodes` is how many hosts a gang has: it is None for the run of an independent job. A node's run has its number in
    `node`, from 0, and its `ranks`. A gang as a whole has no `node`; its `members` are its nodes' runs, in node order,
    and `placement/gangs.py` says how their words become one. Its host and devices are those of its first node.

    `foreign_process` and `left` are what its host told besides, in the form of docs/protocol.md, "State of a run"; None
    where that is not known here.
    """

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
    node: int | None = None
    nodes: int | None = None
    first_failure: FirstFailure | None = None
    ranks: tuple[RankEnd, ...] = ()
    members: tuple[KnownRun, ...] = ()
    foreign_process: Sequence[Mapping[str, object]] | None = field(default=None, compare=False)
    left: Mapping[str, object] | None = field(default=None, compare=False)

    @property
    def parts(self) -> tuple[KnownRun, ...]:
        """The runs that hosts know: a gang's nodes', else the run itself."""
        return self.members or (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """All that planning knows of one host at one moment.

    `facts` are those of the inventory's interpreter, `pythons` those of other interpreters that jobs name, by that
    name. `holders` maps a device id to whoever holds it (a run id, or a process of somebody else); `slots_held` counts
    CPU slots that are taken. `domain` is (boot id, lease folder): two names of one machine share it.
    """

    host: Host
    reached: bool
    stage: Stage | None = None
    error: str | None = None
    fix: str | None = None
    facts: HostFacts | None = None
    pythons: Mapping[str, HostFacts] = field(default_factory=dict)
    domain: tuple[str, str] | None = None
    holders: Mapping[str, str] = field(default_factory=dict)
    slots_held: int = 0
    runs: tuple[KnownRun, ...] = ()

    @property
    def slots(self) -> int:
        """How many CPU jobs the host takes at once: `max_jobs`, else its logical CPUs, else one."""
        return self.host.max_jobs or (self.facts.cpu_logical if self.facts else None) or 1

    def seen_by(self, python: str | None) -> HostFacts | None:
        """Return the facts as an interpreter sees them that a job names; None is the inventory's.

        Of one that was not asked nothing is known: not what it has, nor what it lacks.
        """
        if self.facts is None or python is None:
            return self.facts
        return self.pythons[python] if python in self.pythons else _unasked(self.facts)


def _unasked(facts: HostFacts) -> HostFacts:
    return replace(
        facts,
        python=None,
        python_version=None,
        python_real_path=None,
        frameworks={name: FrameworkFact(name=name, version=None, status="not_probed") for name in Framework},
        capabilities=frozenset(),
    )


def why_unreached(view: HostView) -> str:
    """Return at which stage the way to a host ended, and why."""
    return ": ".join(filter(None, (view.stage, view.error))) or "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A host and the devices taken on it, by id. A CPU job takes no device: `devices` is empty."""

    host: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One job's line in the plan. `position` orders the queue, from 1; None where the job does not wait.

    `run` is the run id that is launched, followed, or that ended before (None for refused jobs), and `attempt` its
    number, from 1. `placements` are where the job is to run (`run`, `retry`) or runs (`follow`): one, or one a node of
    a gang, in node order; none otherwise. `nodes` is how many hosts a gang takes, None for an independent job.
    `accelerator` is the one it is placed under; for `queue` the first of its list that fits anywhere. `changed`: it ran
    before as another declaration of the same name; `still_running` are runs of such that have not ended.
    """

    job: str
    key: str
    shape: str
    action: Action
    accelerator: str | None = None
    placements: tuple[Placement, ...] = ()
    nodes: int | None = None
    position: int | None = None
    run: str | None = None
    attempt: int | None = None
    tree: str | None = None
    changed: bool = False
    still_running: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRefusal:
    """Equal refusals of several hosts or devices as one entry; `device` is then None and `found` covers all of them.

    `found` is the value itself where all found the same, `{"from": low, "to": high}` for numbers, and otherwise
    `{"any_of": [value…]}` with the first `SHOWN` different values and, where there are others, how many (`"more"`).
    """

    hosts: tuple[str, ...]
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeVerdict:
    """Where jobs of one shape fit, and every reason of every host where they do not."""

    fits: tuple[str, ...]
    refusals: tuple[GroupedRefusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A device that may be used although its health is not proven: `degraded` or `unknown` (a warning, no refusal)."""

    device: str
    health: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHost:
    """A host as the plan saw it. `fingerprint` holds the stable facts that the plan stands on (None: no placement).

    Of a host that was not reached `error` says at which stage and why, and `fix` what to do.
    """

    name: str
    reached: bool
    error: str | None = None
    fix: str | None = None
    fingerprint: Mapping[str, Any] | None = None
    probed_at: str | None = None
    doubts: tuple[Doubt, ...] = ()


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

    @property
    def summary(self) -> dict[str, int]:
        """How many jobs have each action; all actions are there."""
        counts = Counter(job.action for job in self.jobs)
        return {action.value: counts[action] for action in Action}


def stale(plan: Plan, views: Sequence[HostView], documents: Sequence[tuple[str, str]]) -> list[str]:
    """Say in words what has changed since the plan was made, of all that it stands on; empty: it still holds.

    `documents` are (path, sha256) pairs as in the plan. Volatile facts (free memory, leases) are not compared: the host
    checks them at launch.
    """
    now = dict(documents)
    changes = []
    for path, sha256 in plan.documents:
        if path not in now:
            changes.append(f"{path}: is gone, or not what is used now")
        elif now[path] != sha256:
            changes.append(f"{path}: was changed")
    by_name = {view.host.name: view for view in views}
    for host in plan.hosts:
        if host.fingerprint is not None:
            changes += _changes(host.name, host.fingerprint, by_name.get(host.name))
    return changes


def _changes(name: str, then: Mapping[str, Any], view: HostView | None) -> list[str]:
    """Compare a host's fingerprint with what it is now."""
    if view is None:
        return [f"{name}: is no longer in the inventory"]
    if view.facts is None:
        return [f"{name}: cannot be reached now ({view.error or 'no answer'})"]
    now = fingerprint(view.facts, then["devices"], {python: view.seen_by(python) for python in then["pythons"]})
    changes = [f"{name}: device {device} is gone" for device in then["devices"] if device not in now["devices"]]
    before, after = _flat(then), _flat(now)
    changes += [
        f"{name}: {key} was {_word(before.get(key))}, is {_word(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    return changes


def _flat(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return all of a fingerprint but its devices as one level of named values."""
    flat = {key: value for key, value in fingerprint.items() if key not in {"devices", "frameworks", "pythons"}}
    flat |= fingerprint["frameworks"]
    for python, its in fingerprint.get("pythons", {}).items():
        flat |= {f"{key} of {python}": value for key, value in _flat(its).items()}
    return flat


def _word(value: object) -> str:
    return "unknown" if value is None else str(value)
