"""What is to be done for each job of a plan, seen against what hosts and history know now. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from gpulayer.errors import ExitCode, UsageError
from gpulayer.placement.gangs import known_now, together
from gpulayer.placement.packing import Place
from gpulayer.placement.plan import Action, HostView, KnownRun, Plan, PlannedJob, RankEnd, ShapeVerdict
from gpulayer.placement.queue import Start
from gpulayer.remote import states
from gpulayer.spec.identity import node_run, run_id
from gpulayer.spec.jobs import Cause, DistributedJob, JobSet, JobSpec
from gpulayer.spec.support import Accelerator


class Step(enum.Enum):
    """What is done next for a job."""

    START = enum.auto()
    QUEUE = enum.auto()
    FOLLOW = enum.auto()
    NOTHING = enum.auto()


class Outcome(enum.StrEnum):
    """How a job stands when a command ends."""

    SUCCEEDED = "succeeded"
    UP_TO_DATE = "up_to_date"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    UNKNOWN = "unknown"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    RUNNING = "running"
    QUEUED = "queued"
    NOT_STARTED = "not_started"


EXIT_CODES = {
    Outcome.SUCCEEDED: ExitCode.OK,
    Outcome.UP_TO_DATE: ExitCode.OK,
    Outcome.FAILED: ExitCode.JOB_FAILED,
    Outcome.CANCELLED: ExitCode.JOB_FAILED,
    Outcome.LOST: ExitCode.JOB_FAILED,
    Outcome.UNKNOWN: ExitCode.UNREACHABLE,
    Outcome.UNREACHABLE: ExitCode.UNREACHABLE,
    Outcome.REFUSED: ExitCode.REFUSED,
    Outcome.RUNNING: ExitCode.OK,
    Outcome.QUEUED: ExitCode.OK,
    Outcome.NOT_STARTED: ExitCode.OK,
}
PORTS = 2  # attempts that a gang gets besides because its port was taken: three in all
PRECEDENCE = (ExitCode.UNREACHABLE, ExitCode.REFUSED, ExitCode.JOB_FAILED)


@dataclass(slots=True, kw_only=True)
class Work:
    """A job in hand: its run of the moment, and how far it may go. `job` is None where nothing may be launched."""

    run: KnownRun
    step: Step
    job: JobSpec | None = None
    tree: str | None = None
    shape: str = ""
    order: int = 0
    last_attempt: int = 1
    place: Place | None = None
    outcome: Outcome | None = None
    busy: int = 0
    ports: int = 0

    @property
    def declared(self) -> JobSpec:
        """The job as it is declared, of a work that is started or queued."""
        if self.job is None:
            raise UsageError(f"{self.run.job} is no longer in the jobs file", fix="plan anew: gpulayer plan")
        return self.job

    @property
    def waited(self) -> bool:
        """Tell whether the queue found its place, some time after the plan was made."""
        return self.place is None

    @property
    def may_retry(self) -> bool:
        """Tell whether a run that ended like this one is followed by another attempt.

        A cancelled run was not meant to go on. A lost one may have done its work: it is tried again only where the
        job's `retries` name that cause. A gang whose port somebody else took before its program began gets another one
        whatever they say.
        """
        if self.job is None:
            return False
        if port_taken(self.run) and self.ports < PORTS:
            return True
        return cause_of(self.run) in self.job.retry.on and self.run.attempt < self.last_attempt

    def next_attempt(self) -> None:
        """Turn to the next attempt of the same job: another run, with another id."""
        if port_taken(self.run) and self.ports < PORTS:
            self.ports += 1
            self.last_attempt += 1
        self.run = queued(self.run.job, self.run.key, self.run.attempt + 1, self.run.nodes)
        self.step, self.place, self.outcome = Step.QUEUE, None, None


def port_taken(run: KnownRun) -> bool:
    """Tell whether a gang did not start because its port was taken (docs/protocol.md has the word)."""
    return run.nodes is not None and run.status == states.FAILED_TO_START and (run.reason or "").startswith("port")


def queued(job: str, key: str, attempt: int, nodes: int | None = None) -> KnownRun:
    """Return a run that waits; no host has it. `nodes` are those of a gang."""
    return KnownRun(
        run=run_id(job, key, attempt), job=job, key=key, attempt=attempt, host="", status=states.QUEUED, nodes=nodes
    )  # fmt: skip


def launching(run: KnownRun, start: Start) -> KnownRun:
    """Return a run that is about to be launched where it starts, a gang with its nodes' runs."""
    job = start.job
    if not isinstance(job, DistributedJob):
        (place,) = start.placements
        return replace(run, host=place.host, devices=place.devices, status=states.LAUNCHING)
    ranks = job.processes
    (gang,) = together(
        replace(
            run, run=node_run(run.run, node), node=node, nodes=len(start.placements), host=place.host,
            devices=place.devices, status=states.LAUNCHING,
            ranks=tuple(RankEnd(rank=node * ranks + rank, status=states.LAUNCHING) for rank in range(ranks)),
        )
        for node, place in enumerate(start.placements)
    )  # fmt: skip
    return gang


def outcome_of(run: KnownRun) -> Outcome:
    """Return how a job stands by its run. Success is `exited` with code 0 and nothing else."""
    if run.status == states.EXITED:
        return Outcome.SUCCEEDED if run.code == 0 else Outcome.FAILED
    if run.status in {states.CANCELLED, states.LOST, states.UNKNOWN, states.QUEUED}:
        return Outcome(run.status)
    return Outcome.FAILED if run.status in states.FINAL else Outcome.RUNNING


def cause_of(run: KnownRun) -> Cause | None:
    """Return the word of `retries` for how a run has ended; None for what no attempt follows, or has not ended."""
    if run.status in {states.LOST, states.TIMED_OUT}:
        return Cause(run.status)
    return Cause.FAILED if run.status in states.FINAL and outcome_of(run) is Outcome.FAILED else None


def exit_code(outcomes: Iterable[Outcome]) -> ExitCode:
    """Return the contract's exit code: the first of 4, 3, 1 that applies."""
    codes = {EXIT_CODES[outcome] for outcome in outcomes}
    return next((code for code in PRECEDENCE if code in codes), ExitCode.OK)


def refused(plan: Plan, planned: PlannedJob) -> Outcome:
    """Return how a refused job stands: unreachable where a host that its `where` allows did not answer."""
    return Outcome.UNREACHABLE if _unreached(plan.shapes[planned.shape]) else Outcome.REFUSED


def _unreached(verdict: ShapeVerdict) -> bool:
    silent = {host for entry in verdict.refusals if entry.refusal.code == "unreachable" for host in entry.hosts}
    kept_out = {
        host for entry in verdict.refusals if entry.refusal.code in {"where", "labels", "drain"} for host in entry.hosts
    }
    return bool(silent - kept_out)


def exit_code_of_plan(plan: Plan) -> ExitCode:
    """Return what `gpulayer plan` ends with: 0, or 3 or 4 where a job cannot be placed."""
    return exit_code(refused(plan, planned) for planned in plan.jobs if planned.action is Action.REFUSE)


def needed_hosts(plan: Plan) -> tuple[set[str], set[str]]:
    """Return the hosts without which the plan cannot be carried out, and those that the queue may use besides."""
    must = {placement.host for planned in plan.jobs for placement in planned.placements}
    may: set[str] = set()
    for planned in plan.jobs:
        if planned.action is Action.QUEUE:
            may.update(plan.shapes[planned.shape].fits)
    return must, may - must


def known_elsewhere(plan: Plan, history: Iterable[KnownRun]) -> bool:
    """Tell whether jobs had ended on some host when another controller asked: their logs and outputs are not here."""
    ended = {planned.run for planned in plan.jobs if planned.action in {Action.UP_TO_DATE, Action.FAILED}}
    return bool(ended - {run.run for run in history})


def works_of(
    plan: Plan, jobs: JobSet, views: Mapping[str, HostView], history: Iterable[KnownRun], *, resume: bool
) -> list[Work]:
    """Return each job's work. `views` are the hosts that answered; `history` the local runs, a job's own one last.

    What hosts know comes before what was planned: a run that is there is followed or is the result, never started
    again. With `resume` only what an earlier command left in the queue is started.
    """
    history = list(history)
    there = _newest(known_now(views.values(), history))
    here = _newest(history)
    works = []
    for order, planned in enumerate(sorted(plan.jobs, key=lambda planned: planned.position or 0)):
        job = jobs.jobs.get(planned.job)
        nobody = KnownRun(run="", job=planned.job, key=planned.key, attempt=0, host="", status=states.QUEUED)
        work = Work(run=nobody, step=Step.NOTHING, job=job, tree=planned.tree, shape=planned.shape, order=order)
        works.append(work)
        if planned.run is None or planned.attempt is None:
            work.outcome = refused(plan, planned)
            continue
        work.last_attempt = planned.attempt + (job.retry.max if job else 0)
        known = [runs.get((planned.job, planned.key)) for runs in (there, here)]
        on_host, before = (run if run is not None and run.attempt >= planned.attempt else None for run in known)
        if not _seen(work, plan, planned, views, there=on_host, before=before):
            _begin(work, planned, planned.attempt, before, resume=resume)
    return works


def ended(plan: Plan, history: Iterable[KnownRun], in_hand: Collection[str]) -> list[Work]:
    """Return the works of planned jobs, other than those in hand, whose runs had their end before."""
    newest = _newest(history)
    found = []
    for planned in plan.jobs:
        run = newest.get((planned.job, planned.key))
        if run is not None and run.status in states.FINAL and planned.job not in in_hand:
            found.append(Work(run=run, step=Step.NOTHING, outcome=_verdict(run)))
    return found


def _newest(runs: Iterable[KnownRun]) -> dict[tuple[str, str], KnownRun]:
    """Return the latest attempt of each job as it is declared now and was before."""
    newest: dict[tuple[str, str], KnownRun] = {}
    for run in runs:
        found = newest.get((run.job, run.key))
        if found is None or run.attempt >= found.attempt:
            newest[run.job, run.key] = run
    return newest


def _seen(
    work: Work,
    plan: Plan,
    planned: PlannedJob,
    views: Mapping[str, HostView],
    *,
    there: KnownRun | None,
    before: KnownRun | None,
) -> bool:
    """Settle a job by the run that a host knows, or that may be on a host which does not answer; else return False."""
    waits = before is not None and before.status == states.QUEUED
    if there is not None and not (waits and before is not None and before.attempt > there.attempt):
        work.run = there
        if may_change(there):
            work.step = Step.FOLLOW
        else:
            work.outcome = _verdict(there)
    elif planned.action in {Action.UP_TO_DATE, Action.FAILED}:
        # The plan saw its end on a host that was not asked again.
        work.outcome = planned_outcome(plan, planned)
        if before is not None and before.status in states.FINAL:
            work.run, work.outcome = before, _verdict(before)
    elif before is not None and before.host and (silent(before, views) or before.started_at):
        host = silent(before, views) or before.host
        _unsettled(work, before, why_unknown(host, views, (host.name for host in plan.hosts)))
    elif planned.action is Action.FOLLOW and planned.attempt is not None:
        host = planned.placements[0].host if planned.placements else ""
        lost = replace(queued(planned.job, planned.key, planned.attempt, planned.nodes), host=host)
        _unsettled(work, lost, why_unknown(host, views, (host.name for host in plan.hosts)))
    else:
        return False
    return True


def _begin(work: Work, planned: PlannedJob, attempt: int, before: KnownRun | None, *, resume: bool) -> None:
    """Let a job start as planned, or wait where an earlier command left it waiting."""
    work.run = queued(planned.job, planned.key, attempt, planned.nodes)
    if before is not None and before.status == states.QUEUED:
        work.run, work.step = before, Step.QUEUE
    elif resume:
        if before is not None and before.status == states.LAUNCHING:  # the launch never arrived
            work.step = Step.QUEUE
        else:
            work.outcome = Outcome.QUEUED if before is None else _verdict(before)
    elif planned.placements and planned.accelerator is not None:
        work.step, work.place = Step.START, (Accelerator(planned.accelerator), planned.placements)
    else:
        work.step = Step.QUEUE


def may_change(run: KnownRun) -> bool:
    """Tell whether following a run that hosts know brings news: not where all has ended on those that answer."""
    return any(part.status not in states.FINAL | {states.UNKNOWN} for part in run.parts)


def silent(run: KnownRun, answering: Collection[str]) -> str | None:
    """Return a host of a run's that does not answer, None where all do."""
    return next((part.host for part in run.parts if part.host not in answering), None)


def why_unknown(host: str, answering: Collection[str], inventory: Iterable[str]) -> str:
    """Say why a host tells nothing of a run that it was given."""
    if host in answering:
        return f"{host} no longer knows it"
    return f"{host} does not answer" if host in inventory else f"{host} is not in the inventory"


def _unsettled(work: Work, before: KnownRun, reason: str) -> None:
    """Take a run of which nothing new is known: final words hold, the rest is unknown and never run elsewhere."""
    final = before.status in states.FINAL
    work.run = before if final else replace(before, status=states.UNKNOWN, reason=reason)
    work.outcome = _verdict(work.run)


def _verdict(run: KnownRun) -> Outcome:
    """Return how a job stands whose run had its end before this command."""
    outcome = outcome_of(run)
    return Outcome.UP_TO_DATE if outcome is Outcome.SUCCEEDED else outcome


def planned_outcome(plan: Plan, planned: PlannedJob) -> Outcome:
    """Return how a job stands by the plan alone, while nothing is started."""
    if planned.action is Action.REFUSE:
        return refused(plan, planned)
    return STANDING.get(planned.action, Outcome.NOT_STARTED)


STANDING = {
    Action.UP_TO_DATE: Outcome.UP_TO_DATE,
    Action.FAILED: Outcome.FAILED,
    Action.FOLLOW: Outcome.RUNNING,
}
