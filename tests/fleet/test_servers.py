"""SSH servers that misbehave before there is an agent: each ends as one bounded error, at its limit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncssh
import pytest

from gpulayer.errors import Stage
from gpulayer.fleet.hostkeys import Trust
from gpulayer.fleet.sshstreams import Client
from gpulayer.spec.inventory import Host
from tests.fleet.conftest import Failure
from tests.sshd import ADDRESS, USER, Farm, SshdHost, keygen, known_hosts_line

# ruff: noqa: ARG002  # what a server is told and does not use

EVIL = "\x1b]0;pwn\x07 timeout revoked "


class Peer(asyncssh.SSHServer):
    """Lets nobody in; its kinds misbehave on the way."""

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self.connection = conn

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True


class Trivial(Peer):
    """Asks for no proof of who comes: then nobody knows who has answered for the key."""

    def begin_auth(self, username: str) -> bool:
        return False


class Talker(Peer):
    """Sends words to be shown before the login, without end."""

    def begin_auth(self, username: str) -> bool:
        self.talking = asyncio.ensure_future(self.talk())
        return True

    async def talk(self) -> None:
        with contextlib.suppress(Exception):
            while True:
                self.connection.send_auth_banner(EVIL * 1000)
                await asyncio.sleep(0.001)  # it shares this process: its own buffers must not be the flood

    async def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return bool(await asyncio.Event().wait())

    def connection_lost(self, exc: Exception | None) -> None:
        self.talking.cancel()


class Rude(Peer):
    """Hangs up with a long speech."""

    def begin_auth(self, username: str) -> bool:
        self.connection.disconnect(asyncssh.DISC_BY_APPLICATION, EVIL * 5000)
        return True


@contextlib.asynccontextmanager
async def serve(kind: type[Peer], folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """Start a server of that kind; give its port and the file that knows its key."""
    key, known = keygen(folder / "key"), folder / "known_hosts"
    async with await asyncssh.listen(ADDRESS, 0, server_host_keys=[str(key)], server_factory=kind) as server:
        port = server.get_port()
        known.write_text(known_hosts_line(port, Path(f"{key}.pub")))
        yield port, known


@pytest.mark.parametrize(
    ("kind", "stage", "words"),
    [
        (Trivial, Stage.AUTHENTICATE, "refuses the login"),
        (Talker, Stage.AUTHENTICATE, "did not end in time"),
        (Rude, Stage.CONNECT, "broke during the login"),
    ],
)
async def test_a_server_that_misbehaves_in_the_login_is_one_short_error(
    *, failure: Failure, farm: Farm, tmp_path: Path, kind: type[Peer], stage: Stage, words: str
) -> None:
    async with serve(kind, tmp_path) as (port, known):
        host = Host(name="odd", address=ADDRESS, port=port, user=USER, identity_file=str(farm.identity))
        error = await failure(host, known_hosts=(known,), login_timeout=1.0)
    assert (error.stage, words in error.reason) == (stage, True)
    assert len(str(error)) < 3000


def test_of_what_a_server_says_before_the_login_little_is_kept() -> None:
    client = Client(Trust(name="odd", port=22), accept=False)
    for _ in range(3):
        client.auth_banner_received(EVIL * 1000, "en")
    assert len(client.banner) == 2000


async def test_endless_lines_before_the_version_are_no_ssh_server(failure: Failure, farm: Farm) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"welcome\r\n" * 1000)
                await writer.drain()

    async with await asyncio.start_server(serve, ADDRESS, 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        host = Host(name="chatty", address=ADDRESS, port=port, identity_file=str(farm.identity))
        error = await failure(host, login_timeout=5.0)
    assert error.stage is Stage.CONNECT
    assert "welcome" in error.reason


async def test_a_packet_that_is_too_large_ends_the_connection(failure: Failure, farm: Farm) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(b"SSH-2.0-odd\r\n" + b"\xff\xff\xff\xf0" + bytes(1 << 16))
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

    async with await asyncio.start_server(serve, ADDRESS, 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        host = Host(name="huge", address=ADDRESS, port=port, identity_file=str(farm.identity))
        error = await failure(host, login_timeout=2.0)
    assert error.stage in (Stage.CONNECT, Stage.AUTHENTICATE)


async def test_a_server_without_a_safe_algorithm_is_refused(
    sshd_host: Callable[..., SshdHost], failure: Failure
) -> None:
    for name, line in (("old-cipher", "Ciphers 3des-cbc"), ("old-macs", "Ciphers aes256-ctr\nMACs hmac-sha1")):
        host = sshd_host(name, config=[line]).host
        for _ in range(5):
            error = await failure(host)
            if "broke during the login" not in error.reason:  # its reset may overtake the list of what it knows
                break
        assert error.stage is Stage.HOST_KEY
        assert "no safe algorithm in common" in error.reason
