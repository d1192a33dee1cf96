"""Controllers that die, and controllers that meet: each job is started once, and whoever comes later finds it."""

from __future__ import annotations

import json
import signal

import pytest

from gpulayer.placement.plan import Action
from gpulayer.run import api
from tests.faults.contests import one_gpu, together
from tests.faults.hosts import until
from tests.faults.oracle import journaled
from tests.faults.scene import Scene
from tests.run.project import Project, output, summary


def waiting(project: Project) -> str:
    """Return a job that writes until the project's gate opens."""
    return journaled(f"i=0; until test -e {project.folder}/gate; do i=$((i+1)); echo line $i; sleep 0.02; done")


async def test_another_laptop_follows_what_a_dead_controller_started(scene: Scene) -> None:
    """F01: the first controller is killed while it streams; the second has no history and finds all on the hosts."""
    scene.host("a", slots=2)
    first, second = scene.project("first"), scene.project("second")
    for project in (first, second):
        project.write({f"job-{n}": {"command": waiting(first)} for n in range(2)})
    with scene.controller(first, "apply") as controller:
        assert controller.stdout is not None
        streaming: set[str] = set()
        while len(streaming) < 2:
            event = json.loads(controller.stdout.readline())
            if event["event"] == "output":
                streaming.add(event["job"])
        controller.send_signal(signal.SIGKILL)
    plan = await second.plan()
    assert {job.action for job in plan.jobs} == {Action.FOLLOW}
    events = []
    async for event in api.apply(plan, second.jobs, second.inventory, fleet=second.fleet):
        events.append(event)
        if event.event == "output":
            (first.folder / "gate").touch()
    assert summary(events) == (0, {"succeeded": 2})
    assert all(output(events, f"job-{n}") == second.local_log(plan.jobs[n].run or "") for n in range(2))
    assert summary(await first.attach(await first.plan())) == (0, {"succeeded": 2})
    assert sum(scene.check().starts.values()) == 2


@pytest.mark.parametrize(
    ("point", "found"), [("intended", "launching"), ("launch-due", "launching"), ("launch-answered", "exited")]
)
async def test_a_controller_that_dies_around_a_launch_leaves_a_question_that_the_host_answers(
    scene: Scene, point: str, found: str
) -> None:
    """F02, F03: what is between intent and send never ran, what was answered did; both run once."""
    scene.host("a")
    project = scene.project()
    project.write({"a": {"command": journaled()}})
    with scene.controller(project, "apply", fail=f"{point}:kill:1") as controller:
        assert controller.wait(30) == -signal.SIGKILL
    before = {run.job: run for run in await project.status()}
    assert before["a"].status in {found, "queued", "running"}
    events = await project.apply()
    assert summary(events)[0] == 0
    assert sum(scene.check().starts.values()) == 1


async def test_a_controller_that_dies_after_the_send_finds_its_run(scene: Scene) -> None:
    """F03: the host holds its answer back for a second, in which the controller is killed."""
    host = scene.host("a", environment={"GL_FAIL": "gate-opened:delay:1"})
    project = scene.project()
    project.write({"a": {"command": journaled()}})
    with scene.controller(project, "apply") as controller:
        await until(lambda: list(host.home.rglob("runs/*/state.json")))
        controller.send_signal(signal.SIGKILL)
        events = controller.stdout.read() if controller.stdout is not None else ""
    assert '"launched"' not in events
    assert summary(await project.apply())[0] == 0
    assert sum(scene.check().starts.values()) == 1


async def test_controllers_that_start_together_start_each_job_once(scene: Scene) -> None:
    """F21, on a server with OpenSSH's own limits: each controller has connections and a history of its own."""
    await together(scene, controllers=12, jobs=3)


async def test_one_gpu_is_never_held_twice(scene: Scene) -> None:
    """F22: two controllers with different projects and jobs."""
    await one_gpu(scene, rounds=10)
