"""The code sync: what a host lacks of a tree travels, and nothing else.

Contents are named by their sha256, so a file that moved, or that another project shipped, does not travel again. The
manifest goes last: a host that has it had everything.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpulayer.errors import HostError, Stage, UsageError
from gpulayer.fleet.session import Session
from gpulayer.fleet.tree import Source, Tree

PACK = 1024 * 1024
"""Bytes of payload in one frame: small files are packed together, big ones are cut."""

WINDOW = 4
"""Frames under way that the host has not answered."""

ASKED_AT_ONCE = 8000
_PACKED_AT_ONCE = 4000
_PATIENCE = 600.0

Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and the bytes to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What had to travel: distinct files and their bytes."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Pack:
    """One request: whole blobs one after the other, or a part of a big one."""

    op: str
    fields: dict[str, Any]
    read: Callable[[], bytes]


async def sync(session: Session, tree: Tree, progress: Progress | None = None, *, thorough: bool = False) -> Sent:
    """Bring a tree to a host. `thorough` looks at every file, also where the host has the manifest already.

    Raises UsageError where a file has changed since the tree was read, AgentError (`disk`) and HostError.
    """
    async with session.shipping:
        if not thorough and not await _missing(session, [tree.hash]):
            return Sent(files=0, bytes=0)
        missing = await _missing(session, list(tree.blobs))
        sources = [(sha, tree.blobs[sha]) for sha in missing]
        total = sum(source.size for _, source in sources) + len(tree.manifest)
        sender = _Sender(session, total, progress)
        try:
            for packs in (_packs(sources), _manifest(tree)):
                for pack in packs:
                    await sender.send(pack)
                await sender.finish()
        finally:
            await sender.give_up()
    return Sent(files=len(sources), bytes=total - len(tree.manifest))


async def _missing(session: Session, shas: Sequence[str]) -> list[str]:
    """Return which of these contents the host lacks, in their order."""
    missing: list[str] = []
    for start in range(0, len(shas), ASKED_AT_ONCE):
        asked = shas[start : start + ASKED_AT_ONCE]
        answer = (await session.request("have", blobs=asked)).header.get("missing")
        if not isinstance(answer, list):
            raise HostError(session.name, Stage.PROTOCOL, "its answer to `have` names no missing files")
        lacking = {sha for sha in answer if isinstance(sha, str)}
        missing += [sha for sha in asked if sha in lacking]
    return missing


class _Sender:
    """Keeps a few requests under way, so that the link is never idle and memory stays small."""

    def __init__(self, session: Session, total: int, progress: Progress | None) -> None:
        self._session = session
        self._total = total
        self._progress = progress
        self._sent = 0
        self._under_way: list[asyncio.Future[Any]] = []

    async def send(self, pack: _Pack) -> None:
        """Send one request; wait for an earlier one where too many are unanswered."""
        if len(self._under_way) >= WINDOW:
            await self._under_way.pop(0)
        payload = await asyncio.to_thread(pack.read)
        task = asyncio.ensure_future(self._session.request(pack.op, payload, timeout=_PATIENCE, **pack.fields))
        self._under_way.append(task)
        task.add_done_callback(lambda task: self._count(len(payload), task))
        await self._session.drain()

    async def finish(self) -> None:
        """Wait for all answers."""
        while self._under_way:
            await self._under_way.pop(0)

    async def give_up(self) -> None:
        """Forget what is still unanswered, after an error."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _count(self, size: int, task: asyncio.Future[Any]) -> None:
        if self._progress is not None and not task.cancelled() and task.exception() is None:
            self._sent += size
            self._progress(self._sent, self._total)


def _packs(sources: Sequence[tuple[str, Source]]) -> Iterator[_Pack]:
    """Cut big files into parts, and pack small ones together in their order."""
    packed: list[tuple[str, Source]] = []
    size = 0
    for sha, source in sources:
        if source.size > PACK:
            yield from _parts(sha, source)
            continue
        if packed and (size + source.size > PACK or len(packed) == _PACKED_AT_ONCE):
            yield _together(packed)
            packed, size = [], 0
        packed.append((sha, source))
        size += source.size
    if packed:
        yield _together(packed)


def _together(packed: Sequence[tuple[str, Source]]) -> _Pack:
    return _Pack(
        "put",
        {"blobs": [[sha, source.size] for sha, source in packed]},
        lambda: b"".join(_checked(sha, source) for sha, source in packed),
    )


def _checked(sha: str, source: Source) -> bytes:
    """Read a small file. Raises UsageError where it is not what it was."""
    data = _read(source, 0, source.size + 1)
    if hashlib.sha256(data).hexdigest() != sha:
        raise _changed(source)
    return data


def _parts(sha: str, source: Source) -> Iterator[_Pack]:
    def part(offset: int) -> Callable[[], bytes]:
        def read() -> bytes:
            data = _read(source, offset, PACK)
            if len(data) != min(PACK, source.size - offset):
                raise _changed(source)
            return data

        return read

    for offset in range(0, source.size, PACK):
        yield _Pack("put_part", {"blob": sha, "size": source.size, "offset": offset}, part(offset))


def _manifest(tree: Tree) -> Iterator[_Pack]:
    size = len(tree.manifest)
    if size <= PACK:
        yield _Pack("put", {"blobs": [[tree.hash, size]]}, lambda: tree.manifest)
        return
    for offset in range(0, size, PACK):
        fields = {"blob": tree.hash, "size": size, "offset": offset}
        yield _Pack("put_part", fields, lambda offset=offset: tree.manifest[offset : offset + PACK])  # type: ignore[misc]


def _read(source: Source, offset: int, size: int) -> bytes:
    try:
        descriptor = os.open(source.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _changed(source) from error
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)


def _changed(source: Source) -> UsageError:
    return UsageError(f"{source.path} has changed since the plan was made", fix="plan again")
