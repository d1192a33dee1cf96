"""What happens while a plan is carried out: a stream of events, each a value with a JSON form."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from gpulayer.placement.plan import KnownRun
from gpulayer.remote import states

SCHEMA: Final = "gpulayer.event/1"

LAUNCHED = "launched"
FOREIGN_PROCESS = "foreign_process"
OUTPUT = "output"
LOG_REPLACED = "log_replaced"
LOG_DROPPED = "log_dropped"
LINK_LOST = "link_lost"
LINK_BACK = "link_back"
SYNCING = "syncing"
SYNCED = "synced"
FETCHING = "fetching"
FETCHED = "fetched"
WARNING = "warning"
SUMMARY = "summary"

STATUSES: Final = frozenset(states.MOVES)
EVENTS: Final = STATUSES | {
    LAUNCHED, FOREIGN_PROCESS, OUTPUT, LOG_REPLACED, LOG_DROPPED, LINK_LOST, LINK_BACK, SYNCING, SYNCED, FETCHING,
    FETCHED, WARNING, SUMMARY,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened. `at` is RFC 3339 UTC, by the controller's clock.

    `event` is a word of EVENTS, and `detail` holds what belongs to it:

    - a status: `accelerator`, `devices`, `attempt`, `code`, `signal`, `reason`, `started_at`, `ended_at`; a job that
      had succeeded before has `up_to_date`, one that a host refused has `fix`, one that is queued to be tried again has
      `last_attempt`, one of which its host tells has `foreign_process` and `left`; a gang has `hosts`, `ranks` and
      `first_failure`, and so has each of its nodes, whose runs have their number in `node`
    - `foreign_process`: `processes` of others that use the run's devices beside it
    - `launched`: `new` (false: the host had it already), `hosts`; `log_replaced`: `offset` at which the log begins anew
    - `log_dropped`: `offset` and `bytes` of the output that the host dropped, because its disk would have been filled
    - `output`: `offset` in the log; the bytes themselves are `data`. In a gang `rank` says whose log it is (None:
      torchrun's on that host), here and in all that is told of a log
    - `link_lost`: `error`; `link_back`: nothing (both are about a host, not a job)
    - `syncing`, `fetching`: `bytes` so far and `total` (None: not known); for display, not recorded
    - `synced`: `files`, `bytes` (of the tree), `sent_files`, `sent_bytes`
    - `fetched`: `files`, `bytes`, `skipped` (list of [path, why]), `unmatched` (patterns that no file on this host
      matched), `path`
    - `warning`: `message`, `fix`
    - `summary`: `counts` {outcome: jobs}, `exit_code`
    """

    event: str
    at: str
    job: str | None = None
    run: str | None = None
    host: str | None = None
    data: bytes = b""
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints: bytes are `text` where they are UTF-8, else `base64`."""
        document = {
            "schema": SCHEMA, "at": self.at, "event": self.event, "job": self.job, "run": self.run, "host": self.host,
            **self.detail,
        }  # fmt: skip
        if self.event == OUTPUT:
            try:
                document["text"] = self.data.decode()
            except UnicodeDecodeError:
                document["base64"] = base64.b64encode(self.data).decode()
        return document


def now() -> str:
    """Return the wall clock as RFC 3339 UTC with milliseconds, for display."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def status_event(run: KnownRun, **detail: object) -> Event:
    """Return the event that says what a run's status is now."""
    return Event(
        event=run.status,
        at=now(),
        job=run.job,
        run=run.run,
        host=run.host or None,
        detail={
            "devices": list(run.devices), "attempt": run.attempt, "code": run.code, "signal": run.signal,
            "reason": run.reason, "started_at": run.started_at, "ended_at": run.ended_at, **_gang(run), **detail,
        },
    )  # fmt: skip


def _gang(run: KnownRun) -> dict[str, object]:
    """Return what a status event tells besides of a gang, or of one of its nodes."""
    if run.nodes is None:
        return {}
    return {
        "node": run.node,
        "hosts": [part.host for part in run.parts if part.host],
        "ranks": [asdict(rank) for part in run.parts for rank in part.ranks],
        "first_failure": run.first_failure and asdict(run.first_failure),
    }
