"""The `ssh` transport: asyncssh, with every setting that matters made explicit.

asyncssh reads no configuration file here: its own reading of ~/.ssh/config takes `UserKnownHostsFile none` for "trust
anybody" and skips what it does not know. What a login may use is decided in `sshconfig`, `identities` and `hostkeys`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from gpulayer.errors import HostError, Stage
from gpulayer.fleet.hostkeys import HostKeys, Trust
from gpulayer.fleet.identities import Identities
from gpulayer.fleet.shipment import REMOTE_COMMAND
from gpulayer.fleet.sshconfig import Target, resolve
from gpulayer.fleet.sshfailures import failure
from gpulayer.fleet.sshlibrary import asyncssh
from gpulayer.fleet.sshstreams import Client, Dial, Login, SshChannel
from gpulayer.fleet.transport import Channel, ConnectOptions, Receiver
from gpulayer.spec.inventory import Host

# AES-GCM first: on machines with AES instructions it moves twice the bytes a second of asyncssh's default.
CIPHERS = ("aes256-gcm@openssh.com", "aes128-gcm@openssh.com", "chacha20-poly1305@openssh.com", "aes256-ctr")
MACS = (
    *("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com"),
    *("hmac-sha2-256", "hmac-sha2-512"),
)
KEEPALIVE_INTERVAL = 15
KEEPALIVE_COUNT = 3


class Jumps:
    """Connections to jump hosts, each made once and shared by all hosts behind it."""

    def __init__(self) -> None:
        """Start without any."""
        self._open: dict[tuple[str, ...], asyncio.Task[Login]] = {}

    async def through(self, path: tuple[str, ...], connect: Callable[[], Awaitable[Login]]) -> Login:
        """Return the connection for a path of hops, which `connect` makes where there is none."""
        task = self._open.get(path)
        if task is None or (task.done() and (task.exception() is not None or task.result().lost)):
            task = self._open[path] = asyncio.ensure_future(connect())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close every connection, and give up those that are being made."""
        for task in self._open.values():
            task.cancel()
        for result in await asyncio.gather(*self._open.values(), return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.close()
        self._open.clear()


class SshTransport:
    """Reaches one host with asyncssh. `host_keys` and `jumps` are shared by all hosts of an inventory."""

    def __init__(
        self, host: Host, hosts: Mapping[str, Host], options: ConnectOptions, host_keys: HostKeys, jumps: Jumps
    ) -> None:
        """`hosts` are the inventory's, of which jump hosts may be taken."""
        self._host = host
        self._hosts = hosts
        self._options = options
        self._host_keys = host_keys
        self._jumps = jumps

    async def start(self, receiver: Receiver) -> Channel:
        """Connect, log in and start the command. Raises HostError with the stage that failed."""
        login = await self._reach(self._host, ())
        try:
            async with asyncio.timeout(self._options.start_timeout):
                _, session = await login.connection.create_session(
                    lambda: SshChannel(login, receiver),
                    REMOTE_COMMAND,
                    encoding=None,
                    env={},
                    send_env=[],
                    request_pty=False,
                    x11_forwarding=False,
                )
        except (TimeoutError, asyncssh.Error, OSError) as error:
            await login.close(at_once=True)
            raise HostError(
                self._host.name,
                Stage.SHELL,
                f"logged in, but the server starts no command ({str(error) or 'no answer'})",
                fix="look at MaxSessions, ForceCommand and the account's shell on the host",
            ) from error
        return cast("SshChannel", session)

    def explain(self, status: int | None, stderr: bytes) -> HostError | None:
        """Return None: what goes wrong before the command runs was raised by `start` already."""
        del status, stderr
        return None

    async def _reach(self, host: Host, via: tuple[str, ...]) -> Login:
        """Connect to a host, through its jump hosts where it has some. `via` are those that need this one."""
        target = await resolve(host, self._hosts, self._options)
        tunnel: Login | None = None
        path: tuple[str, ...] = ()
        for hop in target.jumps:
            if hop.name in (*via, host.name):
                circle = " -> ".join((*via, host.name, hop.name))
                raise HostError(host.name, Stage.RESOLVE, f"jump hosts form a circle: {circle}", fix="correct `jump`")
            path = (*path, f"{hop.name} {hop.user or ''}@{hop.target}:{hop.port or ''}")
            tunnel = await self._through(path, hop, tunnel, (*via, host.name))
        return await self._login(target, tunnel)

    async def _through(self, path: tuple[str, ...], hop: Host, tunnel: Login | None, via: tuple[str, ...]) -> Login:
        async def connect() -> Login:
            if tunnel is None:
                return await self._reach(hop, via)
            return await self._login(await resolve(hop, self._hosts, self._options), tunnel)

        try:
            return await self._jumps.through(path, connect)
        except HostError as error:
            reason = f"its jump host {hop.name} cannot be reached: {error.reason}"
            raise HostError(self._host.name, error.stage, reason, fix=error.fix) from error

    async def _login(self, target: Target, tunnel: Login | None) -> Login:
        """Make one connection and log in, through `tunnel` where that is given."""
        trust = self._host_keys.trust(target.host, target.key_name, target.port, target.pin)
        identities = Identities(target)
        dial = Dial(target, self._options.connect_timeout)
        client = Client(trust, accept=self._options.accept_new is not None)
        try:
            await identities.load()
            connection = await asyncssh.connect(
                target.address,
                target.port,
                tunnel=tunnel.connection if tunnel else dial,
                client_factory=lambda: client,
                config=None,
                username=target.user,
                client_keys=identities.keys,
                agent_path=None,
                known_hosts=(list(trust.keys), list(trust.authorities), list(trust.revoked)),
                host_key_alias=target.key_name,
                server_host_key_algs=() if trust.authorities else trust.kinds,
                x509_trusted_certs=None,
                preferred_auth=["publickey"],
                public_key_auth=True,
                password_auth=False,
                kbdint_auth=False,
                host_based_auth=False,
                gss_host=None,
                disable_trivial_auth=True,
                agent_forwarding=False,
                x11_forwarding=False,
                send_env=[],
                env={},
                request_pty=False,
                encryption_algs=CIPHERS,
                mac_algs=MACS,
                compression_algs=None,
                connect_timeout=self._options.connect_timeout + self._options.login_timeout,
                login_timeout=self._options.login_timeout,
                keepalive_interval=KEEPALIVE_INTERVAL,
                keepalive_count_max=KEEPALIVE_COUNT,
                tcp_keepalive=True,
                utf8_decode_errors="replace",
            )
        except (OSError, ValueError, asyncssh.Error) as error:
            await dial.wait_closed()
            raise failure(target, trust, client, dial, error) from error
        finally:
            identities.close()
        if client.accepted is not None:
            self._accept(target.host, trust, client.accepted)
        return Login(connection, dial)

    def _accept(self, host: str, trust: Trust, key: asyncssh.SSHKey) -> None:
        """Keep a new key, now that the server has proven that it holds it."""
        if self._host_keys.remember(host, trust, key) and self._options.accept_new is not None:
            self._options.accept_new(trust.pattern, f"{key.get_algorithm()} {key.get_fingerprint()}")
