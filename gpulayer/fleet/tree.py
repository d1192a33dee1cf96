"""The tree of files that is shipped to hosts: which files it has, what they hold, and the name that follows from it.

In a git repository the list is git's own answer, so that what is ignored stays here; else it is every file. Contents
are hashed once: a file that keeps its size, times and inode is not read again.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import secrets
import stat
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulayer.errors import UsageError

NEVER = frozenset({".git", ".gpulayer"})
"""Names that are shipped nowhere in a tree."""

SAVED_PLAN = b'{"schema": "gpulayer.plan/'
"""How a saved plan begins. It is made of the tree that it lies in, and cannot be a part of it."""

MAX_FILES = 100_000
MAX_BYTES = 2**40
"""What a tree may have, as a run's outputs may: more was hardly meant, and is refused before any of it is read."""

_CHUNK = 1024 * 1024
# A file that was changed just before it was hashed may change again within the same tick of the file system's clock.
_SETTLED_NS = 2_000_000_000
_SHOWN = 10
_ENTRY = 5  # of a file that was hashed: size, two times, inode, sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a blob's content is here, and its size in bytes."""

    path: Path
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A snapshot of a folder. `hash` is the sha256 of the manifest (docs/protocol.md), `bytes` the sum of all files.

    `blobs` maps each distinct content's sha256 to a file that holds it.
    """

    root: Path
    hash: str
    manifest: bytes = field(repr=False)
    blobs: Mapping[str, Source] = field(repr=False)
    files: int
    bytes: int


def tree_of(workdir: Path, exclude: Collection[Path] = (), cache: Path | None = None) -> Tree:
    """Read a folder's tree. `exclude` are files that are left out (the jobs file, the inventory), as saved plans are.

    `cache` is a file that keeps the hashes between calls. Blocking; safe in threads. Raises UsageError where the folder
    cannot be shipped: links that lead out of it, devices and sockets, files that cannot be read or change meanwhile.
    """
    if not workdir.is_dir():
        raise UsageError(f"workdir {workdir} is no folder", fix="correct `workdir`")
    root = workdir.resolve()
    left_out = {str(path.resolve()) for path in exclude}
    hashes = _Hashes(cache)
    entries: list[list[Any]] = []
    blobs: dict[str, Source] = {}
    problems: list[str] = []
    for name, path, status in _listed(root, left_out, problems):
        try:
            if stat.S_ISLNK(status.st_mode):
                entries.append([name, "link", _link_inside(root, name)])
            else:
                sha = hashes.of(path, status)
                if sha is None:
                    continue
                entries.append([name, "exec" if status.st_mode & stat.S_IXUSR else "file", status.st_size, sha])
                blobs[sha] = Source(path=Path(path), size=status.st_size)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
        except UsageError as error:
            problems.append(error.message)
    if problems:
        raise _not_shippable(root, problems)
    hashes.save()
    manifest = json.dumps(entries, separators=(",", ":")).encode()
    return Tree(
        root=root,
        hash=hashlib.sha256(manifest).hexdigest(),
        manifest=manifest,
        blobs=blobs,
        files=sum(entry[1] != "link" for entry in entries),
        bytes=sum(entry[2] for entry in entries if entry[1] != "link"),
    )


def _listed(root: Path, left_out: Collection[str], problems: list[str]) -> list[tuple[str, str, os.stat_result]]:
    """Return name, path and status of all files and links to be shipped, by name, before any of them is read.

    What is neither is told in `problems`. Raises UsageError where there is more than a tree may have.
    """
    listed = []
    total = 0
    for name in _names(root):
        path = os.path.join(root, name)  # noqa: PTH118  # of thousands of files, where Path costs as much as the rest
        if path in left_out or not NEVER.isdisjoint(name.split("/")):
            continue
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue  # git still lists what was deleted
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
            continue
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            problems.append(f"{name} is no regular file (a device, socket or FIFO)")
            continue
        listed.append((name, path, status))
        total += status.st_size
        if len(listed) > MAX_FILES or total > MAX_BYTES:
            raise UsageError(
                f"{root} has more than {MAX_FILES:,} files or {MAX_BYTES // 2**30:,} GiB (at {name}): too much to ship",
                fix="set `workdir` to a smaller folder, or have git ignore what hosts do not need",
            )
    return sorted(listed, key=operator.itemgetter(0))


def _not_shippable(root: Path, problems: list[str]) -> UsageError:
    more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return UsageError(
        f"{root} cannot be shipped:\n  " + "\n  ".join(problems[:_SHOWN]) + more,
        fix="remove them, have git ignore them, or set `workdir` to a smaller folder",
    )


def _names(root: Path) -> Iterator[str]:
    """Yield the relative paths of all files and links to be shipped, below folders that are repositories too."""
    listed = _git_names(root)
    if listed is None:
        for folder, folders, files in os.walk(root, onerror=_unreadable):
            below = os.path.relpath(folder, root)
            prefix = "" if below == "." else f"{below}/"
            links = [name for name in folders if os.path.islink(f"{folder}/{name}")]  # noqa: PTH114
            folders[:] = [name for name in folders if name not in NEVER]
            yield from (f"{prefix}{name}" for name in (*files, *links))
        return
    for name in listed:
        path = root / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or a repository inside that is not added
            yield from (f"{name.rstrip('/')}/{below}" for below in _names(path))
        else:
            yield name


def _unreadable(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read ({error.strerror})", fix="make it readable, or remove it")


def _git_names(root: Path) -> set[str] | None:
    """Return what git lists in a folder; None where it lies in no repository, or the repository ignores it."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return None
    listed = _git(root, "ls-files", "-co", "--exclude-standard", "-z")
    message = listed.stderr.decode(errors="replace").strip()
    if listed.returncode or "could not open directory" in message:
        raise UsageError(f"git cannot list the files of {root}: {message}", fix="repair the repository")
    names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    if not names and _git(root, "check-ignore", "-q", ".").returncode == 0:
        return None
    return names


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", "-C", str(root), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise UsageError(
            f"{root} lies in a git repository, but git cannot be started ({error.strerror})", fix="install git"
        ) from error


def _link_inside(root: Path, name: str) -> str:
    """Return a link's target. Raises UsageError where it leads out of the tree, by its text or by other links."""
    target = os.readlink(root / name)  # noqa: PTH115  # its very text, which Path would tidy up
    lexical = os.path.normpath(os.path.join(os.path.dirname(name), target))  # noqa: PTH118, PTH120
    real = os.path.realpath(root / name)
    if target.startswith("/") or lexical.split("/")[0] == ".." or not (real + "/").startswith(f"{root}/"):
        raise UsageError(f"{name} is a link that leads out of the folder, to {target}")
    return target


class _Hashes:
    """The sha256 of files, kept with what tells that a file is still the same."""

    _lock = threading.Lock()

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._known: dict[str, list[Any]] = self._load()
        self._new: dict[str, list[Any]] = {}

    def of(self, path: str, status: os.stat_result) -> str | None:
        """Return a file's sha256, None for a saved plan.

        Raises UsageError where the file changes while it is read, OSError as `open`.
        """
        mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        known = self._known.get(path)
        if known is not None and known[:-1] == mark:
            return None if known[-1] is None else str(known[-1])
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123  # opened by descriptor
            digest = hashlib.sha256()
            size, begin = 0, b""
            while size <= status.st_size and (data := file.read(_CHUNK)):  # what grows without end is not followed
                begin = begin or data[: len(SAVED_PLAN)]
                digest.update(data)
                size += len(data)
            after = os.fstat(descriptor)
        if [after.st_size, after.st_mtime_ns, after.st_ctime_ns, after.st_ino] != mark:
            raise UsageError(f"{path} changed while it was read")
        sha = None if begin == SAVED_PLAN else digest.hexdigest()
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
            self._new[path] = [*mark, sha]
        return sha

    def save(self) -> None:
        """Add what was hashed to the cache; that of others, who may have written meanwhile, stays."""
        if self._cache is None or not self._new:
            return
        with self._lock:
            text = json.dumps(self._load() | self._new, separators=(",", ":"))
            fresh = self._cache.with_name(f"{self._cache.name}.{secrets.token_hex(4)}")
            try:
                fresh.touch(mode=0o600)
                fresh.write_text(text, encoding="ascii")
                fresh.replace(self._cache)
            except OSError as error:
                fresh.unlink(missing_ok=True)
                raise UsageError(f"cannot write {self._cache} ({error.strerror})", fix="free some space") from error

    def _load(self) -> dict[str, list[Any]]:
        """Return the cache; an empty one where it is missing or damaged, which costs time and nothing else."""
        if self._cache is None:
            return {}
        try:
            known = json.loads(self._cache.read_text(encoding="ascii"))
        except (OSError, ValueError, RecursionError):
            return {}
        entries = known.items() if isinstance(known, dict) else ()
        return {path: entry for path, entry in entries if isinstance(entry, list) and len(entry) == _ENTRY}
