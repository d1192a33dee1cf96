"""The supervisor: our detached process on a host, one a run, that outlives agent, connection and controller.

What is promised, whatever dies and when:
- before the intent (`state.json`) is written nothing has happened, and the same launch may be sent again;
- between the intent and the gate the job has not run: `lost`, reason `never_started`;
- after the gate the job runs. If its supervisor dies it is `orphaned`; whoever asks first leaves a caretaker with it,
  so that its deadline and cancel go on to hold, and it ends as `lost`: nobody could see its exit code.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from gpulayer.remote import clock, job, processes, records, states
from gpulayer.remote.awake import keep_awake
from gpulayer.remote.failpoints import failpoint
from gpulayer.remote.files import Blobs
from gpulayer.remote.logcap import LIMIT, LogCap
from gpulayer.remote.occupants import Watch
from gpulayer.remote.remains import orphans, traces
from gpulayer.remote.runs import Run
from gpulayer.remote.wire import FULL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from gpulayer.remote.gang import Gang

_LOOK = 0.5  # seconds between looks at marker, deadline and log; a signal makes it look at once
_QUICK_LOOK = 0.1  # the same while a log grows fast
_DRAIN = 5.0  # seconds that what the leader left behind may go on
_KILLING = 30.0  # seconds after which what does not die of SIGKILL counts as unkillable
_DISK_PAUSE = 1.0  # seconds until a disk that took no final record is tried again
_GIVING_BACK = 4.0  # seconds that a driver may take to give a dead process's memory back
_MAX_REASON = 4096


class Supervisor:
    """Watches one run from its start to its final record. `lock` is the run's, held as long as this process lives."""

    def __init__(self, run: Run, record: dict[str, Any], lock: int) -> None:
        """`record` is what `state.json` holds (or will hold)."""
        self._run = run
        self._record = record
        self._lock = lock
        self._leader: tuple[int, int] = (0, 0)
        self._leader_status: int | None = None
        self._failure = -1
        self._leases: Collection[int] = ()
        self._aside: set[int] = set()
        self._subreaper = processes.become_subreaper()
        self._known: dict[int, int] = {}
        self._ending = False
        self._watch = Watch(self.state["devices"], run.id, record.get("sight", {}))
        self._gang: Gang | None = None
        limit = record.get("log_limit", LIMIT)
        logs = [(run.log, self.state), *((run.rank_log(rank["rank"]), rank) for rank in self.state.get("ranks") or ())]
        self._caps = [(LogCap(path, limit, entry.get("log_hole")), entry) for path, entry in logs]
        self._uncapped: OSError | None = None
        self.state["foreign_process"] = self._watch.foreign
        self._wakeup, self._alarm = os.pipe()
        for end in (self._wakeup, self._alarm):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._alarm, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)

    @property
    def state(self) -> dict[str, Any]:
        """The run's state as it was last written."""
        state: dict[str, Any] = self._record["state"]
        return state

    def start(
        self,
        spec: dict[str, Any],
        secrets: dict[str, str],
        blobs: Blobs,
        umask: int,
        *,
        leases: Collection[int],
        code: int,
    ) -> None:
        """Write the intent, start the leader and open its gate. Raises OSError; then the job has not run.

        A gang's node waits for the intents of all: RequestError `gang` where one does not come.

        `code` keeps shipped code from being removed: the leader has it open until it becomes the command.
        """
        self._leases = leases
        log = os.open(self._run.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        gate, opener = os.pipe()
        self._failure, failure = os.pipe()
        os.set_blocking(self._failure, False)
        self._write(states.LAUNCHING)
        failpoint("intent-written")
        if self._gang is not None:
            self._gang.commit()
        leader = os.fork()
        if leader == 0:
            os.setsid()
            job.reset_signals()
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            # With the end that we read from at hand it can tell us of its start and live on where we are gone.
            processes.shed({0, 1, 2, gate, failure, self._failure, code, *leases})
            for lease in leases:
                os.set_inheritable(lease, True)  # the job holds its devices itself, whatever becomes of us
            job.lead(self._run, spec, secrets, blobs, umask=umask, gate=gate, failure=failure, gang=self._gang)
        for descriptor in (log, gate, failure, code):
            os.close(descriptor)
        failpoint("leader-forked")
        self._leader = (leader, processes.start_of(leader) or 0)
        self._record["leader"] = self._leader
        self._write(states.RUNNING)
        failpoint("running-written")
        os.write(opener, job.GATE)
        os.close(opener)
        failpoint("gate-opened")
        self._keep_awake()

    def watch(self) -> None:
        """Stay until the run has ended, for whatever reason, and write its final record."""
        while not self._leader_ended():
            cause = self._cause_to_stop()
            if cause is not None:
                self._stop(*cause)
                return
            self._sleep(self._patience())
            if not self._subreaper:
                self._members()  # learns of those that are about to leave their parents
            if self._watch.step(self._members):
                self.state["foreign_process"] = self._watch.foreign
                self._note(self.state["status"])
        failpoint("leader-ended")
        unkillable = self._drain()
        status, outcome = self._outcome()
        self._finish(status, unkillable, **outcome)

    def fail(self, reason: str) -> None:
        """Record that the run, whose intent was written, did not start."""
        self._finish(states.FAILED_TO_START, self._kill(), reason=reason)

    def _cause_to_stop(self) -> tuple[str, float, str | None] | None:
        """Return the status, the grace in seconds and the reason of a stop that is due."""
        cancel = self._run.cancellation()
        if cancel is not None:
            grace = cancel.get("grace")
            return states.CANCELLED, self._record["grace"] if grace is None else grace, cancel.get("by")
        deadline = self._record["deadline"]
        if deadline is not None and clock.boot_time() >= deadline:
            return states.TIMED_OUT, self._record["grace"], None
        if self._uncapped is not None:
            why = f"its output is too long for the disk, and its middle cannot be dropped: {self._uncapped}"
            return states.LOG_CAPPED, self._record["grace"], why
        return None

    def _patience(self) -> float:
        """Return the seconds until the marker or the deadline is looked at again."""
        look = _QUICK_LOOK if any(cap.fast for cap, _ in self._caps) else _LOOK
        deadline = self._record["deadline"]
        return look if deadline is None else min(look, max(0.0, deadline - clock.boot_time()))

    def _stop(self, status: str, grace: float, reason: str | None) -> None:
        self._note(states.STOPPING)
        self._ending = True
        failpoint("stopping-written")
        leader = self._leader[0]
        members = self._members()
        for pid, start in sorted(members.items(), key=lambda member: member[0] != leader):
            processes.send(pid, start, signal.SIGTERM)
            processes.send(pid, start, signal.SIGCONT)  # a stopped process hears TERM only then
        give_up = time.monotonic() + grace
        while members and time.monotonic() < give_up:
            self._sleep(min(0.1, max(0.0, give_up - time.monotonic())))
            members = self._members()
        self._finish(status, self._kill(), reason=reason)

    def _drain(self) -> set[int]:
        """Let what the leader left behind end, then kill it; return what cannot be killed."""
        self._ending = True
        give_up = time.monotonic() + _DRAIN
        while self._members():
            if time.monotonic() >= give_up or self._run.cancellation() is not None:
                return self._kill()
            self._sleep(0.1)
        return set()

    def _kill(self) -> set[int]:
        """Kill the whole tree, and return what does not die.

        All are stopped before any is killed, until no new one appears: otherwise one that respawns the others wins.
        """
        self._ending = True
        give_up = time.monotonic() + _KILLING
        while True:
            stopped: dict[int, int] = {}
            quiet = 0
            while quiet < 2:  # noqa: PLR2004  # one that was just being born is seen the second time
                new = {pid: start for pid, start in self._members().items() if stopped.get(pid) != start}
                for pid, start in new.items():
                    processes.send(pid, start, signal.SIGSTOP)
                stopped.update(new)
                quiet = 0 if new else quiet + 1
            for pid, start in stopped.items():
                processes.send(pid, start, signal.SIGKILL)
            self._sleep(0.02)
            members = self._members()
            if not members:
                return set()
            if time.monotonic() >= give_up:
                return set(members)

    def _finish(self, status: str, unkillable: set[int], **outcome: object) -> None:
        outcome["left"] = self._left(unkillable)
        if unkillable:
            pids = ", ".join(str(pid) for pid in sorted(unkillable))
            outcome["reason"] = f"unkillable: {pids} do not die of SIGKILL and keep their devices"
        else:
            for lease in self._leases:  # before the end can be seen: who sees it may take the device
                os.close(lease)
        while not self._written(status, outcome):
            self._sleep(_DISK_PAUSE)
        failpoint("exit-written")
        while self._members():  # the devices stay ours until the last one is gone
            self._sleep(_LOOK)

    def _written(self, status: str, outcome: dict[str, object]) -> bool:
        """Write the final record; False where the disk does not take it now: nobody else knows how the run ended."""
        try:
            failpoint("exit-due")
            for path in self._run.logs():
                log = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                records.durable(log)
                os.close(log)
            self._run.finish(self.state, status, **outcome)
        except OSError:
            return not os.path.isdir(self._run.folder)  # where even that is gone there is nobody to be told
        return True

    def _left(self, unkillable: set[int]) -> dict[str, Any]:
        """Return what is left of the run: whether its tree is empty, its devices free, and who still holds what."""
        devices, found = self._watch.end(_GIVING_BACK)
        tree = "alive" if unkillable else "empty" if self._sees_all() else "best_effort"
        return {"tree": tree, "devices": devices, "processes": [*map(processes.describe, sorted(unkillable)), *found]}

    def _sees_all(self) -> bool:
        """Whether no process can have left the tree unseen."""
        return self._subreaper

    def _note(self, status: str) -> None:
        """Write what is good to know and not needed: a full disk must not end the supervisor."""
        with contextlib.suppress(OSError):
            self._write(status)

    def _write(self, status: str) -> None:
        self.state["status"] = states.move(self.state["status"], status)
        records.replace(self._run.record, self._record)

    def _sleep(self, seconds: float) -> None:
        """Sleep until a signal comes, at most `seconds`; then reap."""
        select.select(self._sources(), [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        self._reap()
        for cap, entry in self._caps:
            self._trim_log(cap, entry)

    def _sources(self) -> list[Any]:
        """Return what is worth waking up for."""
        return [self._wakeup]

    def _trim_log(self, cap: LogCap, entry: dict[str, Any]) -> None:
        """Drop the middle of a log that takes too much of the disk. Said first: nobody takes zeros for output."""
        hole = cap.due()
        if hole is None or self._uncapped is not None:
            return
        try:
            entry["log_hole"] = hole
            self._write(self.state["status"])
            cap.punch(hole)
        except OSError as error:
            entry["log_hole"] = cap.hole
            if error.errno not in FULL:
                self._uncapped = error
            self._note(self.state["status"])
        else:
            cap.hole = hole

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._leader[0]:
                    self._leader_status = status

    def _leader_ended(self) -> bool:
        self._reap()
        return self._leader_status is not None

    def _members(self) -> dict[int, int]:
        """Return the living processes of the run with their starts."""
        self._reap()
        table = processes.living()
        for pid in self._aside | self._watch.aside:
            table.pop(pid, None)
        roots = {os.getpid()}
        if not self._subreaper:
            # Without a subreaper a child whose parent has died is found by what was seen before, by its group, and in
            # the end, when it is worth its price, by the log that it has open and the environment that it was given.
            known = {pid for pid, start in self._known.items() if pid in table and table[pid].start == start}
            groups = {table[pid].group for pid in known} - {os.getpgrp()}
            roots |= known | {process.pid for process in table.values() if process.group in groups}
            if self._ending:
                roots |= traces(self._run, table)
        self._known = {pid: table[pid].start for pid in processes.below(roots, table)}
        return self._known

    def _outcome(self) -> tuple[str, dict[str, Any]]:
        """Return how the leader has ended: the status and what belongs to it."""
        status, told = self._leader_status or 0, b""
        with contextlib.suppress(BlockingIOError):
            told = os.read(self._failure, _MAX_REASON)
        reason = told.removeprefix(job.READY).decode("utf-8", "replace")
        if os.WIFSIGNALED(status):
            if told:
                return states.SIGNALED, {"signal": os.WTERMSIG(status)}
            reason = f"ended by signal {os.WTERMSIG(status)} before its command ran"
        if reason:
            return states.FAILED_TO_START, {"reason": reason}
        return states.EXITED, {"code": os.WEXITSTATUS(status)}

    def _keep_awake(self) -> None:
        helper = keep_awake(os.getpid())
        if helper is not None:
            self._aside.add(helper)


class Caretaker(Supervisor):
    """Watches a run whose supervisor has died: its leader is no child of ours, so its exit code cannot be seen."""

    def __init__(self, run: Run, record: dict[str, Any], lock: int) -> None:
        """Take over. The record names us as the supervisor from now on."""
        super().__init__(run, record, lock)
        self._leader = (record["leader"][0], record["leader"][1])
        self._record["supervisor"] = (os.getpid(), processes.start_of(os.getpid()))
        self._note(states.ORPHANED)
        self._keep_awake()

    def _leader_ended(self) -> bool:
        return processes.start_of(self._leader[0]) != self._leader[1]

    def _cause_to_stop(self) -> tuple[str, float, str | None] | None:
        cause = super()._cause_to_stop()
        if cause is None and self.state.get("gang") is not None:
            # Its link to the others died with the supervisor: they are stopped already.
            return states.LOST, self._record["grace"], "supervisor_died"
        return cause

    def _sees_all(self) -> bool:
        return False

    def _members(self) -> dict[int, int]:
        return orphans(self._run, self._leader)

    def _outcome(self) -> tuple[str, dict[str, Any]]:
        return states.LOST, {"reason": "supervisor_died"}

    def _stop(self, status: str, grace: float, reason: str | None) -> None:
        late = "late" if status == states.TIMED_OUT else reason
        super()._stop(status, grace, late)

    def _write(self, status: str) -> None:
        # An orphan stays one until its end.
        super()._write(status if status == states.ORPHANED else self.state["status"])
