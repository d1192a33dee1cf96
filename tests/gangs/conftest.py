"""Four real sshd hosts that the tests of this folder share, and a project for each test."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.fleet.transport import ConnectOptions
from tests.gangs.network import NAMESPACES, SWITCHES, NetworkHost, Switch
from tests.run.project import Project, new_project
from tests.sshd import Farm, SshdHost

NAMES = ("alpha", "beta", "gamma", "delta")


@pytest.fixture(scope="session")
def quartet(farm: Farm) -> Iterator[dict[str, SshdHost]]:
    """Four hosts whose interpreter has torch; where the tests run as root each has an address of its own."""
    common: dict[str, Any] = {"python": sys.executable}
    if not NAMESPACES:
        yield {name: farm.host(f"gang-{name}", **common) for name in NAMES}
        return
    with Switch() as switch:
        SWITCHES.append(switch)
        hosts = {
            name: farm.host(f"gang-{name}", kind=NetworkHost, address=switch.address(number), **common)
            for number, name in enumerate(NAMES, start=1)
        }
        yield hosts
        for host in hosts.values():
            assert isinstance(host, NetworkHost)
            host.leave()
        SWITCHES.pop()


@pytest.fixture
async def project(
    tmp_path: Path, quartet: dict[str, SshdHost], connect_options: ConnectOptions
) -> AsyncIterator[Project]:  # fmt: skip
    """A project on the four hosts."""
    async with new_project(tmp_path, "gang", quartet, connect_options) as project:
        yield project
