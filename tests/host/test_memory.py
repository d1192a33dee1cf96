"""Memory that ends: the kernel kills the job and not its supervisor, so the end is recorded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulayer.remote import processes
from tests.cgroups import control_group
from tests.host.agent_client import AgentClient, new_spec

MIB = 2**20
LIMIT = 160 * MIB  # for an agent, a supervisor and what the job should need
HOG = "python3 -c 'x = bytearray(%d << 20); print(\"taken\"); import time; time.sleep(1000)'"


@contextmanager
def little_memory(agent: AgentClient) -> Iterator[bool]:
    """Let all that an agent starts have little memory and no swap; gives False where nobody may say so here."""
    first = {"memory.limit_in_bytes": LIMIT, "memory.memsw.limit_in_bytes": LIMIT}
    with control_group("memory", first, {"memory.max": LIMIT, "memory.swap.max": 0}) as members:
        if members is not None:
            members.write_text(str(agent.process.pid))
        try:
            yield members is not None
        finally:
            agent.process.kill()


def take_the_kernels_part(agent: AgentClient, run: str) -> None:
    """Kill what the kernel says that it would kill first, of a run and its supervisor."""
    agent.wait_for(run, b"taken")
    supervisor = agent.record(run)["supervisor"][0]
    family = {supervisor, *processes.below([supervisor], processes.living())}
    os.kill(max(family, key=lambda pid: int(Path(f"/proc/{pid}/oom_score").read_text())), signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "end"),
    [(f"exec {HOG}", ("signaled", None, 9)), (f"{HOG}; exit $?", ("exited", 137, None))],
    ids=["the job", "a child of it"],
)
def test_the_oom_killer_takes_the_job_and_its_supervisor_records_that(
    agent: AgentClient, command: str, end: tuple[str, int | None, int | None]
) -> None:
    """F42, in a memory cgroup where one can be made; elsewhere the kernel's own choice is asked, and killed by us."""
    with little_memory(agent) as limited:
        spec = new_spec(command % (400 if limited else 40))
        agent.launch(spec)
        if not limited:
            take_the_kernels_part(agent, spec["run"])
        state, _ = agent.follow(spec["run"])
    assert (state["status"], state["code"], state["signal"]) == end
    assert state["left"]["tree"] == "empty"
