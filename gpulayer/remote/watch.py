"""What happens in runs' folders, as the kernel tells it (Linux: inotify(7)): nobody has to look all the time."""

from __future__ import annotations

import contextlib
import os

# <sys/inotify.h>
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_DONT_FOLLOW = 0x2000000
_WORDS = 4  # a struct inotify_event is as long as four int, the first of which is the number of a watch
_OVERFLOW = -1  # instead of a number: some events were dropped
_READ = 256 * 1024  # bytes; as many events as the kernel keeps unless it is told otherwise


class Watches:
    """One descriptor, for poll, for all that an agent watches: a user has 128 of them, and his jobs want some too.

    To close one also takes the kernel milliseconds, to end a watch takes it none.
    """

    def __init__(self) -> None:
        """Begin. Raises OSError where the user's are used up.

        ImportError and AttributeError where the system has none.
        """
        import ctypes

        self._libc = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno
        self._listeners: dict[int, set[Watch]] = {}
        self._descriptor = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def watch(self, folder: str) -> Watch | None:
        """Return a watch of what comes into a folder; None where that cannot be."""
        watch = Watch(self)
        return watch if self.add(watch, folder, _MOVED_TO | _CREATE) else None

    def add(self, watch: Watch, path: str, mask: int) -> bool:
        """Let a watch be told of a file or folder too; False where there is none, or a user's number is used up."""
        try:
            number = self._checked(
                self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask | _DONT_FOLLOW)
            )
        except OSError:
            return False
        self._listeners.setdefault(number, set()).add(watch)
        return True

    def told(self) -> set[Watch]:
        """Return whose files and folders something has happened to since this was asked last."""
        words = memoryview(b"")
        with contextlib.suppress(BlockingIOError):
            words = memoryview(os.read(self._descriptor, _READ)).cast("i")
        # A name that follows an event is padded to the size of some. Taken for numbers, its parts are nobody's, or
        # somebody looks in vain once; in exchange thousands of events, of many busy logs, cost next to nothing.
        numbers = set(words.tolist()[::_WORDS])
        if _OVERFLOW in numbers:
            numbers = set(self._listeners)
        return {watch for number in numbers for watch in self._listeners.get(number, ())}

    def drop(self, watch: Watch) -> None:
        """Tell a watch of nothing any more."""
        for number, listeners in list(self._listeners.items()):
            listeners.discard(watch)
            if not listeners:
                del self._listeners[number]
                self._libc.inotify_rm_watch(self._descriptor, number)  # which fails where the file is gone already

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def _checked(self, result: int) -> int:
        if result < 0:
            number = self._errno()
            raise OSError(number, os.strerror(number))
        return result


class Watch:
    """What somebody who waits is told of: what comes into a folder, and that files have grown."""

    def __init__(self, watches: Watches) -> None:
        """`Watches.watch` makes it."""
        self.watches = watches

    def add(self, path: str) -> bool:
        """Watch a file besides; False where that cannot be: a user has so many of these."""
        return self.watches.add(self, path, _MODIFY)

    def close(self) -> None:
        """End it."""
        self.watches.drop(self)
