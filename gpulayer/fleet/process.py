"""A child process of ours as a channel: the agent on this machine, or the system's ssh that leads to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from typing import cast

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.shipment import REMOTE_COMMAND
from gpulayer.fleet.transport import Channel, Receiver

# What a login gives to a session. The rest of the controller's environment stays with the controller, so that a job
# runs alike on this machine and on another, and no secret goes along unasked.
LOGIN_ENVIRONMENT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "TMPDIR", "TZ")

_REST = 1.0  # seconds in which what an ended child has written is read; a pipe holds less than one read takes


def login_environment(*more: str) -> dict[str, str]:
    """Return the variables of our environment that a login has, and those named besides."""
    return {name: os.environ[name] for name in (*LOGIN_ENVIRONMENT, *more) if name in os.environ}


async def start_process(words: Sequence[str], environment: Mapping[str, str], receiver: Receiver) -> Channel:
    """Start a program whose standard streams are the channel. Raises OSError where it cannot be executed."""
    loop = asyncio.get_running_loop()
    _, protocol = await loop.subprocess_exec(
        lambda: _ProcessChannel(receiver),
        *words,
        env=dict(environment),
        start_new_session=True,  # a Ctrl-C at the controller is for the controller
    )
    return protocol


class _ProcessChannel(asyncio.SubprocessProtocol):
    """Joins the child's pipes to the receiver. Ends when the child has ended and its pipes are read to the end.

    Whoever else may hold the pipes (what ssh's ProxyCommand and `Match exec` leave behind does) is not waited for: what
    the child itself has written is read soon after its end, and once aborted nothing is.
    """

    peer = None  # this machine, or what only the system's ssh knows

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.SubprocessTransport | None = None
        self._aborted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self._receiver.data_received(data)
        else:
            self._receiver.stderr_received(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        del exc
        if fd == 0:
            self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def process_exited(self) -> None:
        if self._transport is not None:
            asyncio.get_running_loop().call_later(0.0 if self._aborted else _REST, self._transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        status = None
        if self._transport is not None:
            status = self._transport.get_returncode()
            self._transport.close()
        self._receiver.ended(exc, status)

    def write(self, data: bytes) -> None:
        if (pipe := self._stdin()) is not None:
            pipe.write(data)

    async def drain(self) -> None:
        await self._writable.wait()

    def close(self) -> None:
        if (pipe := self._stdin()) is not None:
            pipe.close()

    def abort(self) -> None:
        self._aborted = True
        if (pipe := self._stdin()) is not None:
            pipe.abort()  # the shell alone is killed: the agent, its child, ends with its input
        if self._transport is None:
            return
        if self._transport.get_returncode() is not None:
            self._transport.close()
        else:
            # The transport's own kill() collects an ended child's status before asyncio's watcher can, on Python before
            # 3.13: the end is then told as 255, and a warning is printed (python/cpython#87744).
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._transport.get_pid(), signal.SIGKILL)

    def _stdin(self) -> asyncio.WriteTransport | None:
        pipe = self._transport and self._transport.get_pipe_transport(0)
        return cast("asyncio.WriteTransport", pipe) if pipe and not pipe.is_closing() else None


class LocalTransport:
    """This machine itself: /bin/sh runs the same command that sshd would run."""

    def __init__(self, host: str) -> None:
        """`host` is the name in messages."""
        self._host = host

    async def start(self, receiver: Receiver) -> Channel:
        """Start the shell. Raises HostError at stage `shell` where there is none."""
        environment = login_environment("LANG", "LC_ALL", "LC_CTYPE", "XDG_STATE_HOME")
        try:
            return await start_process(["/bin/sh", "-c", REMOTE_COMMAND], environment, receiver)
        except OSError as error:
            raise HostError(self._host, Stage.SHELL, f"cannot start /bin/sh ({error.strerror})") from error

    def explain(self, status: int | None, stderr: bytes) -> HostError | None:
        """Return None: nothing stands between the shell and us."""
        del status, stderr
        return None
