"""Who may launch: one process at a time for a project, so that two queues never place one job twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpulayer.run.paths import Paths


@contextmanager
def launching(paths: Paths, project: str) -> Iterator[int | None]:
    """Hold the right to launch; yield None where we have it, else the id of the process that has it.

    The kernel frees the lock when its holder ends, however it ends.
    """
    descriptor = os.open(
        paths.lock(project), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )  # fmt: skip
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).strip()
            yield int(holder) if holder.isdigit() else 0
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield None
    finally:
        os.close(descriptor)
