"""Bounds what a run's log takes of the disk: its middle is dropped, and every other byte stays at its offset."""

from __future__ import annotations

import os
import sys

from gpulayer.remote.failpoints import failpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    Hole = Optional[tuple[int, int]]  # the first byte that was dropped, and the one after the last

LIMIT = 1 << 30
"""Bytes of the disk that a log may have, where its run does not say otherwise."""

_BLOCK = 4096  # a file system gives back whole blocks only
_FREE_SHARE, _FREE_BYTES = 20, 2 << 30  # a twentieth of the disk, 2 GiB at most, is left free of logs …
_LEAST = 64 << 20  # … except for this many bytes of each
_FAST = 32 << 20  # bytes between two looks above which a log is looked at more often
_PUNCH_HOLE_KEEP_SIZE = 0x03  # fallocate(2)


class LogCap:
    """The cap of one log. `hole` is what was dropped of it so far."""

    def __init__(self, path: str, limit: int, hole: Hole) -> None:
        """`limit` is in bytes; the first quarter of it, 16 MiB at most, and the newest half always stay."""
        self._path = path
        self._limit = limit
        self._size = 0
        self.hole = hole
        self.fast = False

    def due(self) -> Hole:
        """Return the hole that the log is to have now, or None where it may stay as it is."""
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return None
        self.fast, self._size = size - self._size > _FAST, size
        dropped = 0 if self.hole is None else self.hole[1] - self.hole[0]
        limit = self._limit
        disk = os.statvfs(self._path)
        if disk.f_bavail * disk.f_frsize < min(disk.f_blocks * disk.f_frsize // _FREE_SHARE, _FREE_BYTES):
            limit = min(limit, max(_LEAST, (size - dropped) // 2))
        if size - dropped <= limit:
            return None
        start = min(limit // 4, 16 << 20) // _BLOCK * _BLOCK if self.hole is None else self.hole[0]
        end = (size - limit // 2) // _BLOCK * _BLOCK
        return None if end <= (start if self.hole is None else self.hole[1]) else (start, end)

    def punch(self, hole: tuple[int, int]) -> None:
        """Give the blocks of `hole` back. Raises OSError where the file system, or the operating system, cannot."""
        failpoint("log-punched")
        if not sys.platform.startswith("linux"):
            raise OSError("holes are made in files on Linux only")
        import ctypes

        descriptor = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            offset, length = ctypes.c_int64(hole[0]), ctypes.c_int64(hole[1] - hole[0])
            if libc.fallocate64(descriptor, _PUNCH_HOLE_KEEP_SIZE, offset, length) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), self._path)
        finally:
            os.close(descriptor)
