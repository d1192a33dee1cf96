"""The long runs, by `make faults`: every byte, hundreds of seeds and rounds, a thousand jobs, the real minutes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.faults.contests import one_gpu, together
from tests.faults.hosts import until
from tests.faults.launches import Launches
from tests.faults.mix import a_mix, kill_points
from tests.faults.oracle import journaled, most_connections
from tests.faults.scene import Scene, applied
from tests.run.project import output, summary
from tests.sshd import descendants

# A busy machine needs minutes for one of these; what hangs is still ended.
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

SEEDS = int(os.environ.get("SEEDS", "200"))
MINUTES = float(os.environ.get("MINUTES", "30"))
MIB = 2**20


@pytest.mark.parametrize("seed", range(1000, 1000 + SEEDS))
async def test_kill_points(scene: Scene, seed: int) -> None:
    """At most one start, wherever controller and host fail."""
    await kill_points(scene, seed=seed)


@pytest.mark.parametrize("seed", range(2000, 2000 + max(1, round(MINUTES * 3))))
async def test_mix(scene: Scene, seed: int) -> None:
    """F50, in parts of twenty seconds."""
    await a_mix(scene, seed=seed, seconds=20, jobs=30)


async def test_one_gpu(scene: Scene) -> None:
    """F22."""
    await one_gpu(scene, rounds=500)


async def test_a_hundred_controllers(scene: Scene) -> None:
    """F21."""
    await together(scene, controllers=100, jobs=3)


@pytest.mark.parametrize("up", [True, False])
async def test_every_byte_of_a_launch(scene: Scene, *, up: bool) -> None:
    """F14."""
    launches = await Launches.on(scene)
    total = await launches.measure()
    for count in range(total[up]):
        await launches.cut_at(up=up, count=count)
    await launches.close()
    journal = scene.check()
    assert len(journal.starts) == launches.number == total[up] + 1


async def test_a_thousand_jobs_on_ten_hosts(scene: Scene) -> None:
    """F20: sshd as it comes, at most two connections a host, and a controller that stays small."""
    for n in range(10):
        scene.host(f"host-{n}", slots=8)
    project = scene.project()
    project.write({f"job-{n}": {"command": journaled("echo said")} for n in range(1000)})
    peak = 0
    errors = scene.folder / "errors"
    with errors.open("w") as said, scene.controller(project, "apply", stderr=said) as controller:
        assert controller.stdout is not None
        for nth, _ in enumerate(controller.stdout):
            if nth % 100 == 0:
                peak = peak_memory(controller.pid) or peak
        assert controller.wait() == 0
    assert errors.read_text() == ""
    journal = scene.check()
    assert len(journal.starts) == len(journal.ends) == 1000
    most = {name: most_connections(host.journal()) for name, host in scene.hosts.items()}
    print(f"{peak / MIB:.0f} MiB, connections {most}")  # noqa: T201
    assert set(most.values()) <= {1, 2}
    assert 0 < peak < 300 * MIB


def peak_memory(pid: int) -> int:
    """Return the most bytes of memory that a process has had in use at once; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0


@pytest.mark.parametrize("kind", ["stopped", "black hole"])
async def test_a_real_minute_of_silence(scene: Scene, kind: str) -> None:
    """F09, F12: the controller notices within a minute, and so does the agent, without being told."""
    host = scene.host("a")
    proxy = await scene.proxy("a")
    project = scene.project()
    gate = f"{project.folder}/gate"
    project.write({"a": {"command": journaled(f"echo begun; until test -e {gate}; do sleep 0.1; done")}})
    agents: set[int] = set()
    begun = noticed = 0.0

    def gone() -> bool:
        return not agents & set(host.inside())

    events = []
    async for event in applied(project):
        events.append(event)
        if event.event == "output" and not begun:
            begun = time.monotonic()
            assert host.process is not None
            agents |= set(descendants([host.process.pid])) & set(host.inside())  # what is detached is not below sshd
            assert agents
            host.cut(signal.SIGSTOP) if kind == "stopped" else proxy.black_hole()
        elif event.event == "link_lost":
            noticed = time.monotonic()
            await until(gone, 75)
            assert time.monotonic() - begun < 120
            host.cut()
            proxy.recover()
        elif event.event == "link_back":
            (project.folder / "gate").touch()
    assert summary(events) == (0, {"succeeded": 1})
    assert noticed - begun <= 61
    scene.check()


async def test_two_seconds_and_twenty_kilobytes(scene: Scene) -> None:
    """F16: two seconds there and back, 20 KB/s; the login, the payload and the log all get through."""
    scene.host("a")
    proxy = await scene.proxy("a")
    proxy.delay, proxy.rate = 1.0, 20_000
    project = scene.project()
    project.write({"a": {"command": journaled("head -c 200000 /dev/zero")}})
    events = await project.apply()
    assert summary(events) == (0, {"succeeded": 1})
    assert output(events, "a") == bytes(200_000)
    assert not [event for event in events if event.event == "link_lost"]
    (run,) = await project.status()
    assert run.status == "exited"
