"""What one controller started and another asks about: truth lives on the hosts, whoever lost or never had a history."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpulayer.errors import HostError, UsageError
from gpulayer.placement.plan import Action, KnownRun
from gpulayer.run import api
from gpulayer.run.events import Event
from tests.run.project import STARTED, Project, gated, output, release, summary, words


@pytest.fixture
def other(project: Project, tmp_path: Path) -> Project:
    """The same project as another controller sees it: the same documents in another folder, and no history."""
    folder = tmp_path / "another-machine" / project.name
    folder.mkdir(parents=True)
    project.write({
        "ends": {"command": f"{STARTED}; echo kept > out; printf 'no newline'; exit 3", "outputs": ["out"]},
        "silent": {"command": STARTED},
        "runs": {"command": gated(project.folder), "grace": "1s"},
    })  # fmt: skip
    for name in ("jobs.yaml", "inventory.yaml"):
        shutil.copy(project.folder / name, folder)
    return replace(project, folder=folder)


async def detached(project: Project) -> None:
    """Start all three jobs and return when two of them have ended."""
    await project.apply(detach=True)
    while sum(run.status == "exited" for run in await statuses(project)) < 2:
        pass


async def statuses(project: Project) -> list[KnownRun]:
    return await api.status(project.folder, project.inventory, project=project.name, fleet=project.fleet)


async def test_status_logs_fetch_and_cancel_find_what_another_controller_started(
    project: Project, other: Project
) -> None:  # fmt: skip
    await detached(project)
    assert {run.job: run.status for run in await statuses(other)} == {
        "ends": "exited", "silent": "exited", "runs": "running",
    }  # fmt: skip
    shutil.rmtree(other.paths.root)
    here, inventory, fleet, name = other.folder, other.inventory, other.fleet, other.name
    said = [event async for event in api.logs(here, inventory, "ends", project=name, fleet=fleet)]
    assert output(said, "ends") == b"no newline"
    shutil.rmtree(other.paths.root)
    fetched = [event async for event in api.fetch(here, inventory, "ends", project=name, fleet=fleet)]
    assert [event.event for event in fetched] == ["fetched"]  # the log comes too, and is not shown
    (run,) = (run for run in other.runs() if run.startswith("ends"))
    assert other.local_log(run) == b"no newline"
    assert (other.paths.outputs(run) / "out").read_text() == "kept\n"
    shutil.rmtree(other.paths.root)
    assert summary(await other.cancel(None)) == (1, {"cancelled": 1})
    assert {run.job: run.status for run in await statuses(project)}["runs"] == "cancelled"
    with pytest.raises(UsageError, match="'nobody'"):
        await other.cancel(["nobody"])
    assert set(project.starts().values()) == {1}


async def test_attach_brings_everything_here_and_sums_it_up(project: Project, other: Project) -> None:
    await detached(project)
    release(project)
    events = await other.attach(await other.plan())
    assert summary(events) == (1, {"failed": 1, "succeeded": 2})
    assert words(events, "ends") == ["exited", "fetched"]
    # An end is told after what led to it.
    assert next(event.event for event in events if event.job == "ends") == "output"
    assert other.logs_are_equal()
    assert summary(await other.attach(await other.plan())) == (1, {"failed": 1, "up_to_date": 2})
    assert set(project.starts().values()) == {1}


async def test_what_may_be_on_a_silent_host_is_not_said_to_be_nowhere(project: Project, other: Project) -> None:
    project.hosts["run-two"].stop()
    try:
        with pytest.raises(HostError, match="know no run of 'ends'"):
            await other.cancel(["ends"])
    finally:
        project.hosts["run-two"].start()


async def test_the_earlier_run_of_a_changed_job_is_cancelled_with_it(project: Project) -> None:
    project.write({"a": {"command": gated(project.folder), "grace": "1s"}})
    await project.apply(detach=True)
    project.write({"a": {"command": f"true; {gated(project.folder)}", "grace": "1s"}})
    await project.apply(detach=True)
    assert summary(await project.cancel(["a"])) == (1, {"cancelled": 2})
    assert {run.status for run in await statuses(project)} == {"cancelled"}


async def test_a_host_that_is_down_is_told_once_and_not_waited_for(project: Project) -> None:
    project.write({"a": {"command": gated(project.folder), "where": {"hosts": ["run-three"]}}})
    await project.apply(detach=True)
    here, inventory, fleet = project.folder, project.inventory, project.fleet
    project.hosts["run-three"].stop()
    try:
        events = await project.cancel(["a"])
        assert [event.event for event in events] == ["unknown", "warning", "summary"]
        assert "\n" not in events[0].detail["reason"]
        assert summary(events) == (4, {"unknown": 1})
        for stream in (api.logs(here, inventory, "a", fleet=fleet), api.fetch(here, inventory, "a", fleet=fleet)):
            with pytest.raises(HostError, match="connect"):
                _ = [event async for event in stream]
    finally:
        project.hosts["run-three"].start()
    assert summary(await project.cancel(["a"])) == (1, {"cancelled": 1})


@pytest.mark.parametrize("way", ["left the inventory", "lost its records"])
async def test_a_run_of_which_no_host_tells_is_given_up_by_a_person_alone(project: Project, way: str) -> None:
    jobs = {"a": {"command": gated(project.folder)}, "b": {"command": STARTED}}
    project.write({name: job | {"where": {"hosts": ["run-three"]}} for name, job in jobs.items()})
    await project.apply(detach=True)
    while {run.job: run.status for run in await statuses(project)}["b"] != "exited":
        pass
    await project.apply(await project.plan(), detach=True)
    if way == "left the inventory":
        away = project.hosts.pop("run-three")
    else:
        away = project.hosts["run-three"]
        project.extra["run-three"] |= {"state_dir": str(project.folder / "another-state")}
    project.write(jobs)
    plan = await project.plan()
    assert {job.job: job.action for job in plan.jobs} == {"a": Action.FOLLOW, "b": Action.UP_TO_DATE}
    assert summary(await project.apply(plan)) == (4, {"unknown": 1, "up_to_date": 1})
    assert summary(await project.attach(plan)) == (4, {"unknown": 1, "up_to_date": 1})
    events = await project.cancel(["a"])
    assert [event.event for event in events] == ["lost", "warning", "summary"]
    assert events[0].detail["reason"] == "given_up"
    again = await project.plan()
    assert {job.job: job.action for job in again.jobs} == {"a": Action.FAILED, "b": Action.UP_TO_DATE}
    release(project)
    retried = await project.apply(await project.plan(retry_failed=True))
    assert summary(retried) == (0, {"succeeded": 1, "up_to_date": 1})
    project.hosts["run-three"] = away
    assert sorted(project.starts().values()) == [1, 1, 1]


async def test_what_another_controller_starts_while_it_waits_here_is_followed(project: Project, tmp_path: Path) -> None:
    """Both hosts are full when this one plans. Another controller starts the job on one; then the other comes free."""
    full = replace(project, folder=tmp_path / f"full-{project.name}", fleets=[])
    first = replace(
        project, folder=tmp_path / "first" / project.name, hosts={"run-one": project.hosts["run-one"]},
        extra={"run-one": {"max_jobs": 3}}, fleets=[],
    )  # fmt: skip
    for folder in (full.folder, first.folder):
        folder.mkdir(parents=True)
    gates = {name: full.folder / name for name in ("run-one", "run-two")}
    for gate in gates.values():
        gate.mkdir()
    full.write({
        f"{name}-{nth}": {"command": gated(gate), "where": {"hosts": [name]}}
        for name, gate in gates.items() for nth in range(2)
    })  # fmt: skip
    first.write({"a": {"command": gated(project.folder)}})
    project.write({"a": {"command": gated(project.folder), "where": {"hosts": list(gates)}}})
    await full.apply(detach=True)
    events: list[Event] = []
    async for event in api.apply(await project.plan(), project.jobs, project.inventory, fleet=project.fleet):
        events.append(event)
        if event.event == "queued":
            assert summary(await first.apply(detach=True)) == (0, {"running": 1})
            (gates["run-two"] / "gate").touch()
        elif event.event == "launched":
            release(project)
    assert summary(events) == (0, {"succeeded": 1})
    assert [(event.host, event.detail["new"]) for event in events if event.event == "launched"] == [("run-one", False)]
    assert set(project.starts().values()) == {1}
    assert project.logs_are_equal()
    (gates["run-one"] / "gate").touch()
    assert summary(await full.attach(None)) == (0, {"succeeded": 4})
    for other in (full, first):
        await other.close()
