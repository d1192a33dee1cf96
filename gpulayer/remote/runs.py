"""One run on this host: the one place that knows its paths and the form of its records.

A run exists once its `state.json` does: that is the intent, written before anything starts and never taken back.
Its `lock` is held by its supervisor as long as that lives; the kernel frees it, whatever the supervisor dies of.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time

from gpulayer.remote import clock, records, states
from gpulayer.remote.logcap import LIMIT
from gpulayer.remote.rank import log_name
from gpulayer.remote.wire import FULL, RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SPEC = "gpulayer.spec/1"
RECORD = "gpulayer.run/1"
EXIT = "gpulayer.exit/1"
TOMBSTONE = "gpulayer.tombstone/1"
CANCEL = "gpulayer.cancel/1"

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_LOG = re.compile(r"output\.log|rank-\d+\.log")
_TAIL = 4096
_MAX_REASON = 2000
_RESERVE = 64 * 1024  # bytes; a final record has a few
_UNSEEN = "its end was not seen"
_CANCELLED_ONFULL_DISK = "cancelled on a full disk"


class Run:
    """A run by its id, whether it exists or not."""

    def __init__(self, state_folder: str, run: str) -> None:
        """`run` is a run id, or RequestError `request` is raised."""
        if not _RUN_ID.fullmatch(run):
            raise RequestError("request", f"{run!r} is no run id")
        self.id = run
        self.folder = os.path.join(state_folder, "runs", run)
        self.lock = os.path.join(self.folder, "lock")
        self.spec = os.path.join(self.folder, "spec.json")
        self.record = os.path.join(self.folder, "state.json")
        self.exit = os.path.join(self.folder, "exit.json")
        self.cancel = os.path.join(self.folder, "cancel.json")
        self.spare_cancel = os.path.join(self.folder, "cancel.spare")
        self.reserve = os.path.join(self.folder, "reserve")
        self.diary = os.path.join(self.folder, "supervisor.log")
        self.log = os.path.join(self.folder, "output.log")
        self.work = os.path.join(self.folder, "work")
        self.shims = os.path.join(self.folder, "bin")
        self.prepared = os.path.join(state_folder, "prepared")
        self.tombstone = os.path.join(state_folder, "done", f"{run}.json")

    def create(self) -> None:
        """Make the folder, durably: a run that was begun must be known after a power loss."""
        for folder in (os.path.dirname(self.folder), self.folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
                records.durable_folder(os.path.dirname(folder))

    def exists(self) -> bool:
        """Say whether this run was ever begun. Damaged records count: what they belong to may have run."""
        return any(map(os.path.lexists, (self.record, self.exit, self.tombstone)))

    @property
    def buried(self) -> bool:
        """Whether its folder was removed, and with it log and outputs."""
        return os.path.lexists(self.tombstone) and not os.path.lexists(self.exit)

    def try_lock(self) -> int | None:
        """Return the descriptor of the lock, taken, or None while somebody else has it.

        Raises FileNotFoundError where there is no folder of the run, or none any more.
        """
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(self.lock, follow_symlinks=False)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "the run was removed meanwhile", self.lock)

    def final(self) -> dict[str, Any] | None:
        """Return the final state, or None where there is none. A damaged one is renamed: it must not hide the run."""
        try:
            record = records.read(self.exit, EXIT)
            return self._epitaph() if record is None else self._check(record, states.FINAL)
        except records.DamagedError:
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.exit, f"{self.exit}.damaged-{int(time.time())}")
            return None

    def bury(self, state: dict[str, Any]) -> None:
        """Leave the final state where it stays when the run's folder is removed."""
        os.makedirs(os.path.dirname(self.tombstone), mode=0o700, exist_ok=True)
        records.write_once(self.tombstone, {"schema": TOMBSTONE, "state": state})

    def age(self) -> float:
        """Return the seconds since the end of a run that has its final record.

        Within one boot it is told by the boot's clock, which nobody sets; after a reboot only the wall clock is left.
        """
        try:
            ended = (records.read(self.exit, EXIT) or {}).get("ended")
            if ended is not None and ended["session"] == clock.session_id():
                return clock.boot_time() - float(ended["boot_time"])
            return time.time() - os.stat(self.exit).st_mtime
        except (records.DamagedError, FileNotFoundError, KeyError, TypeError, ValueError):
            return 0.0

    def last_known(self) -> dict[str, Any]:
        """Return the record of a run that exists, as last written; where that is damaged, what is left."""
        try:
            record = records.read(self.record, RECORD) or {}
            self._check(record, states.LIVE)
        except records.DamagedError:
            record = self._rebuilt()
        self.measure(record["state"])
        return record

    def cancellation(self) -> dict[str, Any] | None:
        """Return the marker of a cancel, with `grace` (seconds or None) and `by`, or None where there is none."""
        try:
            return records.read(self.cancel, CANCEL)
        except (records.DamagedError, RequestError):  # damaged, or a newer version's: somebody did want it to end
            return {"grace": None, "by": None}

    def set_aside(self) -> None:
        """Take what the run's end will need of the disk, before it begins. Raises OSError where there is too little.

        A job may fill the disk: its final record then takes the place of the reserve, and its cancel needs a name only.
        """
        with open(os.open(self.reserve, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(os.urandom(_RESERVE))  # what a file system cannot compress
        records.replace(self.spare_cancel, {"schema": CANCEL, "grace": None, "by": _CANCELLED_ONFULL_DISK})

    def free_reserve(self) -> None:
        """Give back what was set aside."""
        for path in (self.reserve, self.spare_cancel):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def request_cancel(self, grace: float | None, by: str) -> None:
        """Leave the marker of a cancel, durably. The first one counts. On a full disk it is the one set aside."""
        try:
            records.write_once(self.cancel, {"schema": CANCEL, "grace": grace, "by": by, "at": clock.stamp()})
        except OSError as error:
            if error.errno not in FULL:
                raise
            with contextlib.suppress(FileExistsError):
                os.link(self.spare_cancel, self.cancel)

    def finish(self, state: dict[str, Any], status: str, **outcome: object) -> dict[str, Any]:
        """Write the final record, once, and return the final state: that of an earlier writer if there was one.

        `outcome` may hold `code`, `signal`, `reason` and `left`. The log must be complete. Raises OSError.
        """
        reason = outcome.get("reason")
        final: dict[str, Any] = {
            **state,
            "status": states.move(str(state["status"]), status),
            "code": outcome.get("code"),
            "signal": outcome.get("signal"),
            "reason": None if reason is None else str(reason)[:_MAX_REASON],
            "left": outcome.get("left"),
            "ended_at": clock.stamp(),
        }
        self.measure(final)
        for entry in final.get("ranks") or ():
            if entry["status"] in states.LIVE:  # nobody told how it ended
                seen = status not in (states.EXITED, states.SIGNALED)
                entry.update(status=status if seen else states.LOST, reason=final["reason"] if seen else _UNSEEN)
        ended = {"session": clock.session_id(), "boot_time": clock.boot_time()}
        record = {"schema": EXIT, "state": final, "ended": ended, "log_tail_sha256": self._tail_hash()}
        try:
            written = records.write_once(self.exit, record)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.free_reserve()
            written = records.write_once(self.exit, record)
        if written:
            self.free_reserve()
            return final
        return self.final() or final

    def rank_log(self, rank: int) -> str:
        """Return the path of the log of a gang's rank, which may run on another node."""
        return os.path.join(self.folder, log_name(rank))

    def logs(self) -> list[str]:
        """Return the logs that are there: the run's, and those of a gang's ranks."""
        names = sorted(name for name in os.listdir(self.folder) if _LOG.fullmatch(name))
        return [os.path.join(self.folder, name) for name in names]

    def measure(self, state: dict[str, Any]) -> None:
        """Put the bytes that the job has written so far into a state; 0 before a log exists."""
        state["log_size"] = _size(self.log)
        for entry in state.get("ranks") or ():
            entry["log_size"] = _size(self.rank_log(entry["rank"]))

    def _epitaph(self) -> dict[str, Any] | None:
        """Return the state on the tombstone; None where there is none. What it cannot tell any more is lost."""
        try:
            record = records.read(self.tombstone, TOMBSTONE)
            return None if record is None else self._check(record, states.FINAL)
        except records.DamagedError:
            state: dict[str, Any] = self._rebuilt()["state"]
            return {**state, "status": states.LOST, "reason": "supervisor_died"}

    def _check(self, record: dict[str, Any], allowed: frozenset[str]) -> dict[str, Any]:
        state = record.get("state")
        if not isinstance(state, dict) or state.get("run") != self.id or state.get("status") not in allowed:
            raise records.DamagedError(f"a record of {self.id} does not belong to it")
        return state

    def _rebuilt(self) -> dict[str, Any]:
        """Return what is known of a run whose record is damaged: it may have run, so it must never count as absent."""
        try:
            spec = records.read(self.spec, SPEC)
        except records.DamagedError:
            spec = None
        if spec is None or spec.get("run") != self.id:
            unknown = {"project": "", "job": self.id, "key": "", "attempt": 0, "host": "", "accelerator": ""}
            spec = {"run": self.id, **unknown, "devices": [], "outputs": [], "grace": 0}
        state = {**first_state(spec), "status": states.RUNNING, "started_at": None}
        record = new_record(state, deadline=None, grace=spec["grace"], sight={}, log_limit=LIMIT)
        return {**record, "leader": [0, 0]}

    def _tail_hash(self) -> str | None:
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                return hashlib.sha256(file.read(_TAIL)).hexdigest()
        except FileNotFoundError:
            return None


def _size(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def removed(run: Run) -> RequestError:
    """Return what is said of a log or of outputs that were removed."""
    return RequestError(
        "removed", f"log and outputs of {run.id} were removed from this host", fix="what was fetched before is kept"
    )


def first_state(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a run that begins now."""
    gang = spec.get("gang")
    named = ("run", "project", "job", "key", "attempt", "host", "accelerator", "devices")
    return {
        **{name: spec[name] for name in named},
        "status": states.LAUNCHING,
        "code": None,
        "signal": None,
        "reason": None,
        "started_at": clock.stamp(),
        "ended_at": None,
        "log_size": 0,
        "outputs": spec["outputs"],
        "log_hole": None,
        "foreign_process": None,
        "left": None,
        "gang": None if gang is None else {name: gang[name] for name in ("node", "nodes", "processes")},
        "ranks": None if gang is None else _first_ranks(gang),
        "first_failure": None,
    }


def _first_ranks(gang: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ranks of a node before any has begun."""
    first = gang["node"] * gang["processes"]
    fresh = {"status": states.LAUNCHING, "code": None, "signal": None, "reason": None, "log_size": 0, "log_hole": None}
    return [{"rank": rank, **fresh} for rank in range(first, first + gang["processes"])]


def new_record(
    state: dict[str, Any], *, deadline: float | None, grace: float, sight: dict[str, Any], log_limit: int
) -> dict[str, Any]:
    """Return what `state.json` holds: the state, and what only this host needs. `deadline` is in boot time.

    `sight` is what was seen on the run's devices before it started; `log_limit` is in bytes.
    """
    return {
        "schema": RECORD,
        "state": state,
        "session": clock.session_id(),
        "deadline": deadline,
        "grace": grace,
        "sight": sight,
        "log_limit": log_limit,
        "supervisor": None,
        "leader": None,
    }
