"""What ended runs have left on a host's disk, and its removal.

Nothing goes that lives, and no run is forgotten: of one that is removed its final state stays (a tombstone), so that
its id is never started a second time. Code that a remaining run was made of stays too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time

from gpulayer.remote import records
from gpulayer.remote.files import Blobs
from gpulayer.remote.job import prepared_name
from gpulayer.remote.runs import SPEC, Run
from gpulayer.remote.settling import settle
from gpulayer.remote.states import FINAL
from gpulayer.remote.wire import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_TRASH = ".trash-"
_LISTED = 1000  # removed runs that the answer names
_PATIENCE = 2.0  # seconds in which launches under way may end
_PAUSE = 0.05


def hold(state_folder: str) -> int:
    """Return a descriptor that keeps shipped code from being removed, as long as it or a copy of it is open."""
    descriptor = os.open(
        os.path.join(state_folder, "gc.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def collect(state_folder: str, older_than: float, *, dry: bool) -> dict[str, Any]:
    """Remove what is older than `older_than` seconds, or only tell of it (`dry`); return what docs/protocol.md says."""
    garbage = _Garbage(state_folder, older_than, dry=dry)
    garbage.collect_runs()
    garbage.collect_code()
    garbage.empty_trash()
    return garbage.answer


class _Garbage:
    """One collection. Sizes are bytes on the disk."""

    def __init__(self, state_folder: str, older_than: float, *, dry: bool) -> None:
        self._state = state_folder
        self._older_than = older_than
        self._dry = dry
        self._gone: set[str] = set()
        self._trash: list[str] = []
        self.answer: dict[str, Any] = {
            "runs": [], "count": 0, "bytes": 0, "live": 0, "young": 0, "code": {"count": 0, "bytes": 0, "busy": False},
        }  # fmt: skip

    def collect_runs(self) -> None:
        """Go through all runs of this user on this host, of whatever project."""
        folder = os.path.join(self._state, "runs")
        for name in sorted(_names(folder)):
            if name.startswith(_TRASH):
                self._trash.append(os.path.join(folder, name))
                continue
            with contextlib.suppress(RequestError, FileNotFoundError):  # no run of ours; or another collection was here
                run = Run(self._state, name)
                lock = run.try_lock()
                if lock is None:
                    self.answer["live"] += 1
                    continue
                try:
                    self._collect_run(run, lock)
                finally:
                    os.close(lock)

    def _collect_run(self, run: Run, lock: int) -> None:
        """Judge a run that nobody watches; its lock is ours, so nobody begins to."""
        if run.buried or not run.exists():  # it was claimed, and then refused: nothing has run in this folder
            if time.time() - os.stat(run.folder).st_mtime >= self._older_than:
                self._discard(run.folder)
            return
        state = settle(run, lock)
        if state["status"] not in FINAL:
            self.answer["live"] += 1
        elif run.age() < self._older_than:
            self.answer["young"] += 1
        else:
            size = _size(run.folder)
            self.answer["count"] += 1
            self.answer["bytes"] += size
            if len(self.answer["runs"]) < _LISTED:
                told = {name: state[name] for name in ("run", "project", "job", "status", "ended_at")}
                self.answer["runs"].append({**told, "bytes": size})
            if not self._dry:
                run.bury(state)
            self._gone.add(run.id)
            self._discard(run.folder)

    def collect_code(self) -> None:
        """Remove shipped files and finished setups that no remaining run was made of; not while one is launched."""
        lock = hold(self._state)
        try:
            if not self._exclusive(lock):
                self.answer["code"]["busy"] = True
                return
            used, prepared = self._in_use()
            for path in (*self._blobs(), *self._prepared()):
                name = os.path.basename(path)
                with contextlib.suppress(FileNotFoundError):
                    if name not in used | prepared and time.time() - os.stat(path).st_mtime >= self._older_than:
                        self.answer["code"]["count"] += 1
                        self.answer["code"]["bytes"] += _size(path)
                        self._discard(path)
        finally:
            os.close(lock)

    def _exclusive(self, lock: int) -> bool:
        give_up = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up:
                    return False
                time.sleep(_PAUSE)
            else:
                return True

    def _in_use(self) -> tuple[set[str], set[str]]:
        """Return the blobs and the setups that the remaining runs were made of."""
        used: set[str] = set()
        prepared: set[str] = set()
        blobs = Blobs(self._state)
        for run in self._runs_now():
            try:
                spec = records.read(run.spec, SPEC)
            except records.DamagedError:
                continue
            if spec is None:
                continue
            prepared.add(prepared_name(spec))
            if spec["tree"] is not None and spec["tree"] not in used:
                used.add(spec["tree"])
                with contextlib.suppress(RequestError):  # it is damaged: its files are sent again when it is needed
                    used.update(entry[3] for entry in blobs.tree(spec["tree"]) if entry[1] != "link")
        return used, prepared

    def _runs_now(self) -> Iterator[Run]:
        """Yield the runs that remain: a launch may have begun one since they were judged."""
        for name in _names(os.path.join(self._state, "runs")):
            if name not in self._gone and not name.startswith(_TRASH):
                with contextlib.suppress(RequestError):
                    yield Run(self._state, name)

    def _blobs(self) -> Iterator[str]:
        """Yield the paths of all blobs, and of those that never became one."""
        root = os.path.join(self._state, "blobs")
        for part in _names(root):
            yield from (os.path.join(root, part, name) for name in _names(os.path.join(root, part)))

    def _prepared(self) -> Iterator[str]:
        root = os.path.join(self._state, "prepared")
        yield from (os.path.join(root, name) for name in _names(root))

    def _discard(self, path: str) -> None:
        """Take a path out of its place in one step; it is removed at the end."""
        if self._dry:
            return
        aside = os.path.join(os.path.dirname(path), f"{_TRASH}{os.path.basename(path)}-{os.getpid()}")
        os.rename(path, aside)
        self._trash.append(aside)

    def empty_trash(self) -> None:
        """Remove what was discarded, now or by a collection that died."""
        if self._dry:
            return
        for path in self._trash:
            remove(path)


def remove(path: str) -> None:
    """Remove a file or a folder whatever a job has done to its modes. Links are removed, never followed."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    for folder, folders, _ in os.walk(path):
        for name in folders:
            inner = os.path.join(folder, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(path)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _size(path: str) -> int:
    """Return the bytes that a file or folder has on the disk, as far as it can be read."""
    total = os.lstat(path).st_blocks
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks
    return total * 512  # POSIX leaves the unit open; Linux and macOS count so (stat(2))
