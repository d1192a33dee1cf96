"""Agents of this machine, on the controller's Python and on the oldest that hosts may have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host.agent_client import AgentClient


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., AgentClient]]:
    """Start agents of one host; a second one is a second controller's. All end with the test."""
    started: list[AgentClient] = []

    def start(**options: Any) -> AgentClient:
        agent = AgentClient(tmp_path, **{"python": sys.executable, **options})
        started.append(agent)
        agent.hello()
        return agent

    yield start
    for agent in started:
        agent.close()


@pytest.fixture
def agent(agents: Callable[..., AgentClient]) -> AgentClient:
    return agents()
