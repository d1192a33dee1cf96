"""Named points at which a test may let this process fail, to prove what a crash there leads to.

`GL_FAIL=point:action:count` in the environment of a controller or an agent arms the point for its `count`th passing
(from 1) in one process: `kill` ends it as kill -9 does, `error` raises OSError, `stop` stops it as SIGSTOP does, and
`delay` holds it up for a second.
"""

from __future__ import annotations

import errno
import os
import signal
import time

_DELAY = 1.0  # seconds

_passed: dict[str, int] = {}


def failpoint(point: str) -> None:
    """Fail here where the environment says so."""
    armed = os.environ.get("GL_FAIL")
    if armed is None:
        return
    name, action, count = armed.split(":")
    if name != point:
        return
    _passed[point] = _passed.get(point, 0) + 1
    if _passed[point] != int(count):
        return
    if action == "error":
        raise OSError(errno.EIO, f"failpoint {point}")
    if action == "delay":
        time.sleep(_DELAY)
        return
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])
