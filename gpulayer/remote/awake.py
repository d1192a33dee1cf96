"""A Mac that does not fall asleep while a job runs."""

from __future__ import annotations

import contextlib
import os
import sys

CAFFEINATE = "/usr/bin/caffeinate"


def keep_awake(pid: int) -> int | None:
    """Keep this Mac from idle sleep, and on mains power from any, until `pid` ends; return the child that does.

    The display may sleep, and a closed lid on battery power still puts the machine to sleep (caffeinate(8)). None on
    other systems, and where the tool is not there: then the job runs all the same.
    """
    if sys.platform != "darwin":
        return None
    command = [CAFFEINATE, "-i", "-s", "-w", str(pid)]
    with contextlib.suppress(OSError):
        return os.posix_spawn(command[0], command, {})
    return None
