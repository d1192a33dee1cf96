"""Words for how a run stands or has ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpulayer.placement.plan import KnownRun
from gpulayer.remote import states
from gpulayer.run.events import Event

MEMORY = "probably for memory"
KILLED_BELOW = 128 + signal.SIGKILL  # how a shell says it (POSIX, XCU 2.8.2)


def run_words(run: KnownRun) -> str:
    """Return how a run stands in words; of a gang, which rank failed first."""
    words = ended(run.status, run.code, run.signal, run.reason)
    return words + _first(asdict(run.first_failure) if run.first_failure else None)


def event_words(event: Event) -> str:
    """Return what a status event says, alike."""
    detail = event.detail
    words = ended(event.event, detail.get("code"), detail.get("signal"), detail.get("reason"))
    return words + _first(detail.get("first_failure"))


def ended(status: str, code: int | None, sent: int | None, reason: str | None) -> str:
    """Return a run's status in words: `exited 3`, `killed by SIGSEGV`, `lost (reboot)`.

    Who sends SIGKILL to a job that nobody cancelled is mostly the kernel, when memory ends. A shell whose program died
    of it exits with 137.
    """
    if status == states.EXITED:
        words = f"exited {'with an unknown code' if code is None else code}"
        return f"{words}: killed, {MEMORY}" if code == KILLED_BELOW else words
    if status == states.SIGNALED and sent is not None:
        names = {number.value: number.name for number in signal.Signals}
        words = f"killed by {names.get(sent, f'signal {sent}')}"
        return f"{words}, {MEMORY}" if sent == signal.SIGKILL else words
    word = status.replace("_", " ")
    if reason and status == states.LOST and " " not in reason:  # a word of docs/states.md; names stay as they are
        reason = reason.replace("_", " ")
    return f"{word} ({reason})" if reason else word


def _first(failure: Mapping[str, Any] | None) -> str:
    if failure is None or failure["rank"] is None:  # the reason names the host
        return ""
    return f": rank {failure['rank']} on {failure['host']} failed first"
