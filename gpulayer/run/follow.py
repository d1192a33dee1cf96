"""Follow runs: their output into local files, their states into the store, through lost links and back."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from gpulayer.errors import GpulayerError, HostError, Stage, StateError, UsageError
from gpulayer.fleet.artifacts import Fetched, fetch
from gpulayer.fleet.session import AgentError, Fleet, Session, Stream
from gpulayer.placement.gangs import together
from gpulayer.placement.plan import KnownRun
from gpulayer.remote import states
from gpulayer.run.cancels import SENT, WAITS, deliver
from gpulayer.run.channel import Channel
from gpulayer.run.events import (
    FETCHED,
    FETCHING,
    FOREIGN_PROCESS,
    LINK_BACK,
    LINK_LOST,
    LOG_DROPPED,
    LOG_REPLACED,
    OUTPUT,
    WARNING,
    Event,
    now,
    status_event,
)
from gpulayer.run.replies import BadReplyError, Process, Reader, RunState, gang_state, listed, run_state
from gpulayer.run.store import Store

TAIL: Final = 4096  # bytes before the offset that host and follower compare
LONGEST_LOG: Final = 2**43  # bytes: a place beyond it, which some file systems lack, is a host's error and not ours
PATIENCE: Final = 600.0  # seconds without a word from a host until its runs are `unknown`
PAUSES: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds between attempts while a host does not answer


PROGRESS: Final = 0.5  # seconds between two words of how far a transfer is
HOPELESS: Final = frozenset({Stage.HOST_KEY, Stage.AUTHENTICATE})  # no repetition mends these; hosts punish it

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Reporter:
    """Where everything that happens goes: the store and the reader's stream, in one step."""

    store: Store
    channel: Channel

    def say(self, event: Event, run: KnownRun | None = None) -> None:
        """Record an event, with the run as it is now, and show it."""
        self.store.record([(event, run)])
        self.channel.put(event)

    def statuses(self, runs: Iterable[tuple[KnownRun, Mapping[str, object]]]) -> None:
        """Report how many runs stand, in one step."""
        entries = [(status_event(run, **detail), run) for run, detail in runs]
        self.store.record(entries)
        for event, _ in entries:
            self.channel.put(event)

    def status(self, run: KnownRun, **detail: object) -> None:
        """Report a run's status."""
        self.say(status_event(run, **detail), run)

    def progress(self, word: str, host: str, run: KnownRun | None = None) -> Callable[[int, int | None], None]:
        """Return what shows how far a transfer is, at most twice a second; such events are not recorded."""
        shown = time.monotonic()

        def show(done: int, total: int | None) -> None:
            nonlocal shown
            if time.monotonic() - shown >= PROGRESS:
                shown = time.monotonic()
                self.channel.put(
                    Event(
                        event=word, at=now(), job=run.job if run else None, run=run.run if run else None, host=host,
                        detail={"bytes": done, "total": total},
                    )
                )  # fmt: skip

        return show

    def warn(
        self, message: str, *, fix: str | None = None, host: str | None = None, run: KnownRun | None = None
    ) -> None:
        """Report what is not well and stops nothing."""
        self.say(
            Event(
                event=WARNING, at=now(), job=run.job if run else None, run=run.run if run else None,
                host=host or (run.host if run else None), detail={"message": message, "fix": fix},
            )
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Links:
    """The sessions of a fleet, with one word for each host that is lost and one when it is back."""

    fleet: Fleet
    reporter: Reporter
    patience: float = PATIENCE
    _lost: dict[str, _Silence] = field(default_factory=dict)

    async def deliver(self, hosts: Iterable[str]) -> None:
        """Send those of these hosts that have kept cancels what is kept."""
        for host in {kept.run.host for kept in self.reporter.store.kept_cancels()}.intersection(hosts):
            try:
                await self.insist(host, _nothing)
            except HostError as error:
                self.reporter.warn(f"{WAITS}: {error}", host=host)

    async def insist(self, host: str, step: Callable[[Session], Awaitable[T]]) -> T:
        """Return what `step(session)` gives, as `insist_together` does with one host."""
        return await self.insist_together([host], lambda sessions: step(sessions[0]))

    async def insist_together(self, hosts: Sequence[str], step: Callable[[Sequence[Session]], Awaitable[T]]) -> T:
        """Return what `step(sessions)` gives, over new connections where some are lost.

        HostError when a host has not answered for as long as patience lasts; without any, at the first silence. A
        step is done again as a whole: it is one that may be, because hosts do nothing twice.
        """
        while True:
            try:
                sessions = await at_once(self._session(host) for host in hosts)
                result = await step(sessions)
            except HostError as error:
                if (pause := self._silent(error.host, error)) is None:
                    raise
                await asyncio.sleep(pause)
            else:
                for host in hosts:
                    self.answered(host)
                return result

    async def _session(self, host: str) -> Session:
        """Return a host's session, once it was told of the cancels that are kept for it."""
        silence = self._lost.get(host)
        left = self.patience if silence is None else silence.since + self.patience - time.monotonic()
        session = await self.fleet.session(host, deadline=max(left, 0.0))
        for run in await deliver(session, self.reporter.store):
            self.reporter.warn(SENT, run=run)
        return session

    @property
    def silent(self) -> Collection[str]:
        """The hosts that did not answer when they were asked last."""
        return self._lost.keys()

    def answered(self, host: str) -> None:
        """Note that a host has answered."""
        if self._lost.pop(host, None) is not None:
            self.reporter.say(Event(event=LINK_BACK, at=now(), host=host))

    def _silent(self, host: str, error: HostError) -> float | None:
        """Note that a host does not answer; return the seconds until it is asked again, None when patience ends."""
        silence = self._lost.get(host)
        if isinstance(error, BadReplyError) or error.stage in HOPELESS or self.patience <= 0:
            return None
        if silence is None:
            silence = self._lost[host] = _Silence(since=time.monotonic())
            self.reporter.say(Event(event=LINK_LOST, at=now(), host=host, detail={"error": str(error)}))
        elif time.monotonic() - silence.since >= self.patience:
            return None
        pause = PAUSES[min(silence.attempts, len(PAUSES) - 1)]
        silence.attempts += 1
        return pause


async def _nothing(_session: Session) -> None:
    pass


@dataclass(slots=True)
class _Silence:
    """Since when a host does not answer, on the monotonic clock, and how often it was asked since."""

    since: float
    attempts: int = 0


@dataclass(slots=True, kw_only=True)
class Follower:
    """Follows runs until their end, or until their host is given up. `quiet` copies logs without showing them."""

    links: Links
    reporter: Reporter
    store: Store
    quiet: bool = False

    async def follow(self, run: KnownRun, logs: Sequence[Log] = ()) -> RunState:
        """Return a run's final state, after its whole log is here, and report each change of status on the way.

        HostError where the host is given up, AgentError where it no longer knows the run. The log is written at the
        host's own offsets, so that two followers of one run write the same bytes. Of a gang the logs of all nodes and
        ranks are followed; an error of one node is raised when the others have ended. `logs` are those of one part of
        a run that are followed in the place of all.
        """
        watch = _Watch(run, self.reporter)
        return _whole(run, await at_once(self._follow(logs or logs_of(part), watch) for part in run.parts))

    async def catch_up(self, run: KnownRun, logs: Sequence[Log] = ()) -> RunState:
        """Return a run's state once all of the log that is there now is here; waits for no more. Errors alike."""
        watch = _Watch(run, self.reporter)
        return _whole(run, await at_once(self._catch_up(logs or logs_of(part), watch) for part in run.parts))

    async def state(self, run: KnownRun) -> RunState:
        """Return a run as its hosts tell it now. Errors alike; UsageError where a host does not know it."""
        return _whole(run, await at_once(self._state(part) for part in run.parts))

    async def collect(self, state: RunState) -> None:
        """Fetch the outputs of a run that has ended, whatever its end, and note that all is here. Errors alike."""
        await self.fetch(state)
        for run in {state.run.run, *(part.run.run for part in state.parts)}:
            self.store.collect(run)

    async def fetch(self, state: RunState) -> None:
        """Fetch a run's outputs as they are now. Errors alike, and StateError where they cannot be written here.

        A pattern that matches nothing is told; of a gang where it does so on all hosts, for mostly one rank writes.
        """
        fetched = await at_once(self._fetch(part) for part in state.parts if part.outputs)
        unmatched = [
            pattern for pattern in dict.fromkeys(state.outputs) if all(pattern in one.unmatched for one in fetched)
        ]
        if unmatched and state.run.started_at:  # what never began left nothing
            yet = "" if state.run.status in states.FINAL else " yet"
            self.reporter.warn(
                f"nothing{yet} matches {', '.join(map(repr, unmatched))} of its `outputs`",
                fix="name files below the job's working directory; those elsewhere are not fetched", run=state.run,
            )  # fmt: skip

    async def _follow(self, logs: Sequence[Log], watch: _Watch) -> RunState:
        host = logs[0].run.host
        # One stream alone tells of states: another may hold older ones, while its output waits for a slow reader.
        watches = (watch.changed, *(_unwatched for _ in logs[1:]))
        first, *_ = await at_once(
            self.links.insist(host, functools.partial(self._stream, log=log, changed=changed))
            for log, changed in zip(logs, watches, strict=True)
        )
        run = logs[0].run
        state = run_state(host, first.get("state"), run)
        if state.run.status not in states.FINAL:
            raise BadReplyError(host, f"the agent's last word of {run.run} is {state.run.status}, which is no end")
        watch.changed(state)
        return state

    async def _catch_up(self, logs: Sequence[Log], watch: _Watch) -> RunState:
        run = logs[0].run
        state = await self._state(run)
        if state.run.status in states.FINAL:
            return await self._follow(logs, watch)
        await at_once(
            self.links.insist(
                run.host,
                functools.partial(self._stream, log=log, changed=_unwatched, until=state.size_of(log.rank)),
            )
            for log in logs
        )
        return state

    async def _state(self, run: KnownRun) -> RunState:
        reply = await self.links.insist(run.host, lambda session: session.request("status", runs=[run.run]))
        told = Reader(run.host, reply.header).get("states")
        if not isinstance(told, Mapping) or told.get(run.run) is None:
            raise UsageError(
                f"{run.host} no longer knows {run.run}", fix="what came from it before is in .gpulayer/runs"
            )
        return run_state(run.host, told[run.run], run)

    async def _fetch(self, state: RunState) -> Fetched:
        run = state.run
        place = self.store.paths.outputs(run.run)
        progress = self.reporter.progress(FETCHING, run.host, run)
        fetched = await self.links.insist(
            run.host,
            lambda session: fetch(session, run.run, state.outputs, place, lambda done: progress(done, None)),
        )
        self.reporter.say(
            Event(
                event=FETCHED, at=now(), job=run.job, run=run.run, host=run.host,
                detail={
                    "files": fetched.files, "bytes": fetched.bytes, "path": str(place),
                    "skipped": [list(entry) for entry in fetched.skipped], "unmatched": list(fetched.unmatched),
                },
            )
        )  # fmt: skip
        return fetched

    async def _stream(
        self, session: Session, *, log: Log, changed: Callable[[RunState], None], until: int | None = None
    ) -> Mapping[str, Any]:
        """Copy a log and return the last header: it has the final state, unless `until` stopped it before."""
        run = log.run.run
        self.store.paths.create_run(run)
        path = self.store.paths.log(run, log.rank)
        while True:
            write_at(path, 0, b"")  # a job that prints nothing has a log too
            offset, tail = local_end(path)
            stream = await session.stream("follow", run=run, rank=log.rank, offset=offset, tail=tail)
            try:
                await self._copy(stream, log, path, offset, changed=changed, until=until)
            except AgentError as error:
                if error.code != LOG_REPLACED:
                    raise
                path.replace(path.with_name(f"{path.name}.replaced-{time.time_ns()}"))
                self.reporter.say(log.event(LOG_REPLACED, offset=offset))
            else:
                return stream.last or {}

    async def _copy(
        self,
        stream: Stream,
        log: Log,
        path: Path,
        offset: int,
        *,
        changed: Callable[[RunState], None],
        until: int | None,
    ) -> None:
        """Write and report the log from `offset` to its end, or to `until`."""
        host = log.run.host
        if until is not None and offset >= until:
            await stream.stop()
        async for frame in stream:
            self.links.answered(host)
            reader = Reader(host, frame.header)
            if reader.get("state") is not None:
                changed(run_state(host, reader.get("state"), log.run))
                continue
            if reader.number("off") != offset:
                raise reader.bad("off")
            if reader.get("hole") is not None:
                dropped = reader.number("hole")
                if offset + dropped > LONGEST_LOG:
                    raise reader.bad("hole")
                self.reporter.say(log.event(LOG_DROPPED, offset=offset, bytes=dropped))
                offset += dropped
                continue
            write_at(path, offset, frame.payload)
            if not self.quiet:
                await self.reporter.channel.put_output(log.event(OUTPUT, frame.payload, offset=offset))
            offset += len(frame.payload)
            if until is not None and offset >= until:
                await stream.stop()


class _Watch:
    """Reports how a run stands whenever that changes; of a gang, how each node stands and how the whole does."""

    def __init__(self, run: KnownRun, reporter: Reporter) -> None:
        self._whole = run
        self._parts = {part.run: part for part in run.parts}
        self._reporter = reporter
        self._strangers: dict[str, frozenset[Process]] = {}  # of each part, as its host told last

    def changed(self, state: RunState) -> None:
        """Take a state that a host tells: the stream of a part's own log brings it."""
        run = state.run
        told: list[tuple[KnownRun, Mapping[str, object]]] = []
        if run.status != self._parts[run.run].status:
            told.append((run, state.detail))
        self._parts[run.run] = run
        if self._whole.members:
            (whole,) = together(self._parts.values())
            if whole.status != self._whole.status:
                told.append((whole, {"accelerator": state.accelerator}))
            self._whole = whole
        if told:
            self._reporter.statuses(told)
        known = self._strangers.get(run.run, frozenset())
        if new := [process for process in state.foreign or () if process not in known]:
            self._strangers[run.run] = frozenset(state.foreign or ())
            self._reporter.say(
                Event(
                    event=FOREIGN_PROCESS, at=now(), job=run.job, run=run.run, host=run.host,
                    detail={"processes": listed(new)},
                )
            )  # fmt: skip


def _unwatched(_state: RunState) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Log:
    """A log of a run; of a gang's node that of one rank, or (None) what torchrun says itself."""

    run: KnownRun
    rank: int | None = None

    def event(self, word: str, data: bytes = b"", **detail: object) -> Event:
        """Return an event about this log; in a gang it says whose it is."""
        run = self.run
        whose = {} if run.node is None else {"rank": self.rank}
        return Event(
            event=word, at=now(), job=run.job, run=run.run, host=run.host or None, data=data, detail=whose | detail
        )  # fmt: skip


def logs_of(run: KnownRun) -> list[Log]:
    """Return all logs of a run on one host."""
    return [Log(run), *(Log(run, end.rank) for end in run.ranks)]


async def at_once(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what steps give that are taken at the same time.

    What is wrong with a host ends its own step alone, and the first such error is raised once all have ended; what is
    wrong with this machine (a full disk) ends all of them.
    """

    async def settled(step: Coroutine[Any, Any, T]) -> T | GpulayerError:
        try:
            return await step
        except (HostError, AgentError, UsageError) as error:
            return error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(settled(step)) for step in steps]
    except* GpulayerError as errors:
        raise errors.exceptions[0] from None
    found: list[T] = []
    for result in [task.result() for task in tasks]:
        if isinstance(result, GpulayerError):
            raise result
        found.append(result)
    return found


def _whole(run: KnownRun, told: Sequence[RunState]) -> RunState:
    """Return the state of a run by the states of its parts."""
    return gang_state(told) if run.members else told[0]


def local_end(path: Path) -> tuple[int, dict[str, Any] | None]:
    """Return the size of a local log and what docs/protocol.md calls its tail, None where it is empty."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        data = file.read(TAIL)
    return size, {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} if size else None


def write_at(path: Path, offset: int, data: bytes) -> None:
    """Write bytes of a log at their offset. The file is opened anew each time: a thousand runs hold no descriptor."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateError(
            f"{path} cannot be written: {error.strerror}",
            fix="free space; the jobs go on, and `gpulayer attach` gets the rest of their output",
        ) from error
