"""What old runs have left on the hosts: asked for, and removed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpulayer.errors import HostError
from gpulayer.fleet.session import AgentError, Fleet, Session, unable
from gpulayer.run.replies import Reader

GC_SCHEMA: Final = "gpulayer.gc/1"
LIMIT: Final = 3600.0  # seconds: a host may have millions of small files to remove


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRun:
    """A run that was removed, or would be. `bytes` are those of its folder on the disk."""

    run: str
    project: str
    job: str
    status: str
    ended_at: str | None
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One host's answer. `error` is set where it gave none; then nothing else is known.

    `count` and `bytes` are of all old runs, of which `runs` has the first; `live` and `young` count runs that stay;
    `code_count` and `code_bytes` are of shipped files and setups that no run needs any more, `code_busy` where they
    were left alone because a job was being launched.
    """

    host: str
    error: str | None = None
    runs: tuple[OldRun, ...] = ()
    count: int = 0
    bytes: int = 0
    live: int = 0
    young: int = 0
    code_count: int = 0
    code_bytes: int = 0
    code_busy: bool = False


async def collect(fleet: Fleet, hosts: Sequence[str], *, older_than: int, dry: bool) -> list[Garbage]:
    """Remove what is older than `older_than` seconds on all hosts at once, or only ask what that is (`dry`)."""
    found = await fleet.connect(list(hosts))
    return list(await asyncio.gather(*(_collect(host, found[host], older_than, dry=dry) for host in hosts)))


async def _collect(host: str, session: Session | HostError, older_than: int, *, dry: bool) -> Garbage:
    if isinstance(session, HostError):
        return Garbage(host=host, error=str(session))
    try:
        reply = await session.request("gc", timeout=LIMIT, older_than=older_than, dry=dry)
        return _read(host, Reader(host, reply.header))
    except HostError as error:
        return Garbage(host=host, error=str(error))
    except AgentError as error:
        return Garbage(host=host, error=str(unable(error)))


def _read(host: str, reader: Reader) -> Garbage:
    code = Reader(host, reader.get("code"))
    return Garbage(
        host=host,
        runs=tuple(_run(Reader(host, entry)) for entry in reader.items("runs")),
        count=reader.number("count"),
        bytes=reader.number("bytes"),
        live=reader.number("live"),
        young=reader.number("young"),
        code_count=code.number("count"),
        code_bytes=code.number("bytes"),
        code_busy=code.get("busy") is True,
    )


def _run(reader: Reader) -> OldRun:
    return OldRun(
        run=reader.text("run"),
        project=reader.text("project"),
        job=reader.text("job"),
        status=reader.text("status"),
        ended_at=reader.optional_text("ended_at"),
        bytes=reader.number("bytes"),
    )


def gc_document(answers: Sequence[Garbage], *, removed: bool) -> dict[str, Any]:
    """Return the `gpulayer.gc/1` document that `gc --json` prints."""
    return {
        "schema": GC_SCHEMA,
        "removed": removed,
        "hosts": [{**asdict(answer), "runs": [asdict(run) for run in answer.runs]} for answer in answers],
    }
