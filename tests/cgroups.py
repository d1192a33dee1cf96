"""Control groups that tests put jobs into, of the first or the second version, where this user may make some."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
LIMIT = 20.0  # seconds until all that was in a group has ended


@contextmanager
def control_group(controller: str, first: Mapping[str, int], second: Mapping[str, int]) -> Iterator[Path | None]:
    """Give the file to which a process writes its pid to be in a new group; None where no such group can be made.

    `first` and `second` are its limits by the names that each version has for them; of the others each is missing. When
    the context ends all in the group must be about to end.
    """
    group = _made(MOUNT / controller, first) or _made(MOUNT, second)
    if group is None:
        yield None
        return
    try:
        yield group / "cgroup.procs"
    finally:
        give_up = time.monotonic() + LIMIT
        while (group / "cgroup.procs").read_text() and time.monotonic() < give_up:
            time.sleep(0.01)
        group.rmdir()


def _made(parent: Path, limits: Mapping[str, int]) -> Path | None:
    """Return a new group with those of the limits that the kernel knows; None where it does not know the first."""
    group = parent / f"gpulayer-test-{os.getpid()}"
    if not (parent / "cgroup.procs").exists() or not os.access(parent, os.W_OK):
        return None
    group.mkdir()
    if not (group / next(iter(limits))).exists():
        group.rmdir()
        return None
    for name, value in limits.items():
        if (group / name).exists():
            (group / name).write_text(str(value))
    return group
