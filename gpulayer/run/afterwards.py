"""What can be asked and done from any terminal, after the fact: status, cancel, logs, fetch."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from gpulayer.errors import HostError, Stage, UsageError
from gpulayer.fleet.session import AgentError, Fleet, Session
from gpulayer.placement.gangs import together
from gpulayer.placement.plan import HostView, KnownRun
from gpulayer.remote import states
from gpulayer.run.cancels import SENT, WAITS, deliver, here, send
from gpulayer.run.events import LOG_DROPPED, OUTPUT, status_event
from gpulayer.run.executor import report_summary
from gpulayer.run.follow import Follower, Links, Log, Reporter, at_once, logs_of
from gpulayer.run.replies import Reader, run_state
from gpulayer.run.store import Store
from gpulayer.run.survey import Question, new_here, survey
from gpulayer.run.work import Step, Work, outcome_of, why_unknown
from gpulayer.spec.schemas import suggestion

STATUS_SCHEMA: Final = "gpulayer.status/1"
ASKED_AT_ONCE: Final = 1000  # run ids in one question: a frame's header holds them
UNDER_WAY: Final = (0.2, 0.5, 1.0, 2.0, 5.0)  # seconds in which a launch that was announced arrives
CHUNK: Final = 256 * 2**10
GIVEN_UP: Final = "given_up"


def status_document(runs: Iterable[KnownRun]) -> dict[str, Any]:
    """Return the `gpulayer.status/1` document that `status --json` prints."""
    return {
        "schema": STATUS_SCHEMA,
        "runs": [{"job": run.job, **_standing(run), "attempt": run.attempt, **_gang(run)} for run in runs],
    }


def _standing(run: KnownRun) -> dict[str, Any]:
    return {
        "run": run.run, "host": run.host or None, "devices": list(run.devices),
        "status": run.status, "code": run.code, "signal": run.signal, "reason": run.reason,
        "started_at": run.started_at, "ended_at": run.ended_at,
        "foreign_process": run.foreign_process, "left": run.left,
    }  # fmt: skip


def _gang(run: KnownRun) -> dict[str, Any]:
    """Return what a gang's entry has besides: its nodes with their ranks, and who failed first."""
    if run.nodes is None:
        return {}
    nodes = [
        {"node": part.node, **_standing(part), "ranks": [asdict(rank) for rank in part.ranks]} for part in run.members
    ]
    return {"nodes": nodes, "first_failure": run.first_failure and asdict(run.first_failure)}


async def learn(store: Store, fleet: Fleet, project: str) -> list[HostView]:
    """Take what hosts know of a project and the local history does not into that; return the hosts' answers.

    What another controller started is found this way, and what this one did before its history was lost.
    """
    answers = await survey(fleet, fleet.inventory.hosts.values(), Question(project=project, frameworks=None))
    views = [answer.view for answer in answers]
    store.take(project, new_here(views, store.runs(project)))
    return views


async def status(store: Store, fleet: Fleet, project: str | None = None) -> list[KnownRun]:
    """Return every run in the order in which they were taken in hand; the hosts are asked for those without an end.

    Where none is known here all hosts are asked. A run whose host does not answer, or is no longer in the inventory, is
    `unknown`.
    """
    if project is not None and not store.runs(project):
        await learn(store, fleet, project)
    runs = store.runs(project)
    asked = await ask(fleet, store, [run for run in runs if run.host and run.status not in states.FINAL])
    told = store.told()
    return [asked.get(run.run) or _with_what_was(told, run) for run in runs]


def _with_what_was(told: Mapping[str, Mapping[str, Any]], run: KnownRun) -> KnownRun:
    """Return a run of the history, and a gang's nodes, with what their hosts told beside their ends."""
    beside = told.get(run.run, {})
    return replace(
        run,
        foreign_process=beside.get("foreign_process"),
        left=beside.get("left"),
        members=tuple(_with_what_was(told, part) for part in run.members),
    )


async def ask(fleet: Fleet, store: Store, runs: Sequence[KnownRun]) -> dict[str, KnownRun]:
    """Return runs as their hosts tell them now, by run id; hosts that answer take the cancels kept for them."""
    by_host: dict[str, list[KnownRun]] = defaultdict(list)
    for run in runs:
        for part in run.parts:
            by_host[part.host].append(part)
    before = _with_kept_cancels(store)
    sessions = await fleet.connect([host for host in by_host if host in fleet.inventory.hosts])
    answers = await asyncio.gather(
        *(_ask(host, sessions.get(host), store, its_runs) for host, its_runs in by_host.items())
    )  # fmt: skip
    after = _with_kept_cancels(store)
    told = {run.run: run for answer in answers for run in answer}
    for name in before & told.keys():
        if told[name].status not in states.FINAL:
            why = (told[name].reason, WAITS if name in after else SENT)
            told[name] = replace(told[name], reason="; ".join(filter(None, why)))
    return {run.run: _as_told(run, told) for run in runs}


def _as_told(run: KnownRun, told: Mapping[str, KnownRun]) -> KnownRun:
    """Return a run by what is told of its parts. Of a gang's nodes those count that were begun, unless none was."""
    if not run.members:
        return told[run.run]
    begun = [one for part in run.members if (one := told[part.run]).status != states.QUEUED]
    if not begun:
        return replace(run, status=states.QUEUED, host="", devices=(), members=())
    (gang,) = together(begun)
    return gang


def _with_kept_cancels(store: Store) -> set[str]:
    return {kept.run.run for kept in store.kept_cancels()}


async def _ask(
    host: str, session: Session | HostError | None, store: Store, runs: Sequence[KnownRun]
) -> list[KnownRun]:
    if session is None:
        return [_unknown(run, why_unknown(host, (), ())) for run in runs]
    if isinstance(session, HostError):
        return [_unknown(run, session.message) for run in runs]
    found: list[KnownRun] = []
    try:
        await deliver(session, store)
        for start in range(0, len(runs), ASKED_AT_ONCE):
            part = runs[start : start + ASKED_AT_ONCE]
            told = Reader(host, (await session.request("status", runs=[run.run for run in part])).header).get("states")
            found += [_told(host, run, told.get(run.run) if isinstance(told, Mapping) else None) for run in part]
    except (HostError, AgentError) as error:
        found += [_unknown(run, error.message) for run in runs[len(found) :]]
    return found


def _told(host: str, run: KnownRun, state: object) -> KnownRun:
    if state is not None:
        return run_state(host, state, run).run
    if run.status == states.LAUNCHING:  # the launch never arrived: nothing was started
        return replace(run, status=states.QUEUED, host="", devices=())
    return _unknown(run, why_unknown(host, (host,), (host,)))


def _unknown(run: KnownRun, reason: str) -> KnownRun:
    return replace(run, status=states.UNKNOWN, reason=reason)


async def run_of(store: Store, fleet: Fleet, job: str, project: str | None = None) -> KnownRun:
    """Return a job's own run, or the run that is named by its id; hosts are asked where it is not known here.

    UsageError where no host knows it either.
    """
    return (await _runs_of(store, fleet, job, project))[-1]


async def runs_to_cancel(
    store: Store, fleet: Fleet, jobs: Sequence[str] | None, project: str | None = None
) -> list[KnownRun]:
    """Return the runs that have not ended, of the jobs (a run id names one run) or of all that hosts know (None).

    A job may have several, where it was changed while it ran. One that has none is there with its last. UsageError as
    of `run_of`.
    """
    if jobs is None:
        if project is not None:
            await learn(store, fleet, project)
        return [run for run in store.runs(project) if run.status not in states.FINAL]
    found: dict[str, KnownRun] = {}
    for job in jobs:
        runs = await _runs_of(store, fleet, job, project)
        live = [run for run in runs if run.status not in states.FINAL]
        found |= {run.run: run for run in live or runs[-1:]}
    return list(found.values())


async def _runs_of(store: Store, fleet: Fleet, job: str, project: str | None) -> list[KnownRun]:
    """Return the runs of a job, its own one last, or the run of that id; at least one."""
    runs = _named(store, job, project)
    if not runs and project is not None:
        silent = [view for view in await learn(store, fleet, project) if not view.reached]
        runs = _named(store, job, project)
        if not runs and silent:
            raise HostError(
                silent[0].host.name, silent[0].stage or Stage.CONNECT,
                f"{silent[0].error}; the hosts that answer know no run of {job!r}", fix="gpulayer probe",
            )  # fmt: skip
    if not runs:
        raise UsageError(
            f"no run of {job!r} is known"
            + (f" in project {project}" if project else "")
            + suggestion(job, sorted({run.job for run in store.runs(project)})),
            fix="`gpulayer status` shows the runs that are, `gpulayer apply` starts what has none; "
            "`gpulayer plan FILE` turns to the jobs of another file",
        )
    return runs


def _named(store: Store, job: str, project: str | None) -> list[KnownRun]:
    """Return the runs of a job, or the one of that id, which may be that of a gang's node."""
    runs = store.runs(project)
    whole = [run for run in runs if job in {run.job, run.run}]
    return whole or [part for run in runs for part in run.members if part.run == job]


def part_with(run: KnownRun, rank: int) -> KnownRun:
    """Return the run of a gang's node that has a rank; UsageError where none has."""
    for part in run.parts:
        if rank in {end.rank for end in part.ranks}:
            return part
    ranks = sorted(end.rank for part in run.parts for end in part.ranks)
    there = f"its ranks are {ranks[0]} to {ranks[-1]}" if ranks else "it is no distributed job"
    if run.nodes is not None and not ranks:
        there = "none of its ranks has begun"
    raise UsageError(f"{run.job} has no rank {rank}: {there}", fix="leave --rank out")


@dataclass(frozen=True, slots=True)
class Afterwards:
    """One command after the fact, with the links that it works over."""

    store: Store
    fleet: Fleet
    reporter: Reporter
    patience: float

    def _follower(self, *, quiet: bool = False) -> Follower:
        links = Links(fleet=self.fleet, reporter=self.reporter, patience=self.patience)
        return Follower(links=links, reporter=self.reporter, store=self.store, quiet=quiet)

    async def cancel(self, runs: Sequence[KnownRun], *, grace: float | None) -> None:
        """Drop what waits, cancel what runs, and wait for each verified end. `grace` is seconds, None the job's."""
        for run in runs:
            if run.status in states.FINAL:
                self.reporter.warn("it had ended before: nothing was cancelled", run=run)
        self.store.drop(run.run for run in runs)
        follower = self._follower()
        # Another process may have launched meanwhile what was waiting: how each run stands is read once more.
        works = [Work(run=self.store.run(run.run) or run, step=Step.NOTHING) for run in runs]
        await asyncio.gather(*(self._cancel_one(work, follower, grace) for work in works))
        report_summary(self.reporter, [work.outcome or outcome_of(work.run) for work in works])

    async def _cancel_one(self, work: Work, follower: Follower, grace: float | None) -> None:
        run = work.run
        if run.status in states.FINAL or not run.host:
            self.reporter.status(run)
        else:
            try:
                await at_once(self._send_cancel(part, follower.links, grace) for part in run.parts)
                state = await follower.follow(run)
                work.run = state.run
                await follower.collect(state)
            except (HostError, AgentError) as error:
                if work.run.status in states.FINAL:
                    self.reporter.warn(error.message, fix=f"gpulayer fetch {run.job}", run=run)
                elif self._is_given_up(run, error):
                    work.run = replace(run, status=states.LOST, reason=GIVEN_UP)
                    self.reporter.status(work.run)
                    self.reporter.warn(f"if it runs there still, nobody knows: {error.message}", run=run)
                else:
                    work.run = _unknown(run, error.message)
                    self.reporter.status(work.run)
                    if any(self.store.is_unwanted(part.run) for part in run.parts):
                        self.reporter.warn(WAITS, fix="gpulayer attach, status or apply sends it", run=run)
                    else:
                        self.reporter.warn("whether it ends is not known", fix=error.fix, run=run)
        work.outcome = outcome_of(work.run)

    def _is_given_up(self, run: KnownRun, error: HostError | AgentError) -> bool:
        """Tell whether nobody is left to ask: then a person's word that the run shall not go on settles it."""
        return all(part.host not in self.fleet.inventory.hosts for part in run.parts) or (
            isinstance(error, AgentError) and error.code == "unknown_run"
        )

    async def _send_cancel(self, run: KnownRun, links: Links, grace: float | None) -> None:
        """Cancel a run on its host. Where that cannot be told, or does not know a run yet, the cancel is kept."""
        by = here()
        for pause in (*UNDER_WAY, None):
            try:
                await links.insist(run.host, lambda session: send(session, run.run, grace=grace, by=by))
            except AgentError as error:
                if error.code != "unknown_run" or run.status != states.LAUNCHING:
                    raise
                if pause is None:
                    self.store.keep_cancel(run.run, grace=grace, by=by)
                    raise
                await asyncio.sleep(pause)  # another process has said that it launches it, and is about to
            except HostError:
                self.store.keep_cancel(run.run, grace=grace, by=by)
                raise
            else:
                return

    async def logs(self, run: KnownRun, *, follow: bool, rank: int | None = None) -> None:
        """Report a run's output from its beginning: what is here, then what its host has, with `follow` to its end.

        Of a gang that of all ranks, or of one.
        """
        if rank is not None:
            run = part_with(run, rank)
        chosen = [] if rank is None else [Log(run, rank)]
        logs = chosen or [log for part in run.parts for log in logs_of(part)]
        for log in logs:
            await self._replay(log)
        here = all(self.store.paths.log(log.run.run, log.rank).exists() for log in logs)
        if run.host and not (run.run in self.store.collected() and here):
            follower = self._follower()
            state = await follower.follow(run, chosen) if follow else await follower.catch_up(run, chosen)
            run = state.run
            if run.status in states.FINAL and rank is None:
                await follower.collect(state)
        elif run.status == states.QUEUED:
            self.reporter.warn(
                "it waits in the queue and was not started, so it has no output yet",
                fix=f"`gpulayer why {run.job}` shows what it waits for, `gpulayer attach` goes on with the queue",
                run=run,
            )
        self.reporter.channel.put(status_event(run))  # how it stands is known already: said, not recorded again

    async def _replay(self, log: Log) -> None:
        path, offset = self.store.paths.log(log.run.run, log.rank), 0
        if not path.exists():
            return
        with path.open("rb") as file:
            holes = self.store.dropped(log.run.run, log.rank)
            while True:
                start, length = next((hole for hole in holes if sum(hole) > offset), (sys.maxsize, 0))
                if start <= offset:
                    self.reporter.channel.put(log.event(LOG_DROPPED, offset=offset, bytes=start + length - offset))
                    offset = file.seek(start + length)
                    continue
                data = file.read(min(CHUNK, start - offset))
                if not data:
                    break
                await self.reporter.channel.put_output(log.event(OUTPUT, data, offset=offset))
                offset += len(data)

    async def fetch(self, run: KnownRun) -> None:
        """Fetch a run's outputs as they are now, and the rest of its log where it has ended, without showing that.

        Of a gang whose hosts do not all answer that is done for those that do, before the error is raised.
        """
        if not run.host:
            raise UsageError(f"{run.job} was not started, so it has no outputs", fix="start it: gpulayer apply")
        follower = self._follower(quiet=True)
        try:
            state = await follower.state(run)
        except (HostError, AgentError, UsageError):
            await at_once(self.fetch(part) for part in run.members)
            raise
        if state.run.status in states.FINAL:
            await follower.collect(await follower.follow(run))
        else:
            await follower.fetch(state)
        if not state.outputs:
            log = self.store.paths.log(run.parts[0].run)
            self.reporter.warn(
                f"it declares no outputs; its log is {log}", fix="name them in its `outputs`", run=state.run
            )  # fmt: skip
