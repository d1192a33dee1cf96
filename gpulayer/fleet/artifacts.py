"""Fetching a run's outputs. The host is not trusted: names, sizes and counts are checked, nothing leaves the folder.

Files are written into a fresh folder, relative to its open descriptor and never through a link; the folder takes its
final name once everything is there, in the place of what an earlier fetch left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gpulayer.errors import HostError, Stage, StateError
from gpulayer.fleet.session import Session

MAX_FILES = 100_000
MAX_NAME = 1024
MAX_PART = 255
MAX_SKIPPED = 100_000
KEPT_SKIPPED = 1000
"""Of what a host left out, so many are named; the rest is counted, so that a host's words fill no memory."""

KEPT_FREE = 256 * 1024 * 1024
"""Bytes that stay free on the local disk."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DRIVE = re.compile(r"[A-Za-z]:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What came: regular files and their bytes, and (path, reason) of what the host left out, the first 1,000.

    `unmatched` are the patterns that no file there matched.
    """

    files: int
    bytes: int
    skipped: tuple[tuple[str, str], ...]
    unmatched: tuple[str, ...]


async def fetch(
    session: Session,
    run: str,
    patterns: Sequence[str],
    dest: Path,
    progress: Callable[[int], None] | None = None,
) -> Fetched:
    """Fetch a run's outputs into `dest`, which they replace. `progress` is called with the bytes so far.

    Raises StateError where `dest` holds links or cannot be written, AgentError (`quota`, `pattern`, `unknown_run`), and
    HostError where the host sends what it may not.
    """
    _refuse_links(dest)
    try:
        dest.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    except OSError as error:
        raise _unwritable(dest, error) from error
    try:
        with _Writer(session.name, fresh) as writer:
            stream = await session.stream("fetch", run=run, patterns=list(patterns))
            try:
                async for reply in stream:
                    writer.take(reply.header, reply.payload)
                    if progress is not None:
                        progress(writer.bytes)
            finally:
                await stream.stop()
            fetched = writer.finish(stream.last, patterns)
        _put_in_place(fresh, dest)
    except OSError as error:
        raise _unwritable(dest, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return fetched


def _unwritable(dest: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot write the outputs to {dest} ({error.strerror})", fix="free some space, or make it writable"
    )


def _refuse_links(dest: Path) -> None:
    """Raise StateError where there is a link in or at `dest`: we never make one, so somebody else did."""
    links = [dest] if dest.is_symlink() else []
    for folder, folders, files in os.walk(dest):
        links += [path for name in (*folders, *files) if (path := Path(folder, name)).is_symlink()]
    if links:
        raise StateError(f"{links[0]} is a symbolic link, where only fetched files should be", fix="remove it")


def _put_in_place(fresh: Path, dest: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        with contextlib.suppress(FileNotFoundError):
            dest.rename(old / "old")
        fresh.rename(dest)
    finally:
        shutil.rmtree(old, ignore_errors=True)


class _Writer:
    """Writes the records of one fetch below an open folder."""

    def __init__(self, host: str, root: Path) -> None:
        self._host = host
        self._root = os.open(root, _FOLDER)
        self._file: int | None = None
        self._name = ""
        self._size = 0
        self._offset = 0
        self.files = 0
        self.bytes = 0
        self._skipped: list[tuple[str, str]] = []
        self._left_out = 0
        free = os.statvfs(root)
        self._room = free.f_bavail * free.f_frsize - KEPT_FREE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        os.close(self._root)

    def take(self, header: Mapping[str, Any], payload: bytes) -> None:
        """Write one record. Raises HostError where it is not what the protocol allows, OSError where writing fails."""
        if "skipped" in header:
            self._skip(header.get("skipped"), header.get("why"))
            return
        name, size, offset = header.get("file"), header.get("size"), header.get("off")
        if self._file is None:
            self._begin(name, size, executable=header.get("exec") is True)
        if name != self._name or size != self._size or offset != self._offset:
            raise self._bad("sends a file's parts in disorder")
        if self._file is None or self._offset + len(payload) > self._size:
            raise self._bad(f"sends more of {self._name!r} than it has")
        view = memoryview(payload)
        while view:
            view = view[os.write(self._file, view) :]
        self._offset += len(payload)
        self.bytes += len(payload)
        if header.get("last") is True:
            if self._offset != self._size:
                raise self._bad(f"sends less of {self._name!r} than it has")
            self._close()

    def finish(self, last: Mapping[str, Any], patterns: Sequence[str]) -> Fetched:
        """Return the sums. Raises HostError where the host counts otherwise, or tells of other patterns."""
        if self._file is not None or (last.get("files"), last.get("bytes")) != (self.files, self.bytes):
            raise self._bad("ends before all files have come")
        unmatched = last.get("unmatched")
        if not isinstance(unmatched, list) or any(pattern not in patterns for pattern in unmatched):
            raise self._bad("does not say which patterns matched nothing")
        more = self._left_out - len(self._skipped)
        rest = [("\N{HORIZONTAL ELLIPSIS}", f"and {more:,} more")] if more else []
        return Fetched(
            files=self.files, bytes=self.bytes, skipped=(*self._skipped, *rest), unmatched=tuple(unmatched)
        )  # fmt: skip

    def _begin(self, name: object, size: object, *, executable: bool) -> None:
        if not isinstance(name, str) or not _harmless(name):
            raise self._bad(f"sends a file with a name that is not allowed: {name!r:.200}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise self._bad(f"sends a size that is none: {size!r:.40}")
        if self.files >= MAX_FILES:
            raise self._bad(f"sends more than {MAX_FILES} files", fix="name fewer files in `outputs`, or pack them")
        if self.bytes + size > self._room:
            raise StateError(
                f"the outputs do not fit on this disk: {name!r} alone has {size} bytes",
                fix="free some space, or name fewer files in `outputs`",
            )
        *folders, leaf = name.split("/")
        try:
            with contextlib.ExitStack() as opened:
                folder = self._root
                for part in folders:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=folder)
                    folder = os.open(part, _FOLDER, dir_fd=folder)
                    opened.callback(os.close, folder)
                self._file = os.open(leaf, _FRESH, 0o600, dir_fd=folder)
        except (FileExistsError, NotADirectoryError) as error:
            raise self._bad(f"sends {name!r} twice, or as a file and a folder") from error
        os.fchmod(self._file, 0o755 if executable else 0o644)
        self._name, self._size, self._offset = name, size, 0
        self.files += 1

    def _skip(self, name: object, why: object) -> None:
        """Keep what the host left out; a file that has begun is taken back."""
        if not isinstance(name, str) or not isinstance(why, str):
            raise self._bad("names no file that it skipped")
        if self._left_out >= MAX_SKIPPED:
            raise self._bad(f"skips more than {MAX_SKIPPED} files", fix="name fewer files in `outputs`")
        self._left_out += 1
        if len(self._skipped) < KEPT_SKIPPED:
            self._skipped.append((name[:MAX_NAME], why[:MAX_NAME]))
        if self._file is not None:
            if name != self._name:
                raise self._bad("sends a file's parts in disorder")
            self._close()
            os.unlink(self._name, dir_fd=self._root)
            self.files -= 1
            self.bytes -= self._offset

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _bad(self, what: str, *, fix: str | None = None) -> HostError:
        return HostError(self._host, Stage.PROTOCOL, what, fix=fix or "is that host what it claims to be?")


def _harmless(name: str) -> bool:
    """Say whether a name stays below the folder on every system and shows as it is."""
    parts = name.split("/")
    return (
        name.isprintable()  # first, since it refuses what cannot be encoded
        and len(name.encode()) <= MAX_NAME
        and "\\" not in name
        and not _DRIVE.match(name)
        and all(part not in ("", ".", "..") and len(part.encode()) <= MAX_PART for part in parts)
    )
