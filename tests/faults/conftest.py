"""Hosts with a power switch, and projects on them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from gpulayer.fleet.transport import ConnectOptions
from tests.faults.hosts import PoweredHost
from tests.faults.scene import Scene
from tests.sshd import Farm

_NUMBERS = itertools.count()


@pytest.fixture
def powered(farm: Farm) -> Iterator[Callable[..., PoweredHost]]:
    """Start hosts as `Farm.host` does, under names of this test's own; their power is off at its end."""
    started: list[PoweredHost] = []

    def start(name: str, **options: object) -> PoweredHost:
        unique = f"{name}-{next(_NUMBERS)}"
        host = farm.host(unique, kind=PoweredHost, **options)  # type: ignore[arg-type]
        assert isinstance(host, PoweredHost)
        started.append(host)
        return host

    yield start
    for host in started:
        host.power_off()


@pytest.fixture
async def scene(
    tmp_path: Path, powered: Callable[..., PoweredHost], connect_options: ConnectOptions
) -> AsyncIterator[Scene]:
    """What a test of faults plays on. At its end all links are closed; then the oracle is asked for what is left."""
    scene = Scene(folder=tmp_path, start_host=powered, options=connect_options, number=next(_NUMBERS))
    yield scene
    await scene.close()
