"""What the tests of this folder share."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from gpulayer.errors import HostError
from gpulayer.fleet.session import Session
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Host, Inventory

Failure = Callable[..., Awaitable[HostError]]
Greet = Callable[..., Awaitable[dict[str, object]]]


@pytest.fixture
def failure(connect_options: ConnectOptions) -> Failure:
    """Open a session that must fail: `await failure(host, *other hosts, **options)`."""

    async def fail(host: Host, *others: Host, **options: object) -> HostError:
        inventory = Inventory(hosts={one.name: one for one in (host, *others)})
        with pytest.raises(HostError) as caught:
            await Session.open(host, inventory, dataclasses.replace(connect_options, **options))  # type: ignore[arg-type]
        assert caught.value.host == host.name
        assert caught.value.fix
        return caught.value

    return fail


@pytest.fixture
def greet(connect_options: ConnectOptions) -> Greet:
    """Open a session, have the agent answer, and return how it introduced itself."""

    async def open_and_ask(host: Host, *others: Host, **options: object) -> dict[str, object]:
        inventory = Inventory(hosts={one.name: one for one in (host, *others)})
        settings = dataclasses.replace(connect_options, **options)  # type: ignore[arg-type]
        async with await Session.open(host, inventory, settings) as session:
            assert "now" in (await session.request("ping")).header
            return dict(session.hello)

    return open_and_ask
