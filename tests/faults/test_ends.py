"""Ends: whatever dies, each run has one true end, its device is held until its last process is gone, and no longer."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpulayer.run.afterwards import status_document
from gpulayer.run.events import Event
from tests.faults.hosts import PoweredHost, is_stopped, until
from tests.faults.oracle import Journal, journaled
from tests.faults.scene import ONE_GPU, Scene, applied
from tests.run.project import Project, output, summary, words

STAYS = "echo begun; until test -e %s/gate; do sleep 0.02; done"


async def detached(scene: Scene, project: Project) -> dict[str, str]:
    """Apply and leave; return the run ids by job once every one has begun."""
    await project.apply(detach=True)
    runs = {run.rpartition("-a")[0].rpartition("-")[0]: run for run in project.runs()}
    await until(lambda: set(runs.values()) == set(Journal.of(scene.hosts.values()).starts))
    return runs


def release(project: Project) -> None:
    (project.folder / "gate").touch()


async def test_an_orphan_holds_its_device_to_its_end_and_its_timeout_holds(scene: Scene) -> None:
    """F06, and `timed_out(late)`: who finds the orphan keeps its limit from then on."""
    host = scene.host("a", gpu=True)
    project = scene.project()
    ends = {"orphan": journaled(STAYS % project.folder, device=True)}
    project.write({name: {"command": body} for name, body in ends.items()}, accelerator="cuda")
    runs = await detached(scene, project)
    host.kill(scene.record("a", runs["orphan"])["supervisor"])
    other = scene.project("other")
    other.write({"second": {"command": journaled(device=True)}}, accelerator="cuda")
    events: list[Event] = []
    async for event in applied(other):
        events.append(event)
        if event.event == "queued":
            (status,) = await project.status()
            assert status.status == "orphaned"
            release(project)
    assert summary(events) == (0, {"succeeded": 1})
    # What the other laptop ran for the project of this name is found from here too.
    assert summary(await project.attach(None)) == (1, {"succeeded": 1, "lost": 1})
    assert project.local_log(runs["orphan"]) == b"begun\n"
    scene.check()


async def test_an_orphan_whose_limit_passed_while_nobody_looked_is_timed_out_late(scene: Scene) -> None:
    host = scene.host("a")
    project = scene.project()
    project.write({"a": {"command": journaled("sleep 1000"), "timeout": "2s"}})
    runs = await detached(scene, project)
    record = scene.record("a", runs["a"])
    host.kill(record["supervisor"])
    await scene.disconnect()
    await until(lambda: uptime() > record["deadline"])
    events = await project.attach(None)
    assert summary(events) == (1, {"failed": 1})
    (run,) = await project.status()
    assert (run.status, run.reason) == ("timed_out", "late")
    scene.check()


def uptime() -> float:
    """Seconds since boot, of this machine and of every host that it plays."""
    with open("/proc/uptime") as file:  # noqa: PTH123
        return float(file.read().split()[0])


async def test_a_killed_leader_takes_its_children_along(scene: Scene) -> None:
    """F07: what it leaves behind is given a moment, then killed; nothing of it stays on the device."""
    host = scene.host("a", gpu=True)
    project = scene.project()
    project.write({"a": {"command": journaled("sleep 1000 & sleep 1000", device=True)}}, accelerator="cuda")
    runs = await detached(scene, project)
    (run,) = await project.status()
    assert (run.status, run.foreign_process, run.left) == ("running", [], None)
    host.kill(scene.record("a", runs["a"])["leader"])
    events = await project.attach(None)
    assert summary(events) == (1, {"failed": 1})
    (run,) = await project.status()
    assert (run.status, run.signal) == ("signaled", 9)
    assert (run.foreign_process, run.left) == ([], {"tree": "empty", "devices": {ONE_GPU: "free"}, "processes": []})
    jsonschema.validate(status_document([run]), json.loads(Path("schemas/status.schema.json").read_text()))
    scene.check()


async def test_a_stopped_supervisor_is_not_lost_and_keeps_the_limit_when_it_goes_on(scene: Scene) -> None:
    """F10."""
    host = scene.host("a")
    project = scene.project()
    project.write({"a": {"command": journaled("sleep 1000"), "timeout": "2s"}})
    runs = await detached(scene, project)
    record = scene.record("a", runs["a"])
    host.kill(record["supervisor"], signal.SIGSTOP)
    await until(lambda: uptime() > record["deadline"])
    (run,) = await project.status()
    assert run.status == "running"
    assert "supervisor" in (run.reason or "")
    host.kill(record["supervisor"], signal.SIGCONT)
    await project.attach(None)
    (run,) = await project.status()
    assert run.status == "timed_out"
    scene.check()


async def test_a_stopped_job_can_be_cancelled(scene: Scene) -> None:
    """F11: it hears TERM only when it goes on."""
    host = scene.host("a")
    project = scene.project()
    project.write({"a": {"command": journaled("trap 'echo heard; exit 3' TERM; while :; do sleep 0.05; done")}})
    runs = await detached(scene, project)
    host.kill(scene.record("a", runs["a"])["leader"], signal.SIGSTOP)
    events = await project.cancel(["a"], grace=5)
    assert summary(events) == (1, {"cancelled": 1})
    assert output(events, "a").endswith(b"heard\n")
    scene.check()


async def test_a_power_loss_is_lost_with_its_reason_and_nothing_runs_again(scene: Scene) -> None:
    """F31: the host vanishes while one job runs and another waits; after the next boot its device is free."""
    host = scene.host("a", gpu=True)
    project = scene.project()
    project.write(
        {
            "cut": {"command": journaled(STAYS % project.folder, device=True)},
            "later": {"command": journaled(device=True)},
        },
        accelerator="cuda",
    )
    events: list[Event] = []
    async for event in applied(project):
        events.append(event)
        if event.event == "output":
            host.power_off()
        elif event.event == "link_lost":
            host.start()
    assert summary(events) == (1, {"lost": 1, "succeeded": 1})
    (lost,) = [event for event in events if event.event == "lost"]
    assert lost.detail["reason"] == host.lost_reason
    assert summary(await project.apply()) == (1, {"lost": 1, "up_to_date": 1})
    assert set(scene.check().starts.values()) == {1}


@pytest.mark.parametrize(
    ("point", "starts"),
    [("claimed", {1}), ("intent-written", {0}), ("running-written", {0}), ("gate-opened", {0, 1}), ("exit-due", {1})],
)
async def test_a_power_loss_at_a_bad_moment_starts_nothing_twice(scene: Scene, point: str, starts: set[int]) -> None:
    """F32: the launch stops at a point, the power goes, and the same launch is asked for after the next boot."""
    host = scene.host("a", environment={"GL_FAIL": f"{point}:stop:1"})
    project = scene.project()
    project.write({"a": {"command": journaled()}})
    with scene.controller(project, "apply") as controller:
        await until(lambda: stopped(host))
        host.power_off()
        controller.kill()
        controller.communicate()
    host.environment({})
    host.start()
    events = await project.apply()
    (run,) = project.runs()
    assert scene.check().starts[run] in starts
    assert words(events, "a")[-1] == ("exited" if point == "claimed" else "lost")


def stopped(host: PoweredHost) -> list[int]:
    """Return the processes of a host that are stopped."""
    return [pid for pid in host.inside() if is_stopped(pid)]


async def test_a_job_says_which_ends_are_tried_again(scene: Scene) -> None:
    """`retries: {max, on}`: each attempt is a run of its own."""
    host = scene.host("a")
    project = scene.project()
    seen = f"{project.folder}/seen"
    once: dict[str, dict[str, Any]] = {
        "lost": {
            "command": journaled(f"echo begun; test -e {seen} || exec sleep 1000"),
            "retries": {"max": 1, "on": ["lost"]},
        },
        "late": {
            "command": journaled(f"test -e {seen}-late || {{ touch {seen}-late; exec sleep 1000; }}"),
            "timeout": "2s",
            "retries": {"max": 1, "on": ["timed_out"]},
        },
        "other": {"command": journaled(code=3), "retries": {"max": 1, "on": ["timed_out", "lost"]}},
    }
    project.write(once)
    events: list[Event] = []
    async for event in applied(project):
        events.append(event)
        if (
            event.event == "output"
            and event.job == "lost"
            and event.data == b"begun\n"
            and not (project.folder / "seen").exists()
        ):
            (project.folder / "seen").touch()
            record = scene.record("a", event.run or "")
            host.kill(record["supervisor"])
            host.kill(record["leader"])
    assert summary(events) == (1, {"succeeded": 2, "failed": 1})
    assert [word for word in words(events, "lost") if word in {"lost", "exited"}] == ["lost", "exited"]
    assert [word for word in words(events, "late") if word in {"timed_out", "exited"}] == ["timed_out", "exited"]
    assert words(events, "other").count("exited") == 1
    assert set(scene.check().starts.values()) == {1}


async def test_what_is_decided_while_a_host_is_away_holds_when_it_is_back(scene: Scene) -> None:
    """F41: a limit passes with nobody connected, and a cancel that could not be sent is sent later."""
    host = scene.host("a")
    project = scene.project()
    project.write({"late": {"command": journaled("exec sleep 1000"), "timeout": "2s"},
                   "unwanted": {"command": journaled("exec sleep 1000")}})  # fmt: skip
    await detached(scene, project)
    host.stop()
    assert summary(await project.cancel(["unwanted"])) == (4, {"unknown": 1})
    host.start()
    assert summary(await project.cancel(["unwanted"])) == (1, {"cancelled": 1})
    await project.attach(None)
    runs = {run.job: run for run in await project.status()}
    assert (runs["late"].status, runs["late"].reason) == ("timed_out", None)
    assert runs["unwanted"].status == "cancelled"
    scene.check()
