"""The state of a run for whoever asks: what a supervisor's death has left open is settled by the first who finds it."""

from __future__ import annotations

import os

from gpulayer.remote import clock, processes, states
from gpulayer.remote.remains import orphans

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpulayer.remote.runs import Run


def settled(run: Run) -> dict[str, Any] | None:
    """Return the state of a run, None where there is no such run. What its supervisor's death left open is settled."""
    final = run.final()
    if final is not None or not run.exists():
        return final
    try:
        lock = run.try_lock()
    except FileNotFoundError:  # it was removed at this very moment
        return run.final()
    if lock is None:
        return run.final() or live_state(run)
    try:
        return settle(run, lock)
    finally:
        os.close(lock)


def live_state(run: Run) -> dict[str, Any]:
    """Return the state of a run that exists as it was last written, with a word where its supervisor is held up."""
    record = run.last_known()
    state: dict[str, Any] = record["state"]
    if record["supervisor"] is not None:
        pid, start = record["supervisor"]
        supervisor = processes.look(pid)
        if supervisor is not None and supervisor.start == start and supervisor.stopped:
            state["reason"] = f"its supervisor, process {pid}, is stopped: timeout and cancel wait until it goes on"
    return state


def settle(run: Run, lock: int) -> dict[str, Any]:
    """Settle a run that exists and whose lock is ours: nobody watches it."""
    final = run.final()
    if final is not None:
        return final
    record = run.last_known()
    state: dict[str, Any] = record["state"]
    sessions = {record["session"], clock.session_id()}
    if len(sessions) > 1 and None not in sessions:
        return run.finish(state, states.LOST, reason="reboot")
    if state["status"] == states.LAUNCHING:
        return run.finish(state, states.LOST, reason="never_started")
    if not orphans(run, tuple(record["leader"])):
        return run.finish(state, states.LOST, reason="supervisor_died")
    from gpulayer.remote.supervisor import Caretaker  # needed seldom, and it needs much

    processes.detach(lambda: Caretaker(run, record, lock).watch(), {lock}, run.diary)
    return {**state, "status": states.ORPHANED}
