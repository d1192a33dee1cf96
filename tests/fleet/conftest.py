"""What the tests of this folder share."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpulayer.errors import HostError
from gpulayer.fleet.session import Session
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Host, Inventory
from tests.host.agent_client import new_spec
from tests.sshd import SshdHost

ROOT = Path(__file__).resolve().parents[2]

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


@pytest.fixture(scope="session")
def hostile(sshd_host: Callable[..., SshdHost]) -> Host:
    """A host whose agent is ours in name only; its `python` says what it does (tests/fleet/hostile.py)."""
    words = f"env PYTHONPATH={ROOT} {sys.executable} {ROOT}/tests/fleet/hostile.py"
    return sshd_host("hostile", config=[f"ForceCommand {words}"]).host


async def open_hostile(host: Host, mode: str, options: ConnectOptions) -> Session:
    return await Session.open(dataclasses.replace(host, python=mode), Inventory(hosts={}), options)


async def run(session: Session, command: list[str] | str, **fields: Any) -> tuple[dict[str, Any], bytes]:
    """Run a job to its end; return its last state and its output."""
    spec = new_spec(command, key=os.urandom(32).hex(), **fields)
    await session.request("launch", b"{}", spec=spec)
    stream = await session.stream("follow", run=spec["run"], offset=0, tail=None)
    output = b"".join([reply.payload async for reply in stream])
    state: dict[str, Any] = stream.last["state"]
    return state, output
