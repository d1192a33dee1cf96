"""Room that a plan counted on and that is gone at launch: what can come free is waited for, the rest is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpulayer.fleet.transport import ConnectOptions
from gpulayer.run import api
from tests.machines import simulated_cpu_host
from tests.run.project import STARTED, Project, summary, words
from tests.sshd import SshdHost


def write_meminfo(path: Path, gib: int) -> None:
    """Say how much memory new programs can get."""
    path.write_text(f"MemTotal: 33554432 kB\nMemAvailable: {gib * 2**20} kB\n")


@pytest.fixture(scope="session")
def meminfo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("room") / "meminfo"


@pytest.fixture(scope="session")
def small(sshd_host: Callable[..., SshdHost], meminfo: Path) -> SshdHost:
    return sshd_host("room", python=str(simulated_cpu_host(meminfo.parent / "host", meminfo=meminfo).python))


@pytest.fixture
async def room(
    tmp_path: Path, small: SshdHost, trio: dict[str, SshdHost], connect_options: ConnectOptions
) -> AsyncIterator[Project]:  # fmt: skip
    folder = tmp_path / tmp_path.name.strip("_").replace("_", "-")[:60]
    folder.mkdir()
    hosts = {"room": small, "run-one": trio["run-one"]}
    project = Project(
        folder=folder, hosts=hosts, options=connect_options, extra={name: {"max_jobs": 2} for name in hosts}
    )
    yield project
    await project.close()


ONLY = {"where": {"hosts": ["room"]}}
NEEDS = {"command": STARTED, "resources": {"memory_gb": 2}}


async def test_memory_that_other_jobs_have_is_waited_for(room: Project, meminfo: Path) -> None:
    gate = room.folder / "gate"
    room.write({"holds": {"command": f"{STARTED}; until test -e {gate}; do sleep 0.02; done"} | ONLY,
                "needs": NEEDS | ONLY})  # fmt: skip
    write_meminfo(meminfo, 1)
    seen = []
    async for event in api.apply(await room.plan(), room.jobs, room.inventory, fleet=room.fleet):
        seen.append(event)
        if event.event == "queued" and (reason := event.detail["reason"]) is not None:
            assert (event.job, reason) == ("needs", "room: 2.0 GiB of memory are asked for, 1.0 GiB are free")
            write_meminfo(meminfo, 4)
            gate.touch()
    assert summary(seen) == (0, {"succeeded": 2})
    assert words(seen, "needs") == ["queued", "launching", "queued", "launching", "launched", "running", "exited"]
    assert set(room.starts().values()) == {1}


async def test_memory_that_no_job_has_fails_the_start(room: Project, meminfo: Path) -> None:
    room.write({"needs": NEEDS | ONLY})
    write_meminfo(meminfo, 1)
    events = await room.apply()
    assert summary(events) == (1, {"failed": 1})
    (end,) = [event for event in events if event.event == "failed_to_start"]
    assert end.detail["reason"] == "room: 2.0 GiB of memory are asked for, 1.0 GiB are free"


async def test_a_job_goes_where_there_is_memory_while_another_host_is_full(room: Project, meminfo: Path) -> None:
    gate = room.folder / "gate"
    hold = {"command": f"{STARTED}; until test -e {gate}; do sleep 0.02; done"}
    room.write({"holds": hold | ONLY, "other": hold | {"where": {"hosts": ["run-one"]}}, "needs": NEEDS})
    write_meminfo(meminfo, 1)
    seen = []
    async for event in api.apply(await room.plan(), room.jobs, room.inventory, fleet=room.fleet):
        seen.append(event)
        if (event.event, event.job) == ("exited", "needs"):
            gate.touch()
    assert summary(seen) == (0, {"succeeded": 3})
    assert [event.host for event in seen if event.job == "needs"][-1] == "run-one"
