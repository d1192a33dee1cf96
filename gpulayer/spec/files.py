"""The files that a user names: whatever lies there is read without waiting, and never more of it than may be."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class UnusableFileError(Exception):
    """What lies at a path cannot be read as a file; the words do not name the path."""


def unusable(mode: int) -> str:
    """Say what lies where a regular file is needed, by its `st_mode`."""
    what = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "not a regular file"
    return f"this is {what}; a regular file is needed"


def read(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file. Raises UnusableFileError for all else, and above `limit` bytes."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise UnusableFileError("there is no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UnusableFileError(f"the file cannot be opened: {reason}") from None
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise UnusableFileError(unusable(kind))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UnusableFileError(f"the file cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise UnusableFileError(f"the file is larger than {limit // 2**20} MiB")
    return data
