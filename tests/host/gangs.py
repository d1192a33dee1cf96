"""Gangs of agents of this machine, each with folders of its own: what a controller does to launch one, by hand."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote import processes
from tests.host.agent_client import LIVE, AgentClient, AgentError, new_spec

NAMES = ("alpha", "beta", "gamma", "delta")
TOKEN = "5e" * 32


class Gang:
    """Some nodes, their agents and their specs."""

    def __init__(self, folder: Path, count: int, *, processes: int = 1, job: str = "gang") -> None:
        self.folder = folder
        self.names = NAMES[:count]
        self.processes = processes
        self.job = job
        self.agents: list[AgentClient] = []
        self.launches: dict[int, int] = {}
        self.endpoint: dict[str, Any] | None = None
        self.env = {"PYTHONPATH": str(Path(__file__).parent / "torchrun")}
        """Takes a stand-in for torchrun, unless it is emptied."""

    def start(self, node: int, **env: str) -> AgentClient:
        """A fresh connection to a node."""
        folder = self.folder / self.names[node]
        folder.mkdir(exist_ok=True)
        agent = AgentClient(folder, env=env, limit=60)
        agent.hello(host=self.names[node])
        self.agents.append(agent)
        return agent

    def spec(self, node: int, command: list[str] | str, **fields: Any) -> dict[str, Any]:
        made = new_spec(command, job=self.job, host=self.names[node], python=sys.executable, env=self.env)
        gang = {
            "run": made["run"],
            "node": node,
            "nodes": len(self.names),
            "processes": self.processes,
            "backend": "gloo",
            "peers": list(self.names),
            "address": None,
            "endpoint": self.endpoint if node else None,
            "silence": 60,
        }
        gang.update(fields.pop("gang", {}))
        return {**made, "run": f"{made['run']}-n{node}", "gang": gang, **fields}

    def run(self, node: int) -> str:
        return str(self.spec(node, "")["run"])

    def hold(self, node: int, agent: AgentClient, command: list[str] | str, **fields: Any) -> dict[str, Any]:
        """Launch a node and return what it says once it is held."""
        request = self.launches[node] = agent.begin(self.spec(node, command, **fields), token=TOKEN)
        for header, _ in agent.frames(request):
            if "error" in header:
                raise AgentError(header["error"])
            held: dict[str, Any] = header["held"]
            if node == 0:
                addresses = [address for address in held["addresses"] if address in ("127.0.0.1", "::1")]
                self.endpoint = {**held, "addresses": addresses}
            return held
        raise AssertionError

    def launch(self, command: list[str] | str, **fields: Any) -> list[AgentClient]:
        """Launch all in order, and return the agents once all run."""
        agents = [self.start(node) for node in range(len(self.names))]
        for node, agent in enumerate(agents):
            self.hold(node, agent, command, **fields)
        self.await_start(agents)
        return agents

    def await_start(self, agents: list[AgentClient]) -> None:
        """Wait until all that are held run."""
        for node, agent in enumerate(agents):
            answer = agent.answer(self.launches[node])[0]
            assert (answer["new"], answer["state"]["status"]) == (True, "running")

    def started(self, node: int) -> bool:
        """Wait for the answer to a held launch; say whether it has begun."""
        return "state" in self.agents[node].answer(self.launches[node])[0]

    def follow(self, agents: list[AgentClient]) -> list[dict[str, Any]]:
        """The final states."""
        return [agent.follow(self.run(node))[0] for node, agent in enumerate(agents)]

    def log(self, agent: AgentClient, rank: int) -> bytes:
        """The whole log of a rank, followed."""
        request = agent.send("follow", run=self.run(rank // self.processes), offset=0, tail=None, rank=rank)
        return b"".join(payload for _, payload in agent.frames(request))

    def wait_for(self, agents: list[AgentClient], text: bytes) -> None:
        """Wait until every rank has written `text`."""
        for rank in range(len(agents) * self.processes):
            node = rank // self.processes
            agents[node].wait_for(self.run(node), text, f"rank-{rank}.log")

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for node, name in enumerate(self.names):
            if (self.folder / name / "state").exists():
                with contextlib.suppress(AgentError), AgentClient(self.folder / name) as last:
                    last.hello()
                    state = last.status(self.run(node))
                    if state is not None and state["status"] in LIVE:
                        last.ask("cancel", run=self.run(node), grace=0, by="the end of the test")
                        last.follow(self.run(node))


Gangs = Callable[..., Gang]


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Gangs]:
    """Make gangs whose processes end with the test."""
    made: list[Gang] = []

    def make(count: int, **fields: Any) -> Gang:
        made.append(Gang(tmp_path, count, **fields))
        return made[-1]

    yield make
    for gang in made:
        gang.close()


@contextlib.contextmanager
def supervisor_stopped(agent: AgentClient, run: str) -> Iterator[None]:
    """While its supervisor is stopped, as by SIGSTOP. It goes on whatever happens."""
    pid, start = agent.record(run)["supervisor"]
    processes.send(pid, start, signal.SIGSTOP)
    try:
        yield
    finally:
        processes.send(pid, start, signal.SIGCONT)


def ends(state: dict[str, Any]) -> tuple[str, int | None, int | None, str | None]:
    return state["status"], state["code"], state["signal"], state["reason"]
