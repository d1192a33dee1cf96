"""What happens in a run's folder, as the kernel tells it (Linux: inotify(7)): nobody has to look all the time."""

from __future__ import annotations

import contextlib
import os

# <sys/inotify.h>
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_DONT_FOLLOW = 0x2000000
_READ = 64 * 1024


class Watch:
    """A descriptor that poll sees once a file has come into a folder, or one of the files that were added has grown."""

    def __init__(self, folder: str) -> None:
        """Begin. Raises OSError where there is no such folder or a user's number of watches is used up.

        ImportError and AttributeError where the system has none.
        """
        import ctypes

        self._libc = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno
        self._descriptor = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            self._add(folder, _MOVED_TO | _CREATE)
        except OSError:
            self.close()
            raise

    def add(self, path: str) -> bool:
        """Watch a file besides; False where that cannot be: a user has so many of these."""
        try:
            self._add(path, _MODIFY)
        except OSError:
            return False
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def clear(self) -> None:
        """Forget what was told up to now."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, _READ)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def _add(self, path: str, mask: int) -> None:
        self._checked(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask | _DONT_FOLLOW))

    def _checked(self, result: int) -> int:
        if result < 0:
            number = self._errno()
            raise OSError(number, os.strerror(number))
        return result


def watch(folder: str) -> Watch | None:
    """Return a watch of a folder; None where none is to be had, and who waits has to look for himself."""
    try:
        return Watch(folder)
    except (ImportError, AttributeError, OSError):
        return None
