"""Running a foreign program so that it can cost no more than its time limit. SHIPPED.

A driver's tool can hang where no signal reaches it, a framework can crash, flood its output or leave a grandchild that
holds the pipes. So: own session, bounded capture, one deadline, SIGKILL to the group, and no wait without end. A
process that outlives even that is abandoned.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PROBE = "GPULAYER_PROBE"
"""What every program that is run here has in its environment: whoever looks at a GPU then knows it as a probe's."""

CAPTURE_LIMIT = 1 << 20  # bytes kept of each stream; what comes after is read and dropped
_KILL_WAIT_S = 1.0
_TICK_S = 0.02
_CHUNK = 1 << 16


class Outcome(NamedTuple):
    """How a program ended and what it wrote.

    `code` is the exit code; None where a signal, the time limit or a failed start ended it. `error` says why it could
    not be started. `answer` is what came through the descriptor of its own, whose number is the last argument.
    """

    code: int | None = None
    signal: str | None = None
    timed_out: bool = False
    error: str | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    answer: bytes = b""
    truncated: bool = False
    elapsed_ms: int = 0

    @property
    def text(self) -> str:
        """What it wrote on stdout, decoded."""
        return self.stdout.decode("utf-8", "replace")


_abandoned: list[subprocess.Popen[bytes]] = []


def run_bounded(
    command: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    with_answer: bool = False,
) -> Outcome:
    """Run `command` from the root folder for at most `timeout` seconds and return its outcome; raises nothing.

    With `with_answer` the number of a writable descriptor is appended to the command.
    """
    _abandoned[:] = [process for process in _abandoned if process.poll() is None]
    start = time.monotonic()
    read_end, write_end = os.pipe() if with_answer else (-1, -1)
    try:
        # From "/": no module that lies in some working directory can be taken for a framework.
        process = subprocess.Popen(
            [*command, str(write_end)] if with_answer else list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={**(os.environ if env is None else env), PROBE: "1"},
            start_new_session=True,
            pass_fds=(write_end,) if with_answer else (),
        )
    except (OSError, ValueError) as error:
        if with_answer:
            os.close(read_end)
        return Outcome(error=getattr(error, "strerror", None) or str(error))
    finally:
        if with_answer:
            os.close(write_end)
    streams = {stream.fileno(): bytearray() for stream in (process.stdout, process.stderr) if stream}
    stdout, stderr = streams.values()
    answer = bytearray()
    if with_answer:
        streams[read_end] = answer
    try:
        truncated = _read_all(process, streams, start + timeout)
        timed_out = process.poll() is None
        _kill_group(process)
    finally:
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
        if with_answer:
            os.close(read_end)
    code = process.returncode
    return Outcome(
        code=code if code is not None and code >= 0 and not timed_out else None,
        signal=_signal_name(-code) if code is not None and code < 0 and not timed_out else None,
        timed_out=timed_out,
        stdout=bytes(stdout),
        stderr=bytes(stderr),
        answer=bytes(answer),
        truncated=truncated,
        elapsed_ms=int((time.monotonic() - start) * 1000),
    )


def _read_all(process: subprocess.Popen[bytes], streams: dict[int, bytearray], deadline: float) -> bool:
    """Read until the process has ended or the deadline is reached; say whether anything had to be dropped.

    The end of the process counts, not the end of its pipes: a grandchild may hold those for ever.
    """
    truncated = False
    with selectors.DefaultSelector() as selector:
        for descriptor in streams:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        ended = False
        while True:
            wait = 0.0 if ended else min(_TICK_S, deadline - time.monotonic())
            if wait < 0:
                return truncated
            if selector.get_map():
                ready = selector.select(wait)
            else:
                ready = []
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(wait)
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                if not data:
                    selector.unregister(key.fd)
                kept = streams[key.fd]
                truncated = truncated or len(kept) + len(data) > CAPTURE_LIMIT
                kept += data[: CAPTURE_LIMIT - len(kept)]
            if ended and (not ready or time.monotonic() > deadline):
                return truncated
            if not ended and process.poll() is not None:
                ended = True
                _signal_group(process)  # so that what it left behind writes no more


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the program's process group and reap the leader, or abandon it after a second."""
    _signal_group(process)
    try:
        process.wait(_KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        _abandoned.append(process)


def _signal_group(process: subprocess.Popen[bytes]) -> None:
    # macOS answers EPERM for a group of which only zombies are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
