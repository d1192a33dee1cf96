"""Carry out works: launch, follow, collect, try again, and start what waits as devices come free.

Nothing here stops a job. Whoever cancels the task that runs this detaches: what was launched goes on on its host.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpulayer.errors import GpulayerError, HostError
from gpulayer.fleet.connector import jittered
from gpulayer.fleet.session import AgentError
from gpulayer.placement.packing import Packing
from gpulayer.placement.plan import HostView, KnownRun, Plan
from gpulayer.placement.queue import Queue, Start
from gpulayer.remote import states
from gpulayer.remote.failpoints import failpoint
from gpulayer.run.events import LAUNCHED, SUMMARY, Event, now
from gpulayer.run.follow import Follower, Links, Reporter
from gpulayer.run.launch import Busy, Launcher, Rejected, Unwanted, spec_of
from gpulayer.run.replies import RunState, gang_state
from gpulayer.run.store import Intent, Store
from gpulayer.run.survey import occupancy, told_of
from gpulayer.run.work import Outcome, Step, Work, exit_code, launching, outcome_of

TICK: Final = 1.0  # seconds between looks at what other processes dropped from the queue
POLLS: Final = (1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between questions whether somebody else's lease is gone
BUSY: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds until a job is tried again that a host was too busy for
GONE: Final = "a host that does not answer"
MANY: Final = 1_000_000  # more CPU slots than any host has
AT_ONCE: Final = 64  # finished runs whose logs and outputs are caught up with at the same time


@dataclass(slots=True, kw_only=True)
class Executor:
    """One command's works. `views` are the hosts that answered, by name; the plan's `fits` bound the queue."""

    project: str
    plan: Plan | None
    works: Sequence[Work]
    views: dict[str, HostView]
    pythons: Mapping[str, str | None]
    launcher: Launcher
    follower: Follower
    links: Links
    reporter: Reporter
    store: Store
    detach: bool
    packing: Packing = field(init=False)
    queue: Queue = field(init=False)
    _waiting: dict[str, Work] = field(default_factory=dict)
    _placed: set[str] = field(default_factory=set)
    _active: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _polls: int = 0
    _poll_at: float = 0.0
    _polling: set[str] = field(default_factory=set)
    _gone: set[str] = field(default_factory=set)
    _allowed: dict[str, frozenset[str]] = field(default_factory=dict)
    _company: bool = False  # whether anything told that others start jobs on these hosts

    def __post_init__(self) -> None:
        """Begin with what is free on the hosts that answered."""
        self.packing = Packing(list(self.views.values()))
        self.queue = Queue(self.packing)
        self._company = any(map(self._has_jobs, self.views))

    async def run(self) -> None:
        """Carry all works out and report a summary; an error of this machine (a full disk) ends it, not the jobs."""
        self.store.take(self.project, [work.run for work in self.works if work.run.run])
        try:
            async with asyncio.TaskGroup() as group:
                self._begin(group)
                await self._turn(group)
        except* GpulayerError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self.launcher.close()
        report_summary(self.reporter, [work.outcome or Outcome.UNKNOWN for work in self.works])

    def _begin(self, group: asyncio.TaskGroup) -> None:
        collected = self.store.collected()
        at_once = asyncio.Semaphore(AT_ONCE)
        starting: list[tuple[Work, Start]] = []
        works = [work for work in self.works if work.run.run]
        late = {
            work.run.run for work in works
            if work.step is Step.NOTHING and not self.detach
            and work.run.run not in collected and self.views.keys() >= {part.host for part in work.run.parts}
        }  # fmt: skip
        self.reporter.statuses(_standing(work) for work in works if work.run.run not in late)
        for work in works:
            if work.step is Step.NOTHING:
                if work.run.run in late:
                    self._spawn(group, self._catch_up(work, at_once))
            elif work.step is Step.FOLLOW:
                if self.detach:
                    work.outcome = outcome_of(work.run)
                else:
                    self._spawn(group, self._follow(work))
            elif work.place is not None:
                self.packing.occupy(work.declared, *work.place)
                starting.append((work, Start(work.declared, *work.place)))
            else:
                self._enqueue(work)
        self._launch(group, starting)

    def _spawn(self, group: asyncio.TaskGroup, step: Coroutine[Any, Any, None]) -> None:
        self._active += 1
        group.create_task(step).add_done_callback(self._ended)

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._active -= 1
        self._wake.set()

    async def _turn(self, group: asyncio.TaskGroup) -> None:
        """Start what can start whenever something may have changed, until nothing can change any more."""
        while self._waiting or self._active:
            self._wake.clear()
            starting = [(self._waiting.pop(start.job.name), start) for start in self.queue.ready()]
            if starting:  # the queue moves: whoever holds it up next is asked about soon
                self._polls, self._poll_at = 0, 0.0
            self._launch(group, starting)
            if not self._active and (self.detach or not self._held_by_others()):
                break
            try:
                await asyncio.wait_for(self._wake.wait(), TICK if self._waiting else None)
            except TimeoutError:
                self._forget_dropped()
                self._poll(group)
        # What waits now stays in the queue: for `attach`, or because no host is left that could take it.
        for work in self._waiting.values():
            work.outcome = Outcome.QUEUED if self.detach else Outcome.UNREACHABLE

    def _enqueue(self, work: Work) -> None:
        self._waiting[work.run.job] = work
        self.queue.add(work.declared, work.order, self._fits(work.shape))

    def _fits(self, shape: str) -> frozenset[str]:
        if shape not in self._allowed:
            fits = self.plan.shapes[shape].fits if self.plan else ()
            self._allowed[shape] = frozenset(fits).intersection(self.views)
        return self._allowed[shape]

    def _launch(self, group: asyncio.TaskGroup, starting: Sequence[tuple[Work, Start]]) -> None:
        """Make the intents durable in one go, then send: what was dropped from the queue meanwhile is not started."""
        if not starting:
            return
        intents = [self._intent(work, start) for work, start in starting]
        allowed = self.store.intend(intents)
        failpoint("intended")
        for (work, start), intent in zip(starting, intents, strict=True):
            self._placed.add(work.run.job)
            if intent.run.run not in allowed:
                self._free(work)
                self._dropped(work)
                continue
            work.run = intent.run
            self.reporter.status(work.run, accelerator=start.accelerator.value)
            self._spawn(group, self._carry(work, intent.specs))

    def _intent(self, work: Work, start: Start) -> Intent:
        run = launching(work.run, start)
        hosts = [part.host for part in run.parts]
        specs = [
            spec_of(
                start.job,
                part,
                project=self.project,
                view=self.views[part.host],
                accelerator=start.accelerator,
                peers=hosts,
                tree=work.tree,
                python=self.pythons.get(part.host),
            )
            for part in run.parts
        ]
        return Intent(run=run, specs=tuple(specs))

    async def _carry(self, work: Work, specs: Sequence[Mapping[str, Any]]) -> None:
        """Take one run from its intent to its end."""
        try:
            answer = await self._found_elsewhere(work) or await self.launcher.launch(work.run, specs)
        except (HostError, AgentError) as error:
            await self._given_up(work, error)
            return
        if isinstance(answer, Unwanted):
            self._free(work)
            self._dropped(work)
            return
        if isinstance(answer, Busy) and (answer.free_memory is None or await self._is_shared(work, answer.host)):
            await self._put_back(work, answer)
            return
        if isinstance(answer, Busy | Rejected):
            work.run = replace(work.run, status=states.FAILED_TO_START, reason=answer.reason, members=())
            self.reporter.status(work.run, fix=answer.fix)
            await self._settle(work)
            return
        new, state = answer
        self._company |= not new
        work.run = state.run
        self.reporter.say(
            Event(
                event=LAUNCHED, at=now(), job=work.run.job, run=work.run.run, host=work.run.host,
                detail={"new": new, "hosts": [part.host for part in work.run.parts]},
            ),
            work.run,
        )  # fmt: skip
        self.reporter.statuses([(one.run, one.detail) for one in (*state.members, state)])
        if self.detach:
            work.outcome = outcome_of(work.run)
        else:
            await self._follow(work)

    async def _found_elsewhere(self, work: Work) -> tuple[bool, RunState] | None:
        """Return a run that came out of the queue and that another controller has started elsewhere since.

        A host starts a run id once, and knows nothing of other hosts. They are asked where anything tells that somebody
        else is at work; of two who ask at the same moment each may be told that nobody has it.
        """
        if not self._company or not (work.waited or work.busy):
            return None
        runs = [part.run for part in work.run.parts]
        # A gang may have been started on some of these very hosts, and a launch finds it only where it is as a whole.
        own = set() if work.run.members else {work.run.host}
        others = sorted(self._fits(work.shape) - self._gone - {*own, *self.links.silent})
        answers = await asyncio.gather(*(told_of(self.links.fleet, host, runs) for host in others))
        found = [state for states in answers for state in states]
        if not found:
            return None
        self._free(work)
        return False, gang_state(found) if work.run.members else found[0]

    async def _follow(self, work: Work) -> None:
        try:
            state = await self.follower.follow(work.run)
        except (HostError, AgentError) as error:
            await self._given_up(work, error)
            return
        work.run = state.run
        await self._settle(work)
        try:
            await self.follower.collect(state)
        except (HostError, AgentError) as error:
            if work.outcome is Outcome.SUCCEEDED:  # where the host refuses, asking it again would not help
                work.outcome = Outcome.UNREACHABLE if isinstance(error, HostError) else Outcome.FAILED
            fix = f"gpulayer fetch {state.run.job}" if isinstance(error, HostError) else error.fix
            self.reporter.warn(f"the outputs could not be fetched: {error.message}", fix=fix, run=state.run)

    async def _catch_up(self, work: Work, at_once: asyncio.Semaphore) -> None:
        """Get the rest of a finished run's log, then tell its end, which stands, and get its outputs."""
        async with at_once:
            try:
                try:
                    state = await self.follower.follow(work.run)
                finally:
                    self.reporter.statuses([_standing(work)])
                await self.follower.collect(state)
            except (HostError, AgentError) as error:
                self.reporter.warn(
                    f"log and outputs could not be fetched: {error.message}",
                    fix=f"gpulayer fetch {work.run.job}", run=work.run,
                )  # fmt: skip

    async def _settle(self, work: Work) -> None:
        """Take a run that has ended off its devices, and decide whether its job gets another attempt."""
        if work.run.job in self._placed:
            self._free(work)
        elif self._waiting:
            for part in work.run.parts:
                if part.host in self.views:
                    await self._ask(part.host)  # a run that an earlier command started: the host knows what it held
        if work.may_retry:
            work.next_attempt()
            self.store.take(self.project, [work.run])
            self.reporter.status(work.run, last_attempt=work.last_attempt)
            self._enqueue(work)
        else:
            work.outcome = outcome_of(work.run)
        self._wake.set()

    def _free(self, work: Work) -> None:
        self._placed.discard(work.run.job)
        self.packing.release(work.run.job)

    async def _given_up(self, work: Work, error: HostError | AgentError) -> None:
        """Say that nobody knows how a run stands. Its devices stay taken: it may well be running there.

        The other hosts of a gang can tell whether their part of it has ended.
        """
        work.run = replace(work.run, status=states.UNKNOWN, reason=error.message)
        work.outcome = Outcome.UNKNOWN
        if isinstance(error, HostError):
            self._lose(error.host)
        self.reporter.status(work.run)
        if work.run.members and work.run.job in self._placed:
            self._free(work)
            for host in {part.host for part in work.run.parts} - self._gone:
                await self._ask(host)

    async def _is_shared(self, work: Work, host: str) -> bool:
        """Tell whether other jobs are on a host: what they have of its memory comes free."""
        ours = any(
            other is not work and other.run.job in self._placed and host in {part.host for part in other.run.parts}
            for other in self.works
        )
        if not ours:
            await self._ask(host)
        return ours or self._has_jobs(host)

    def _has_jobs(self, host: str) -> bool:
        """Tell whether a lease was held on a host when it was asked last."""
        return bool(self.views[host].holders or self.views[host].slots_held)

    async def _put_back(self, work: Work, answer: Busy) -> None:
        """Wait a little where there is no room after all, learn who holds what there, and queue the job again."""
        self._company = True
        work.run = replace(work.run, host="", devices=(), status=states.QUEUED, members=())
        self.reporter.status(work.run, reason=answer.reason)
        # Two gangs that were in each other's way must not meet again.
        await asyncio.sleep(jittered(BUSY[min(work.busy, len(BUSY) - 1)]))
        work.busy += 1
        await self._ask(answer.host, put_back=work)
        if answer.free_memory is not None and self._has_jobs(answer.host):
            self.packing.limit_memory(answer.host, answer.free_memory)
        self._enqueue(work)

    async def _ask(self, host: str, put_back: Work | None = None) -> None:
        """Learn anew who holds what on a host, where the job that is put back has nothing any more.

        Its place is kept until the answer is there, so that no other job tries the same; and it is given back before
        the answer counts, or else the lease that was in its way would be taken for its own.
        """
        try:
            taken = await self.links.insist(host, lambda session: occupancy(session, self.project))
        except (HostError, AgentError):
            taken = None
        if put_back is not None:
            self._free(put_back)
        if taken is None:
            self._lose(host)
        else:
            self.views[host] = replace(self.views[host], holders=taken.holders, slots_held=taken.slots_held)
            self.packing.observe(self.views[host])
            self._wake.set()

    def _lose(self, host: str) -> None:
        """Give a host up: to what waits, all of it is taken; one that never answered offers nothing as it is."""
        view = self.views.get(host)
        if view is None:
            return
        self._gone.add(host)
        seen = [facts for facts in (view.facts, *view.pythons.values()) if facts is not None]
        devices = (device.id for facts in seen for device in facts.devices)
        self.packing.observe(replace(view, holders=dict.fromkeys(devices, GONE), slots_held=MANY))

    def _held_by_others(self) -> set[str]:
        """Return the hosts where a lease that is none of this command's keeps a job waiting."""
        ours = {part.run for work in self.works if work.run.job in self._placed for part in work.run.parts}
        hosts = {host for shape in {work.shape for work in self._waiting.values()} for host in self._fits(shape)}
        return {
            host for host in hosts - self._gone
            if self.views[host].slots_held or not ours.issuperset(self.views[host].holders.values())
        }  # fmt: skip

    def _poll(self, group: asyncio.TaskGroup) -> None:
        """Ask, ever more seldom, whether somebody else's lease is gone."""
        if time.monotonic() < self._poll_at:
            return
        self._poll_at = time.monotonic() + POLLS[min(self._polls, len(POLLS) - 1)]
        self._polls += 1
        for host in self._held_by_others() - self._polling:
            self._polling.add(host)
            self._spawn(group, self._poll_one(host))

    async def _poll_one(self, host: str) -> None:
        await self._ask(host)
        self._polling.discard(host)

    def _forget_dropped(self) -> None:
        """Take out of the queue what another process has cancelled."""
        if not self.store.changed():
            return
        dropped = {run.run for run in self.store.runs(self.project) if run.status == states.CANCELLED}
        for work in [work for work in self._waiting.values() if work.run.run in dropped]:
            self.queue.remove(work.run.job)
            del self._waiting[work.run.job]
            self._dropped(work)

    def _dropped(self, work: Work) -> None:
        work.run = replace(work.run, status=states.CANCELLED)
        work.outcome = Outcome.CANCELLED
        self.reporter.status(work.run)


def _standing(work: Work) -> tuple[KnownRun, dict[str, object]]:
    """Return a work's run, and what its status event says besides."""
    return work.run, {"up_to_date": True} if work.outcome is Outcome.UP_TO_DATE else {}


def report_summary(reporter: Reporter, outcomes: Sequence[Outcome]) -> None:
    """Report how all jobs stand and the exit code that this gives."""
    counts = Counter(outcomes)
    reporter.say(
        Event(
            event=SUMMARY, at=now(),
            detail={
                "counts": {outcome.value: counts[outcome] for outcome in Outcome if counts[outcome]},
                "exit_code": int(exit_code(outcomes)),
            },
        )
    )  # fmt: skip
