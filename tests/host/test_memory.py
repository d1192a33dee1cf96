"""Memory that ends: the kernel kills the job and not its supervisor, so the end is recorded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulayer.remote import processes
from tests.host.agent_client import AgentClient, new_spec
from tests.host.test_crashes import wait_until

MIB = 2**20
LIMIT = 160 * MIB  # for an agent, a supervisor and what the job should need
HOG = "python3 -c 'x = bytearray(%d << 20); print(\"taken\"); import time; time.sleep(1000)'"
GROUPS = Path("/sys/fs/cgroup")


def new_group() -> Path | None:
    """A new memory cgroup with the limit, of the first or the second version; None where we may make none."""
    for parent, limits in (
        (GROUPS / "memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),
        (GROUPS, ("memory.max", "memory.swap.max")),
    ):
        group = parent / f"gpulayer-test-{os.getpid()}"
        if not (parent / "cgroup.procs").exists() or not os.access(parent, os.W_OK):
            continue
        group.mkdir()
        if (group / limits[0]).exists():
            (group / limits[0]).write_text(str(LIMIT))
            if (group / limits[1]).exists():  # swapping is accounted for: all of the memory and none of the swap
                (group / limits[1]).write_text("0" if "swap" in limits[1] else str(LIMIT))
            return group
        group.rmdir()
    return None


@contextmanager
def little_memory(agent: AgentClient) -> Iterator[bool]:
    """Let all that an agent starts have little memory; gives False where nobody may say so here."""
    group = new_group()
    if group is None:
        yield False
        return
    (group / "cgroup.procs").write_text(str(agent.process.pid))
    try:
        yield True
    finally:
        agent.process.kill()
        wait_until(lambda: (group / "cgroup.procs").read_text() == "")
        group.rmdir()


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
