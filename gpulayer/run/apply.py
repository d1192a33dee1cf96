"""Carry out a plan, or go on with it: one stream of events, whose reader may leave at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpulayer.errors import GpulayerError, StalePlanError, UsageError
from gpulayer.fleet.session import Fleet
from gpulayer.fleet.tree import Tree
from gpulayer.placement.gangs import known_now
from gpulayer.placement.plan import Action, HostView, KnownRun, Plan, stale
from gpulayer.remote import states
from gpulayer.run.channel import Channel
from gpulayer.run.events import Event
from gpulayer.run.executor import Executor, report_summary
from gpulayer.run.follow import PATIENCE, Follower, Links, Reporter
from gpulayer.run.launch import Launcher, check_secrets
from gpulayer.run.lock import launching
from gpulayer.run.planning import changed_code, check_applicable, code_of, documents_of, question_for
from gpulayer.run.store import Store
from gpulayer.run.survey import Question, new_here, reached, survey
from gpulayer.run.work import (
    Outcome,
    Step,
    Work,
    ended,
    known_elsewhere,
    may_change,
    needed_hosts,
    outcome_of,
    planned_outcome,
    silent,
    why_unknown,
    works_of,
)
from gpulayer.spec.inventory import Inventory
from gpulayer.spec.jobs import JobSet

STARTS: Final = frozenset({Action.RUN, Action.QUEUE, Action.RETRY})
NOT_STARTED: Final = dict.fromkeys((Step.START, Step.QUEUE), Outcome.NOT_STARTED)
PLAN_ANEW: Final = "plan anew: gpulayer plan"
PARTIAL: Final = "--partial runs what can be placed"
NAMED: Final = 5  # how many jobs a sentence names


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all of this module works with. `patience` is how many seconds a silent host is waited for."""

    jobs: JobSet
    inventory: Inventory
    fleet: Fleet
    store: Store
    reporter: Reporter
    detach: bool = False
    patience: float = PATIENCE


async def stream(store: Store, act: Callable[[Reporter], Awaitable[None]]) -> AsyncGenerator[Event, None]:
    """Yield the events that `act` reports while it runs, and raise its error after them. Leaving ends `act`."""
    channel = Channel()
    task = asyncio.ensure_future(act(Reporter(store=store, channel=channel)))
    task.add_done_callback(lambda _: channel.close())
    try:
        async for event in channel.read():
            yield event
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def carry_out(scene: Scene, plan: Plan, *, partial: bool) -> None:
    """Apply a plan. Where it cannot be carried out as a whole nothing is started, unless `partial`.

    UsageError for unset secrets and plans that may not be applied, StalePlanError where what it stands on has changed.
    """
    jobs = scene.jobs
    check_applicable(plan, jobs)
    check_secrets(jobs.jobs[job.job] for job in plan.jobs if job.action in STARTS and job.job in jobs.jobs)
    with launching(scene.store.paths, jobs.project) as other:
        if other is not None:
            raise UsageError(
                f"process {other} is carrying out a plan of {jobs.project} already",
                fix="follow it with `gpulayer attach`, or wait until it has ended",
            )
        code = await code_of(jobs, scene.inventory)
        if changes := _changes(scene, plan, {}) + changed_code(plan, jobs, code):
            raise _stale(changes)
        if not partial and _nothing_started(scene, plan):
            return
        history, collected = scene.store.runs(jobs.project), scene.store.collected()
        must, may = needed_hosts(plan)
        known = {job.run for job in plan.jobs}
        may |= {part.host for run in history if run.run in known - collected for part in run.parts}
        may |= {kept.run.host for kept in scene.store.kept_cancels()}
        if known_elsewhere(plan, history):
            may |= {host.name for host in plan.hosts if host.reached}
        hosts = [host for name, host in scene.inventory.hosts.items() if name in must | may]
        views = reached([answer.view for answer in await survey(scene.fleet, hosts, question_for(jobs))])
        if changes := _changes(scene, plan, views):
            raise _stale(changes)
        works = works_of(plan, jobs, views, history, resume=False)
        _hold_back(scene, plan, works, views, must)
        if not partial and any(work.outcome in {Outcome.UNREACHABLE, Outcome.UNKNOWN} for work in works):
            scene.reporter.warn("nothing was started: a host that is needed does not answer", fix=PARTIAL)
            outcomes = (work.outcome or (NOT_STARTED.get(work.step) or outcome_of(work.run)) for work in works)
            report_summary(scene.reporter, list(outcomes))
            return
        scene.store.forget_cancels(work.run.run for work in works if work.step in {Step.START, Step.QUEUE})
        await _execute(scene, plan, works, views, code.trees)


def _nothing_started(scene: Scene, plan: Plan) -> bool:
    """Report that nothing is started where a job cannot be placed; tell whether that is so."""
    refused = [job.job for job in plan.jobs if job.action is Action.REFUSE]
    if refused:
        named = ", ".join(refused[:NAMED]) + (f" and {len(refused) - NAMED} more" if len(refused) > NAMED else "")
        why = f"nothing was started: {named} cannot be placed"
        scene.reporter.warn(why, fix=f"`gpulayer plan` shows why; {PARTIAL}")
        report_summary(scene.reporter, [planned_outcome(plan, job) for job in plan.jobs])
    return bool(refused)


def _stale(changes: Sequence[str]) -> StalePlanError:
    return StalePlanError("the plan is stale:\n  " + "\n  ".join(changes), fix=PLAN_ANEW)


def _hold_back(
    scene: Scene, plan: Plan, works: Sequence[Work], views: Mapping[str, HostView], must: Collection[str]
) -> None:
    """Start nothing where too few hosts answer that could take it, and say of which hosts and runs nothing is known."""
    gone = scene.inventory.hosts.keys() & set(must) - set(views)
    for work in works:
        if work.place:
            hosts_of = {place.host for place in work.place[1]}
        else:
            hosts_of = set(plan.shapes[work.shape].fits) if work.shape else set()
        needed = len(hosts_of) if work.place else work.run.nodes or 1
        if work.step in {Step.START, Step.QUEUE} and len(hosts_of & set(views)) < needed:
            work.step, work.outcome = Step.NOTHING, Outcome.UNREACHABLE
            gone |= hosts_of - set(views)
        elif work.outcome is Outcome.UNKNOWN and work.run.host not in gone:
            fix = f"make it answer, or give the run up: gpulayer cancel {work.run.run}"
            scene.reporter.warn(f"how it stands is not known: {work.run.reason}", fix=fix, run=work.run)
    for host in sorted(gone):
        scene.reporter.warn("does not answer, and the plan needs it", host=host, fix=f"gpulayer probe {host}")


def _changes(scene: Scene, plan: Plan, views: Mapping[str, HostView]) -> list[str]:
    """Say what has changed of all that a plan stands on, on the hosts that answered."""
    asked = replace(plan, hosts=tuple(host for host in plan.hosts if host.name in views))
    return stale(asked, list(views.values()), documents_of(scene.jobs, scene.inventory))


async def go_on(scene: Scene, plan: Plan | None) -> None:
    """Follow whatever runs of this project, fetch what has ended since, and go on with the queue of the plan.

    What hosts know and the history here does not is taken in hand too. The summary covers all jobs of the plan.
    Where documents or code have changed since it was made the queue stays, and StalePlanError says so at the end.
    """
    jobs, store = scene.jobs, scene.store
    with launching(store.paths, jobs.project) as other:
        history = store.runs(jobs.project)
        waiting = {run.job for run in history if run.status in {states.QUEUED, states.LAUNCHING}}
        resume = plan is not None and bool(waiting) and other is None
        question = question_for(jobs) if resume else Question(project=jobs.project, frameworks=None)
        if resume:
            check_secrets(job for name, job in jobs.jobs.items() if name in waiting)
        answers = await survey(scene.fleet, scene.inventory.hosts.values(), question)
        views = reached([answer.view for answer in answers])
        store.take(jobs.project, new_here(views.values(), history))
        history = store.runs(jobs.project)
        works: list[Work] = []
        trees: Mapping[str, Tree] = {}
        changes: list[str] = []
        if plan is not None and resume:
            trees, changes = await _ground(scene, plan, views)
            if not changes:
                works = _queue(works_of(plan, jobs, views, history, resume=True), waiting)
        if other is not None:  # its launches are under way
            history = [run for run in history if run.status != states.LAUNCHING]
        works += _others(works, views, history, store.collected(), scene.inventory.hosts)
        if plan is not None:
            works += ended(plan, history, {work.run.job for work in works})
        await _execute(scene, plan, works, views, trees)
        if other is not None and waiting:
            scene.reporter.warn(f"the queue is in the hands of process {other}")
    if changes:
        raise StalePlanError("the queue was left alone, the plan is stale:\n  " + "\n  ".join(changes), fix=PLAN_ANEW)


async def _ground(
    scene: Scene, plan: Plan, views: Mapping[str, HostView]
) -> tuple[Mapping[str, Tree], list[str]]:  # fmt: skip
    """Return the code that jobs ship now, and what has changed of all that a plan stands on."""
    try:
        check_applicable(plan, scene.jobs)
        code = await code_of(scene.jobs, scene.inventory)
    except GpulayerError as error:
        return {}, [str(error)]
    return code.trees, _changes(scene, plan, views) + changed_code(plan, scene.jobs, code)


def _queue(works: Sequence[Work], waiting: Collection[str]) -> list[Work]:
    """Return the works of the jobs that an earlier command left waiting; an end among them is news here."""
    queue = [work for work in works if work.run.job in waiting]
    for work in queue:
        if work.outcome is Outcome.UP_TO_DATE:
            work.outcome = Outcome.SUCCEEDED
    return queue


def _others(
    works: Sequence[Work],
    views: Mapping[str, HostView],
    history: Sequence[KnownRun],
    collected: set[str],
    inventory: Collection[str],
) -> list[Work]:
    """Return works for all other runs that hosts or history know as running, or whose log is not all here."""
    in_hand = {work.run.run for work in works}
    local = {run.run: run for run in history}
    there = {run.run: run for run in known_now(views.values(), history)}
    found: list[Work] = []
    for run in there.values():
        if run.run not in in_hand and (run.status not in states.FINAL or run.run in local.keys() - collected):
            if may_change(run):
                found.append(Work(run=run, step=Step.FOLLOW))
            else:
                found.append(Work(run=run, step=Step.NOTHING, outcome=outcome_of(run)))
    for run in history:
        if run.run in in_hand or run.run in there or run.status in states.FINAL or not run.host:
            continue
        host = silent(run, views)
        if run.status == states.LAUNCHING and host is None:  # the launch never arrived
            undone = replace(run, status=states.QUEUED, host="", devices=(), members=())
            found.append(Work(run=undone, step=Step.NOTHING, outcome=Outcome.QUEUED))
            continue
        reason = why_unknown(host or run.host, views, inventory)
        unknown = replace(run, status=states.UNKNOWN, reason=reason)
        found.append(Work(run=unknown, step=Step.NOTHING, outcome=Outcome.UNKNOWN))
    return found


async def _execute(
    scene: Scene, plan: Plan | None, works: Sequence[Work], views: Mapping[str, HostView], trees: Mapping[str, Tree]
) -> None:
    links = Links(fleet=scene.fleet, reporter=scene.reporter, patience=scene.patience)
    await links.deliver(views)
    follower = Follower(links=links, reporter=scene.reporter, store=scene.store)
    launcher = Launcher(links=links, reporter=scene.reporter, trees=trees)
    executor = Executor(
        project=scene.jobs.project,
        plan=plan,
        works=works,
        views=dict(views),
        pythons={name: scene.fleet.python(name) for name in views},
        launcher=launcher,
        follower=follower,
        links=links,
        reporter=scene.reporter,
        store=scene.store,
        detach=scene.detach,
    )
    await executor.run()
