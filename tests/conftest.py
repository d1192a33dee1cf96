"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from gpulayer.fleet.transport import ConnectOptions
from tests.sshd import Farm, SshdHost, new_farm

# How fast the machine is says nothing about a property.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `linux` on other systems, and `root` for other users, with what it needs; nothing else is."""
    needs = {"linux": sys.platform == "linux", "root": os.geteuid() == 0}
    for name, here in needs.items():
        for marker in item.iter_markers(name):
            (what,) = marker.args
            if not here:
                pytest.skip(f"[needs_{name}] {what}")


@pytest.fixture(scope="session")
def farm() -> Iterator[Farm]:
    """The client's side of all sshd hosts of this session: `identity`, `known_hosts`, `controller_home`."""
    with new_farm() as farm:
        yield farm


@pytest.fixture(scope="session")
def sshd_host(farm: Farm) -> Callable[..., SshdHost]:
    """Start a host: `sshd_host("alpha", shell="zsh", rc="echo hello", python="/usr/bin/python3")`. Names are unique."""
    return farm.host


@pytest.fixture(scope="session")
def plain_host(farm: Farm) -> SshdHost:
    """One host with bash and nothing special, shared by all tests that leave no trace on it."""
    return farm.host("plain")


@pytest.fixture(scope="session")
def connect_options(farm: Farm) -> ConnectOptions:
    """How the tests connect: only the farm's keys are trusted, and nobody's own ssh configuration is read."""
    return ConnectOptions(
        known_hosts=(farm.known_hosts,), ssh_config=farm.root / "no-config", agent_socket=None, local_python=None
    )
