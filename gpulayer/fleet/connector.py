"""What all connections of an inventory share: choice of the transport, host keys, jump hosts, the pace of logins."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from gpulayer.fleet.openssh import OpenSshTransport
from gpulayer.fleet.process import LocalTransport
from gpulayer.fleet.transport import ConnectOptions, Transport
from gpulayer.spec.inventory import Host, Inventory, TransportKind

if TYPE_CHECKING:
    from gpulayer.fleet.hostkeys import HostKeys
    from gpulayer.fleet.ssh import Jumps

# sshd drops logins at random beyond 10 that are not yet through (MaxStartups 10:30:100).
LOGINS_PER_ADDRESS = 8
LOGINS = 100


class Connector:
    """Makes transports for the hosts of one inventory. `close` ends what they share."""

    def __init__(self, inventory: Inventory, options: ConnectOptions) -> None:
        """Nothing is connected yet."""
        self.inventory = inventory
        self.options = options
        self._host_keys: HostKeys | None = None
        self._jumps: Jumps | None = None
        self._logins = asyncio.Semaphore(LOGINS)
        self._per_address: dict[tuple[str, int | None], asyncio.Semaphore] = {}

    def transport(self, host: Host) -> Transport:
        """Return the transport that the inventory asks for."""
        if host.transport is TransportKind.LOCAL:
            return LocalTransport(host.name)
        if host.transport is TransportKind.OPENSSH:
            return OpenSshTransport(host, self.inventory.hosts, self.options)
        from gpulayer.fleet.hostkeys import HostKeys  # noqa: PLC0415  # asyncssh is slow to import
        from gpulayer.fleet.ssh import Jumps, SshTransport  # noqa: PLC0415

        if self._host_keys is None or self._jumps is None:
            self._host_keys = HostKeys(self.options.known_hosts)
            self._jumps = Jumps()
        return SshTransport(host, self.inventory.hosts, self.options, self._host_keys, self._jumps)

    def python(self, host: Host) -> str | None:
        """Return the interpreter of a host's probes and jobs; None where the inventory leaves it open."""
        if host.python is None and host.transport is TransportKind.LOCAL:
            return self.options.local_python
        return host.python

    @contextlib.asynccontextmanager
    async def login(self, host: Host) -> AsyncIterator[None]:
        """Wait for the turn to log in, and hold it until the agent has answered."""
        address = (host.target, host.port)
        async with self._per_address.setdefault(address, asyncio.Semaphore(LOGINS_PER_ADDRESS)), self._logins:
            yield

    async def close(self) -> None:
        """Close the connections to jump hosts."""
        if self._jumps is not None:
            await self._jumps.close()


def jittered(seconds: float) -> float:
    """Return between half of and the whole time, so that many who failed together do not come back together."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311  # no secret
