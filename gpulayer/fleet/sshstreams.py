"""The two ends that asyncssh is held by: what it gets its bytes from, and what it gives the agent's streams to."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Callable

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.hostkeys import Trust
from gpulayer.fleet.sshconfig import Target
from gpulayer.fleet.sshlibrary import asyncssh
from gpulayer.fleet.transport import Receiver

_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
_GREETING = 255


class Client(asyncssh.SSHClient):
    """Decides about host keys that known_hosts does not settle, and keeps what a server says before the login."""

    def __init__(self, trust: Trust, *, accept: bool) -> None:
        """Hold what is trusted; `accept` takes a key where none is known yet."""
        self._trust = trust
        self._accept = accept
        self.shown: asyncssh.SSHKey | None = None
        self.accepted: asyncssh.SSHKey | None = None
        self.banner = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Say whether a key that is neither known nor revoked is the pinned one, or a new one that may be taken."""
        del host, addr, port
        self.shown = key
        if self._trust.pin is not None:
            return bool(key.get_fingerprint() == self._trust.pin)
        if self._accept and not self._trust.keys:
            self.accepted = key
            return True
        return False

    def auth_banner_received(self, msg: str, lang: str) -> None:
        """Keep what the server says to those who log in."""
        del lang
        self.banner = (self.banner + msg)[:2000]


class Dial:
    """Makes the TCP connection for asyncssh, in the place of a tunnel: so its failures have a stage of their own."""

    def __init__(self, target: Target, patience: float) -> None:
        """Allow `patience` seconds for the connection."""
        self._target = target
        self._patience = patience
        self.wire: _Wire | None = None

    @property
    def greeting(self) -> bytes:
        """The first bytes that the server sent."""
        return self.wire.greeting if self.wire else b""

    async def wait_closed(self) -> None:
        """Wait until the socket, where one was opened, is closed."""
        if self.wire is not None and self.wire.opened:
            await self.wire.closed.wait()

    async def create_connection(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Connect and return the transport and asyncssh's own side of it."""
        name = self._target.host
        loop = asyncio.get_running_loop()
        wire = self.wire = _Wire(factory())
        try:
            async with asyncio.timeout(self._patience):
                transport, _ = await loop.create_connection(lambda: wire, host, port, happy_eyeballs_delay=0.25)
        except socket.gaierror as error:
            raise HostError(
                name,
                Stage.RESOLVE,
                f"the name {host} is not known ({error.strerror})",
                fix="correct `address`, or add the name to DNS, /etc/hosts or ~/.ssh/config",
            ) from error
        except TimeoutError as error:
            raise HostError(
                name,
                Stage.CONNECT,
                f"{host} port {port} does not answer within {self._patience:.0f} s",
                fix="is the machine on, awake and in reach (VPN, firewall)?",
            ) from error
        except OSError as error:
            raise HostError(
                name,
                Stage.CONNECT,
                f"cannot connect to {host} port {port} ({os.strerror(error.errno) if error.errno else error})",
                fix=_advice(error),
            ) from error
        return transport, wire.inner


def _advice(error: OSError) -> str:
    """Say what to do about a connection that was not made; of several addresses the error names each."""
    if f"[Errno {errno.EHOSTUNREACH}]" not in str(error):
        return "is its SSH server running (macOS: Sharing, Remote Login), and is `port` right?"
    reach = "is the machine on and in reach (VPN, firewall)?"
    # So does macOS 15 and later answer for a machine beside it where it keeps a program off the local network (Apple's
    # TN3179): what was started from tmux or by launchd, while `ssh` itself gets through.
    hint = "allow this terminal, or tmux, in System Settings, Privacy & Security, Local Network"
    return f"{reach} If `ssh` reaches it: {hint}" if sys.platform == "darwin" else reach


class _Wire(asyncio.Protocol):
    """Stands between the socket and asyncssh, and passes everything on.

    sshd leaves Nagle's algorithm on until a session has started, so its next small packet waits for our
    acknowledgement, which Linux delays by 40 ms: asking for quick ones, which must be done again each time, saves that.
    """

    def __init__(self, inner: asyncio.Protocol) -> None:
        self.inner = inner
        self.greeting = b""
        self.opened = False
        self.closed = asyncio.Event()
        self._socket: socket.socket | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.opened = True
        if _QUICKACK is not None:
            self._socket = transport.get_extra_info("socket")
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._socket is not None and _QUICKACK is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        if len(self.greeting) < _GREETING:
            self.greeting = (self.greeting + data)[:_GREETING]
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._socket = None
        self.closed.set()
        self.inner.connection_lost(exc)


class Login:
    """A connection that is logged in."""

    def __init__(self, connection: asyncssh.SSHClientConnection, dial: Dial) -> None:
        """`dial` is what connected, where that was not a jump host."""
        self.connection = connection
        self._dial = dial

    @property
    def lost(self) -> bool:
        """Whether it has ended."""
        return bool(self.connection.is_closed())

    async def close(self, *, at_once: bool = False) -> None:
        """End the connection, by a word to the server or without, and wait until its socket is closed."""
        if at_once:
            self.connection.abort()
        else:
            self.connection.close()
        await self.connection.wait_closed()
        await self._dial.wait_closed()


class SshChannel(asyncssh.SSHClientSession[bytes]):
    """Joins an asyncssh channel to the receiver."""

    def __init__(self, login: Login, receiver: Receiver) -> None:
        """Close the connection when the channel ends: there is one channel a connection."""
        self._login = login
        self._receiver = receiver
        self._channel: asyncssh.SSHClientChannel[bytes] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._status: int | None = None
        self._closing: asyncio.Future[None] | None = None

    @property
    def peer(self) -> str | None:
        """The address that the socket leads to; behind a jump host, what that was asked for."""
        name = self._login.connection.get_extra_info("peername")
        return str(name[0]) if name else None

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        """Keep the channel."""
        self._channel = chan

    def data_received(self, data: bytes, datatype: int | None) -> None:
        """Hand bytes on; `datatype` tells standard error apart."""
        if datatype is None:
            self._receiver.data_received(data)
        else:
            self._receiver.stderr_received(data)

    def exit_status_received(self, status: int) -> None:
        """Keep the status; it is diagnosis, never evidence of success."""
        self._status = status

    def pause_writing(self) -> None:
        """Let writers wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let writers go on."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the connection too, and tell the receiver then that nothing more comes."""
        self._channel = None
        self._writable.set()
        self._closing = asyncio.ensure_future(self._login.close())
        self._closing.add_done_callback(lambda _: self._receiver.ended(exc, self._status))

    def write(self, data: bytes) -> None:
        """Send bytes to the agent."""
        if self._channel is not None and not self._channel.is_closing():
            self._channel.write(data)

    async def drain(self) -> None:
        """Wait until more may be written."""
        await self._writable.wait()

    def close(self) -> None:
        """End the agent's input."""
        if self._channel is not None and not self._channel.is_closing():
            self._channel.write_eof()

    def abort(self) -> None:
        """Drop the connection."""
        self._login.connection.abort()
