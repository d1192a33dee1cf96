"""Agents of this machine. What a test leaves running on its host ends with the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote.runs import Run
from gpulayer.remote.settling import settled
from tests.host.agent_client import LIVE, AgentClient


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., AgentClient]]:
    """Start agents of one host; a second one is a second controller's."""
    started: list[AgentClient] = []

    def start(**options: Any) -> AgentClient:
        agent = AgentClient(tmp_path, **{"python": sys.executable, **options})
        started.append(agent)
        agent.hello()
        return agent

    yield start
    for agent in started:
        agent.close()
    states = [settled(Run(str(path.parents[1]), path.name)) for path in (tmp_path / "state").glob("*/runs/*")]
    live = [state["run"] for state in states if state is not None and state["status"] in LIVE]
    if live:
        with AgentClient(tmp_path) as last:
            last.hello()
            for run in live:
                last.ask("cancel", run=run, grace=0, by="the end of the test")
                last.follow(run)


@pytest.fixture
def agent(agents: Callable[..., AgentClient]) -> AgentClient:
    return agents()
