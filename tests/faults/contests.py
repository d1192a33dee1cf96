"""Contests of several controllers, in the number that the caller wants: short in the suite, long by `make faults`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gpulayer.placement.plan import KnownRun
from gpulayer.run import api
from gpulayer.run.events import Event
from tests.faults.oracle import journaled
from tests.faults.scene import ONE_GPU, Scene
from tests.run.project import Project, summary


async def alone(project: Project) -> list[Event]:
    """Plan and apply over connections of its own, as a process of its own would."""
    plan = await api.plan(project.jobs, project.inventory, options=project.options)
    events = api.apply(plan, project.jobs, project.inventory, options=project.options)
    return [event async for event in events]


async def together(scene: Scene, *, controllers: int, jobs: int) -> None:
    """Let many controllers apply the same jobs at the same moment.

    Each has its own history: only the host can tell them that another was first.
    """
    scene.host("a", slots=jobs)
    projects = [scene.project(f"laptop-{n}") for n in range(controllers)]
    for project in projects:
        project.write({f"job-{n}": {"command": journaled("sleep 0.2; echo said")} for n in range(jobs)})
    for events in await asyncio.gather(*(alone(project) for project in projects)):
        code, counts = summary(events)
        assert code == 0
        assert sum(counts.values()) == jobs
    journal = scene.check()
    assert len(journal.starts) == jobs
    assert all(project.logs_are_equal() for project in projects)


async def one_gpu(scene: Scene, *, rounds: int) -> None:
    """Let two controllers with half of the rounds each go after one device, and each run have it for a while.

    Without locks the runs would meet there, as often as not; in ten rounds some surely.
    """
    scene.host("a", gpu=True)
    job = {"command": journaled("sleep 0.3", device=True)}
    projects = []
    for n in range(2):
        project = scene.project(f"laptop-{n}")
        scene.projects[-1] = project = replace(project, folder=project.folder.with_name(f"{project.name}-{n}"))
        project.folder.mkdir()
        project.write({f"job-{n}": job for n in range(rounds // 2)}, accelerator="cuda")
        projects.append(project)
    for events in await asyncio.gather(*(project.apply() for project in projects)):
        assert summary(events) == (0, {"succeeded": rounds // 2})
    journal = scene.check()
    assert len(journal.starts) == rounds // 2 * 2
    assert {run.devices for project in projects for run in await history(project)} == {(ONE_GPU,)}


async def history(project: Project) -> list[KnownRun]:
    """Return the runs of a project as its own history tells."""
    return await project.status()
