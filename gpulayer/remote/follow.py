"""A run as it goes: its log by offset and its states, until the last byte and the final state."""

from __future__ import annotations

import hashlib
import os
import time

from gpulayer.remote import states
from gpulayer.remote.runs import removed
from gpulayer.remote.settling import settled
from gpulayer.remote.wire import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from gpulayer.remote.runs import Run
    from gpulayer.remote.watch import Watch

_CHUNK = 256 * 1024
_TOLD = ("status", "foreign_process", "ranks", "first_failure")  # of a state, where it has changed
_SETTLE = 1.0  # seconds between looks at whether a run's supervisor lives
_SHORTEST, _LONGEST = 0.002, 0.128  # seconds between looks at a log
_DUE, _ANY_TIME = 16, 4
"""What a silence is divided by for the next pause: once a state has changed output is due, and waited for closely."""


def follow(
    run: Run, offset: int, tail: dict[str, Any] | None, rank: int | None = None, watch: Watch | None = None
) -> Generator[tuple[dict[str, Any], bytes] | float, None, dict[str, Any]]:
    """Send what comes after `offset` as frames, and each new state; return the final state, after the whole log.

    A float that is yielded is for how many seconds there is nothing to send. `tail` says what the follower has before
    `offset`; RequestError `log_replaced` where the log says otherwise. `rank` is one of a gang's whose log it is; None
    stands for the run's own. Who has a `watch` of the run's folder is told when to look; else the pauses are short.
    """
    state = _state(run)
    entry = _entry(run, state, rank)
    yield {"state": state}, b""
    if run.buried:
        return _last_word(run, state, whole=offset == entry["log_size"])
    log = _open(run, rank)
    try:
        _check_tail(log, offset, tail, entry.get("log_hole"))
        told = watch is not None and watch.add(_log_path(run, rank))
        news = looked = time.monotonic()
        share = _DUE if rank is None else _ANY_TIME  # a rank begins seconds later, and its state tells
        sign = None
        while True:
            now = time.monotonic()
            latest = _sign(run)
            if latest != sign or now - looked >= _SETTLE:
                sign, looked = latest, now
                before, state = state, _state(run)
                if _differ(before, state):
                    news, share = now, _DUE
                    if state["status"] not in states.FINAL:
                        yield {"state": state}, b""
            # The state is read before the log: a final state then comes after all that belongs to it.
            final = state["status"] in states.FINAL
            header, data, after = _next(log, offset, _entry(run, state, rank), final=final)
            if header is not None:
                if data and _sign(run) != sign:
                    continue  # what was just read may have been dropped: the new state tells
                yield header, data
                offset, news, share = after, now, _ANY_TIME
            elif final:
                return {"state": state}
            else:
                yield looked + _SETTLE - now if told else _pause(now, (now - news) / share)
    finally:
        os.close(log)


def _state(run: Run) -> dict[str, Any]:
    """Return the state of a run. One whose folder somebody has removed meanwhile is known no more, and has no end."""
    state = settled(run)
    if state is None:
        raise RequestError("unknown_run", f"this host knows no run {run.id}")
    return state


def _last_word(run: Run, state: dict[str, Any], *, whole: bool) -> dict[str, Any]:
    """Return the answer of a run that was removed: its log went too, unless the follower has the whole of it."""
    if not whole:
        raise removed(run)
    return {"state": state}


def _open(run: Run, rank: int | None) -> int:
    return os.open(_log_path(run, rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_CREAT, 0o600)


def _log_path(run: Run, rank: int | None) -> str:
    return run.log if rank is None else run.rank_log(rank)


def _entry(run: Run, state: dict[str, Any], rank: int | None) -> dict[str, Any]:
    """Return what holds the size and the hole of a log: the state itself, or the entry of a rank."""
    if rank is None:
        return state
    for entry in state.get("ranks") or ():
        if entry["rank"] == rank:
            found: dict[str, Any] = entry
            return found
    raise RequestError("request", f"rank {rank} is none of {run.id} on this host", fix="ask the host that has it")


def _next(log: int, offset: int, entry: dict[str, Any], *, final: bool) -> tuple[dict[str, Any] | None, bytes, int]:
    """Return the next frame of a log and where it ends: bytes or the hole that lies there; None where nothing does."""
    hole = entry.get("log_hole")
    if hole and hole[0] <= offset < hole[1]:
        return {"off": offset, "hole": hole[1] - offset}, b"", hole[1]
    end = entry["log_size"] if final else os.fstat(log).st_size
    if hole and offset < hole[0]:
        end = min(end, hole[0])
    data = os.pread(log, min(end - offset, _CHUNK), offset) if end > offset else b""
    return ({"off": offset} if data else None), data, offset + len(data)


def _check_tail(log: int, offset: int, tail: dict[str, Any] | None, hole: tuple[int, int] | None) -> None:
    if tail is not None and hole and offset - int(tail["bytes"]) < hole[1] and offset > hole[0]:
        return  # of what was dropped nothing is left to compare with
    if tail is None:
        have, digest = 0, hashlib.sha256().hexdigest()
    else:
        have, digest = int(tail["bytes"]), tail["sha256"]
    found = os.pread(log, have, offset - have) if have <= min(offset, _CHUNK) else b""
    if os.fstat(log).st_size < offset or hashlib.sha256(found).hexdigest() != digest:
        raise RequestError(
            "log_replaced",
            "the log on the host is not the one that was followed before",
            fix="remove the local copy and follow from the beginning",
        )


def _sign(run: Run) -> tuple[int, int, bool]:
    """Return something that changes with the state, for the price of looking at two files."""
    try:
        found = os.stat(run.record)
    except FileNotFoundError:
        return 0, 0, os.path.exists(run.exit)
    return found.st_ino, found.st_mtime_ns, os.path.exists(run.exit)


def _differ(before: dict[str, Any], state: dict[str, Any]) -> bool:
    return any(state.get(name) != before.get(name) for name in _TOLD)


def _pause(now: float, wanted: float) -> float:
    """Return how long to leave a silent log alone, about as many seconds as wanted.

    The pause ends on a grid of powers of two, so that many follows wake up together.
    """
    step = _SHORTEST
    while step * 2 <= min(wanted, _LONGEST):
        step *= 2
    return step - now % step
