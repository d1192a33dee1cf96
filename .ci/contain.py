"""Runs a command and, when it has ended, ends what it left behind; leaving anything behind is a failure.

On Linux this process adopts what daemons detach from (PR_SET_CHILD_SUBREAPER), so that nothing escapes. Elsewhere the
command runs as it is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE = 5.0  # seconds in which what is about to end may do so by itself


def descendants(root: int) -> dict[int, str]:
    """Return the command lines of all living processes below `root`, by pid."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: command_line(pid) for pid in below - {root}}


def command_line(pid: int) -> str:
    """Return what `pid` was started as, empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""


def attend(command: list[str]) -> int:
    """Run the command and collect every adopted child as it ends: until then it is a zombie that others wait for."""
    child = subprocess.Popen(command)
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def reap() -> None:
    """Collect adopted children that have ended, and wait for none."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main(command: list[str]) -> int:
    """Return the command's exit status, or 1 where it left processes behind."""
    if sys.platform != "linux":
        return subprocess.run(command, check=False).returncode
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel has no child subreapers")
    status = attend(command)
    end = time.monotonic() + GRACE
    while (left := descendants(os.getpid())) and time.monotonic() < end:
        reap()
        time.sleep(0.05)
    for pid, line in left.items():
        print(f"left behind: {pid} {line}", file=sys.stderr)
    while alive := descendants(os.getpid()):
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap()
        time.sleep(0.05)
    return status or int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
