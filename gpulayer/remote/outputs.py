"""The files that a job leaves behind, found by pattern below its working folder and sent as records.

Every folder is opened relative to the one above it and no link is followed, so that nothing outside can be reached,
whatever a job still running does to its folder meanwhile.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import stat

from gpulayer.remote.files import is_plain
from gpulayer.remote.wire import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    Frame = tuple[dict[str, Any], bytes]
    Wanted = set[tuple[str, tuple[str, ...]]]
    """Patterns, each with what remains of its parts; nothing remains of one that has matched."""

MAX_FILES = 100_000
MAX_BYTES = 2**40
MAX_NAME = 1024
"""Bytes of a path below the working folder."""

_CHUNK = 256 * 1024
_STRANGE = re.compile(r"\\|^[A-Za-z]:")  # what Windows reads as a path
_ANY = ("**",)


def fetch(work: str, patterns: list[str]) -> Generator[Frame | float, None, dict[str, Any]]:
    """Send the regular files below `work` that match, and say what was skipped and why; return the sums.

    A pattern has the parts of a path: `*`, `?` and `[…]` within one part, `**` for any number of parts; a folder that
    matches is sent with all that is in it. Raises RequestError `pattern`, or `quota` above 100,000 files or 1 TiB.
    A `skipped` for a file that has begun takes it back: it changed while it was read. The sums hold as `unmatched` the
    patterns that no file matched, not even one that was skipped.
    """
    wanted = {(pattern, tuple(pattern.strip("/").split("/"))) for pattern in patterns}
    for _, parts in wanted:
        if not is_plain("/".join(parts)):
            raise RequestError("pattern", f"{'/'.join(parts)!r} does not stay below the working folder")
    sums: dict[str, Any] = {"files": 0, "bytes": 0, "skipped": 0, "unmatched": list(patterns)}
    try:
        root = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return sums
    yield from _folder(root, "", _reach(wanted), sums)
    return sums


def _folder(folder: int, path: str, wanted: Wanted, sums: dict[str, Any]) -> Generator[Frame, None, None]:
    """Send what matches below an open folder, and close it."""
    try:
        for name in sorted(os.listdir(folder)):
            rest = _advance(wanted, name)
            if rest:
                yield from _entry(folder, name, f"{path}{name}", rest, sums)
    finally:
        os.close(folder)


def _entry(folder: int, name: str, path: str, rest: Wanted, sums: dict[str, Any]) -> Generator[Frame, None, None]:
    matched = {pattern for pattern, parts in rest if not parts}
    try:
        kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(kind):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            yield from _folder(below, f"{path}/", rest | {(pattern, _ANY) for pattern in matched}, sums)
            return
        if not matched:
            return
        sums["unmatched"] = [pattern for pattern in sums["unmatched"] if pattern not in matched]
        why = _why_not(path, kind)
        if why is None:
            # Should it have become a FIFO meanwhile, O_NONBLOCK keeps us from waiting for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            why = yield from _file(os.open(name, flags, dir_fd=folder), path, sums)
    except OSError as error:
        why = error.strerror or str(error)
    if why is not None:
        _count(sums, path, "skipped", 1)
        yield {"skipped": _shown(path), "why": why}, b""


def _file(descriptor: int, path: str, sums: dict[str, Any]) -> Generator[Frame, None, str | None]:
    """Send a file, and close it; return why it is to be taken back, or None."""
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return "is no regular file"
        _count(sums, path, "files", 1)
        _count(sums, path, "bytes", found.st_size)
        header = {"file": path, "size": found.st_size, "exec": bool(found.st_mode & stat.S_IXUSR)}
        offset = 0
        while True:
            data = os.pread(descriptor, min(_CHUNK, found.st_size - offset), offset)
            if len(data) == 0 and offset < found.st_size:
                sums["files"] -= 1
                sums["bytes"] -= found.st_size
                return "became shorter while it was read"
            yield {**header, "off": offset, "last": offset + len(data) == found.st_size}, data
            offset += len(data)
            if offset == found.st_size:
                return None
    finally:
        os.close(descriptor)


def _count(sums: dict[str, Any], path: str, what: str, more: int) -> None:
    sums[what] += more
    if sums["bytes"] > MAX_BYTES or sums["files"] > MAX_FILES or sums["skipped"] > MAX_FILES:
        raise RequestError(
            "quota",
            f"the outputs are more than {MAX_FILES} files or {MAX_BYTES // 2**30} GiB (at {_shown(path)})",
            fix="name fewer files in outputs, or pack them",
        )


def _why_not(path: str, mode: int) -> str | None:
    if stat.S_ISLNK(mode):
        return "is a symbolic link"
    if not stat.S_ISREG(mode):
        return "is no regular file"
    with contextlib.suppress(UnicodeEncodeError):
        if len(path.encode("utf-8")) <= MAX_NAME and path.isprintable() and not _STRANGE.search(path):
            return None
    return "has a name that other systems cannot take"


def _shown(path: str) -> str:
    return path.encode("utf-8", "backslashreplace").decode("utf-8")[:MAX_NAME]


def _reach(wanted: Wanted) -> Wanted:
    """Add what remains of patterns when a leading `**` stands for no part at all."""
    reached = set(wanted)
    for pattern, parts in wanted:
        while parts and parts[0] == "**":
            parts = parts[1:]  # noqa: PLW2901  # the rest is what is looked at next
            reached.add((pattern, parts))
    return reached


def _advance(wanted: Wanted, name: str) -> Wanted:
    """Return what remains of the patterns after the part `name`."""
    after = set()
    for pattern, parts in wanted:
        if parts and parts[0] == "**":
            after.add((pattern, parts))
        elif parts and re.fullmatch(fnmatch.translate(parts[0]), name):
            after.add((pattern, parts[1:]))
    return _reach(after)
