"""The plan: wanted jobs against known runs and the fleet as it is now. Pure; linear in the jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpulayer.gpu.facts import HostFacts, fingerprint
from gpulayer.placement.gangs import known_now
from gpulayer.placement.matching import Match, Matcher
from gpulayer.placement.packing import Packing, Place
from gpulayer.placement.plan import (
    Action,
    Doubt,
    HostView,
    KnownRun,
    Placement,
    Plan,
    PlannedHost,
    PlannedJob,
    why_unreached,
)
from gpulayer.placement.queue import Queue
from gpulayer.remote.states import EXITED, FINAL
from gpulayer.spec.documents import collector_paused
from gpulayer.spec.identity import asked_python, run_id
from gpulayer.spec.jobs import JobSet, JobSpec
from gpulayer.spec.support import Accelerator

# What needs a place; the others have theirs or need none.
TO_PLACE: Final = frozenset({Action.RUN, Action.RETRY})
DOUBTFUL: Final = frozenset({"degraded", "unknown"})


class _Decision(NamedTuple):
    """What becomes of a job, before it has a place. `seen` is the run that decided; `earlier` had other keys."""

    match: Match
    action: Action
    attempt: int
    seen: KnownRun | None
    earlier: Sequence[KnownRun]


@collector_paused()
def make_plan(
    jobs: JobSet,
    views: Sequence[HostView],
    *,
    keys: Mapping[str, str],
    trees: Mapping[str, str | None],
    documents: Sequence[tuple[str, str]],
    now: str,
    history: Iterable[KnownRun] = (),
    retry_failed: bool = False,
    applicable: bool = True,
) -> Plan:
    """Decide for every job what becomes of it, and where those that can start now start.

    `keys` and `trees` are by job name; `documents` are (path, sha256) pairs; `now` is the time as RFC 3339. `views`
    hold all hosts of the inventory, with the runs of this project that each knows; `history` are the runs that are
    known here. A run whose end is not known is followed, never started again: its host may not answer, may have left
    the inventory, or may have lost its records.
    """
    matcher = Matcher(views)
    decisions = _decide(jobs, keys, _runs_by_job(views, history), matcher, retry_failed=retry_failed)
    packing = Packing(views, matcher=matcher)
    queue = Queue(packing)
    places: dict[str, Place] = {}
    by_name = {view.host.name: view for view in views}
    for position, (name, decision) in enumerate(decisions.items()):
        job = jobs.jobs[name]
        if decision.action is Action.FOLLOW and decision.seen is not None:
            view = by_name.get(decision.seen.host)
            places[name] = _where_it_runs(job, decision.seen, view.seen_by(asked_python(job)) if view else None)
            packing.adopt(job, *places[name])
        elif decision.action in TO_PLACE:
            queue.add(job, position)
    places |= {start.job.name: (start.accelerator, start.placements) for start in queue.ready()}
    waiting = {name: position for position, name in enumerate((name for name in decisions if name in queue), 1)}
    lines = tuple(
        _line(jobs.jobs[name], keys[name], trees[name], decision, place=places.get(name), position=waiting.get(name))
        for name, decision in decisions.items()
    )
    return Plan(
        created_at=now,
        project=jobs.project,
        documents=tuple(documents),
        hosts=_hosts(views, lines, jobs),
        jobs=lines,
        shapes={decision.match.shape: decision.match.verdict for decision in decisions.values()},
        applicable=applicable,
    )


def _decide(
    jobs: JobSet,
    keys: Mapping[str, str],
    runs: Mapping[str, list[KnownRun]],
    matcher: Matcher,
    *,
    retry_failed: bool,
) -> dict[str, _Decision]:
    """Compare every job with the known runs, and see whether it fits anywhere at all; in the document's order."""
    decisions = {}
    for job in jobs.jobs.values():
        match = matcher.match(job)
        known = runs.get(job.name, ())
        same = [run for run in known if run.key == keys[job.name]]
        action, seen = _compare(same, retry_failed=retry_failed)
        if action in TO_PLACE and not match.verdict.fits:
            action = Action.REFUSE
        attempt = max(run.attempt for run in same) + 1 if same else 1
        earlier = [run for run in known if run.key != keys[job.name]]
        decisions[job.name] = _Decision(match, action, attempt, seen, earlier)
    return decisions


def _compare(same: Sequence[KnownRun], *, retry_failed: bool) -> tuple[Action, KnownRun | None]:
    """Return what a job's runs with its present key ask for, and the run that says so.

    What still runs, or may still run, is followed; what once exited 0 is up to date; the latest end decides otherwise.
    """
    if not same:
        return Action.RUN, None
    runs = sorted(same, key=lambda run: run.attempt, reverse=True)
    for run in runs:
        if run.status not in FINAL:
            return Action.FOLLOW, run
    for run in runs:
        if run.status == EXITED and run.code == 0:
            return Action.UP_TO_DATE, run
    return (Action.RETRY if retry_failed else Action.FAILED), runs[0]


def _runs_by_job(views: Sequence[HostView], history: Iterable[KnownRun]) -> dict[str, list[KnownRun]]:
    """Return the known runs by job, each on the host that tells of it; what two names of a machine tell counts once.

    What no host tells of is known from the history, unless a host that answers was the only one to have it and it never
    began there: then its launch did not arrive or was refused.
    """
    history = list(history)
    answering = {view.host.name for view in views if view.reached}
    seen = {run.run: run for run in history if run.host and (run.started_at or run.host not in answering)}
    seen |= {run.run: run for run in known_now(views, history)}
    by_job: dict[str, list[KnownRun]] = {}
    for run in seen.values():
        by_job.setdefault(run.job, []).append(run)
    return by_job


def _where_it_runs(job: JobSpec, run: KnownRun, facts: HostFacts | None) -> Place:
    """Return the place of a run that goes on; without its host's facts the devices' accelerator is the job's first."""
    kinds = {device.id: device.accelerator for device in facts.devices} if facts else {}
    gpu = next((accelerator for accelerator in job.accelerators if accelerator is not Accelerator.CPU), None)
    if not run.devices or gpu is None:
        accelerator = Accelerator.CPU
    else:
        accelerator = Accelerator(kinds.get(run.devices[0], gpu.value))
    return accelerator, tuple(Placement(host=one.host, devices=one.devices) for one in run.parts)


def _line(
    job: JobSpec,
    key: str,
    tree: str | None,
    decision: _Decision,
    *,
    place: Place | None,
    position: int | None,
) -> PlannedJob:
    action, run, attempt = decision.action, None, None
    accelerator, placements = place or (None, ())
    if action in TO_PLACE:
        run, attempt = run_id(job.name, key, decision.attempt), decision.attempt
        if place is None:
            action = Action.QUEUE
            accelerator = next(word for word in job.accelerators if decision.match.ways[word])
    elif decision.seen is not None and action is not Action.REFUSE:
        run, attempt = decision.seen.run, decision.seen.attempt
    return PlannedJob(
        job=job.name,
        key=key,
        shape=decision.match.shape,
        action=action,
        accelerator=accelerator,
        placements=placements,
        nodes=job.nodes,
        position=position,
        run=run,
        attempt=attempt,
        tree=tree,
        changed=bool(decision.earlier),
        still_running=tuple(run.run for run in decision.earlier if run.status not in FINAL),
    )


def _hosts(views: Sequence[HostView], lines: Sequence[PlannedJob], jobs: JobSet) -> tuple[PlannedHost, ...]:
    """Return the hosts as the plan sees them, with the fingerprints of those on which something is started."""
    devices: dict[str, set[str]] = {}
    pythons: dict[str, set[str]] = {}
    for line in lines:
        for placement in line.placements if line.action is not Action.FOLLOW else ():
            devices.setdefault(placement.host, set()).update(placement.devices)
            pythons.setdefault(placement.host, set()).update(filter(None, [asked_python(jobs.jobs[line.job])]))
    return tuple(
        PlannedHost(
            name=view.host.name,
            reached=view.reached,
            error=None if view.reached else why_unreached(view),
            fix=view.fix,
            fingerprint=_fingerprint(view, devices[view.host.name], pythons[view.host.name])
            if view.host.name in devices
            else None,
            probed_at=view.facts.probed_at if view.facts else None,
            doubts=_doubts(view),
        )
        for view in views
    )


def _fingerprint(view: HostView, devices: Collection[str], pythons: Collection[str]) -> dict[str, Any] | None:
    if view.facts is None:
        return None
    return fingerprint(view.facts, devices, {python: view.seen_by(python) for python in pythons})


def _doubts(view: HostView) -> tuple[Doubt, ...]:
    """Return the devices of doubtful health, in whichever interpreter that was seen."""
    doubts = {
        Doubt(device=device.id, health=device.health): None
        for facts in (view.facts, *view.pythons.values())
        for device in (facts.devices if facts else ())
        if device.accelerator != Accelerator.CPU.value and device.health in DOUBTFUL
    }
    return tuple(doubts)
