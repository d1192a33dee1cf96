"""Shipped code on a host: blobs by content, trees by manifest, and the working folders that are made of them.

A blob lies under its SHA-256, and a tree is a manifest, itself a blob (docs/protocol.md, "Operations"). Nothing here
is trusted because it is there: contents are hashed when they arrive and again when a folder is made of them, since a
power loss may leave a name with half of its content.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys

from gpulayer.remote.wire import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Entry = tuple[str, str, int, str]  # path, "file", "exec" or "link", size (0 of a link), SHA-256 (target of a link)

_SHA = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1024 * 1024
_MAX_MANIFEST = 256 * 1024 * 1024
_FICLONE = 0x40049409  # ioctl_ficlone(2): share the blocks until one side writes


class Blobs:
    """The blobs in one host's state folder."""

    def __init__(self, state_folder: str) -> None:
        """Find the folder; it is made when the first blob arrives."""
        self._folder = os.path.join(state_folder, "blobs")
        self._parts: dict[str, _Part] = {}

    def path(self, sha: str) -> str:
        """Return where a blob lies, or would. Raises RequestError `request` for what is no SHA-256."""
        if not _SHA.fullmatch(sha):
            raise RequestError("request", f"{sha[:80]!r} is no SHA-256")
        return os.path.join(self._folder, sha[:2], sha)

    def missing(self, shas: list[str]) -> list[str]:
        """Return those that are not here."""
        return [sha for sha in shas if not os.path.lexists(self.path(sha))]

    def put(self, blobs: list[tuple[str, int]], payload: bytes) -> int:
        """Store blobs, given as (SHA-256, size) with their contents one after the other; return how many.

        Raises RequestError `hash` where a content is not what its name says: then those before it are stored.
        """
        view = memoryview(payload)
        if sum(size for _, size in blobs) != len(view):
            raise RequestError("request", "put: the sizes do not add up to the payload")
        offset = 0
        for sha, size in blobs:
            content = view[offset : offset + size]
            offset += size
            _expect(sha, hashlib.sha256(content).hexdigest())
            if not os.path.lexists(self.path(sha)):
                self._store(sha, content)
        return len(blobs)

    def put_part(self, sha: str, size: int, offset: int, payload: bytes) -> int:
        """Store the next part of a big blob, beginning at 0; return 1 with the last part, which is then checked."""
        part = self._parts.pop(sha, None)
        if offset == 0:
            if part is not None:
                part.drop()
            part = _Part(*self._begin(sha))
        if part is None or part.size != offset or offset + len(payload) > size:
            raise RequestError("request", f"put_part: {sha} has no part that ends at {offset}", fix="begin at 0 again")
        try:
            part.write(payload)
            if part.size < size:
                self._parts[sha] = part
                return 0
            _expect(sha, part.digest.hexdigest())
            os.replace(part.path, self.path(sha))
        except BaseException:
            part.drop()
            raise
        os.close(part.descriptor)
        return 1

    def drop_parts(self) -> None:
        """Remove what never became a blob."""
        for part in self._parts.values():
            part.drop()

    def tree(self, sha: str) -> list[Entry]:
        """Return a tree's entries, checked; every blob is there in its size.

        Raises RequestError `tree` where something is missing or the manifest is not what the protocol says. A blob of
        another size than the manifest's is removed, so that it counts as missing from then on.
        """
        path = self.path(sha)
        try:
            if os.stat(path).st_size > _MAX_MANIFEST:
                raise _bad_tree(sha, "it is too large")
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            raise _bad_tree(sha, "it is not on this host") from None
        if hashlib.sha256(data).hexdigest() != sha:
            os.unlink(path)
            raise _bad_tree(sha, "it was damaged on this host")
        entries = list(_entries(sha, data))
        for entry in entries:
            if entry[1] != "link":
                self._check(sha, entry)
        return entries

    def build(self, entries: list[Entry], folder: str) -> None:
        """Make the files of a tree in `folder`, which exists and is empty. Raises RequestError `tree`, or OSError."""
        made = {""}
        for name, kind, _, content in entries:
            path = os.path.join(folder, name)
            parent = os.path.dirname(name)
            if parent not in made:
                os.makedirs(os.path.join(folder, parent), exist_ok=True)
                made.add(parent)
            if kind == "link":
                os.symlink(content, path)
            else:
                self._copy(content, path, 0o777 if kind == "exec" else 0o666)

    def _copy(self, sha: str, target: str, mode: int) -> None:
        """Copy a blob, never link it: what a job writes into its file must not reach other jobs."""
        source = self.path(sha)
        digest = hashlib.sha256()
        with open(source, "rb", buffering=0) as reader:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
            with open(descriptor, "wb", buffering=0):
                cloned = clone(reader.fileno(), descriptor)
                while True:
                    chunk = reader.read(_CHUNK)
                    if not chunk:
                        break
                    digest.update(chunk)
                    if not cloned:
                        _write_all(descriptor, chunk)
        if digest.hexdigest() != sha:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(source)
            raise RequestError("tree", f"shipped file {sha} was damaged on this host", fix="run it again: it is resent")

    def _check(self, tree: str, entry: Entry) -> None:
        name, _, size, sha = entry
        path = self.path(sha)
        try:
            found = os.stat(path).st_size
        except FileNotFoundError:
            raise _bad_tree(tree, f"{name} is not on this host") from None
        if found != size:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise _bad_tree(tree, f"{name} was damaged on this host")

    def _begin(self, sha: str) -> tuple[str, int]:
        """Return the path and the descriptor of a new file, which becomes the blob by its rename."""
        fresh = f"{self.path(sha)}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return fresh, os.open(fresh, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(fresh), mode=0o700, exist_ok=True)
            return fresh, os.open(fresh, flags, 0o600)

    def _store(self, sha: str, content: memoryview) -> None:
        fresh, descriptor = self._begin(sha)
        try:
            _write_all(descriptor, content)
            os.rename(fresh, self.path(sha))
        except BaseException:
            os.unlink(fresh)
            raise
        finally:
            os.close(descriptor)


class _Part:
    """A big blob of which the beginning has arrived."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        _write_all(self.descriptor, data)
        self.digest.update(data)
        self.size += len(data)

    def drop(self) -> None:
        os.close(self.descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def clone(source: int, target: int) -> bool:
    """Let the file `target` share the blocks of `source` until one is written to; False where that cannot be done."""
    if sys.platform == "darwin":
        return False  # clones are made of paths there: `copy_tree`
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def copy_tree(source: str, target: str) -> None:
    """Copy a folder with links kept as they are, sharing blocks where the file system can. Raises OSError."""

    def copy(one: str, other: str) -> None:
        if sys.platform == "darwin" and ctypes.CDLL(None).clonefile(os.fsencode(one), os.fsencode(other), 0) == 0:
            return
        with open(one, "rb") as reader, open(other, "xb") as writer:
            cloned = clone(reader.fileno(), writer.fileno())
        if not cloned:
            shutil.copyfile(one, other)
        shutil.copystat(one, other)

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def _entries(tree: str, data: bytes) -> Iterator[Entry]:
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        raise _bad_tree(tree, "its manifest is no JSON") from None
    if not isinstance(manifest, list):
        raise _bad_tree(tree, "its manifest is no list")
    previous = ""
    leaves: set[str] = set()
    for entry in manifest:
        if not (isinstance(entry, list) and entry and isinstance(entry[0], str) and is_plain(entry[0])):
            raise _bad_tree(tree, f"{str(entry)[:200]} is no entry")
        name = entry[0]
        # Sorted names without doubles, none below a file or link: what is made can lie nowhere else.
        if name <= previous or any(parent in leaves for parent in _parents(name)):
            raise _bad_tree(tree, f"{name!r} stands in the wrong place")
        previous = name
        leaves.add(name)
        if len(entry) == 4 and entry[1] in ("file", "exec") and isinstance(entry[2], int) and _is_sha(entry[3]):  # noqa: PLR2004
            yield (name, entry[1], entry[2], entry[3])
        elif len(entry) == 3 and entry[1] == "link" and isinstance(entry[2], str) and stays_inside(name, entry[2]):  # noqa: PLR2004
            yield (name, "link", 0, entry[2])
        else:
            raise _bad_tree(tree, f"{name!r} has a wrong entry")


def is_plain(name: str) -> bool:
    """Say whether `name` is a relative path with `/` that names something below its start."""
    return bool(name) and "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def stays_inside(name: str, target: str) -> bool:
    """Say whether a link at `name` (relative) with `target` points into its own tree."""
    if not target or target.startswith("/") or "\0" in target:
        return False
    end = os.path.normpath(os.path.join(os.path.dirname(name), target))
    return end != ".." and not end.startswith("../")


def _parents(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _is_sha(value: object) -> bool:
    return isinstance(value, str) and _SHA.fullmatch(value) is not None


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _expect(sha: str, found: str) -> None:
    if found != sha:
        raise RequestError("hash", f"what arrived is not {sha}", fix="the file changed while it was read: try again")


def _bad_tree(tree: str, why: str) -> RequestError:
    return RequestError("tree", f"the shipped code {tree[:12]} cannot be used: {why}", fix="send it (again)")
