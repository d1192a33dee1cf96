"""What outlives a controller, and how another one goes on: kill -9, detach, cut links, cancel from elsewhere."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gpulayer.errors import StalePlanError, UsageError
from gpulayer.fleet.session import Fleet
from gpulayer.placement.plan import Action
from gpulayer.run import api, executor
from gpulayer.run.events import Event
from gpulayer.run.store import Store
from tests.run.project import STARTED, Project, gated, output, release, summary, words


async def test_kill_9_of_the_controller_then_attach(project: Project) -> None:
    project.write({f"job-{n}": {"command": gated(project.folder)} for n in range(9)})  # six slots, three wait
    with project.controller("apply") as controller:
        assert controller.stdout is not None
        streaming: set[str] = set()
        for line in controller.stdout:
            event = json.loads(line)
            if event["event"] == "output":
                streaming.add(event["job"])
            if len(streaming) == 6:
                break
        controller.send_signal(signal.SIGKILL)
    assert len(project.starts()) == 6
    plan = await project.plan()
    before = {run: path.stat().st_size for run in project.runs() if (path := project.paths.log(run)).exists()}
    assert len(before) == 6
    release(project)
    events = await project.attach(plan)
    assert summary(events) == (0, {"succeeded": 9})
    assert set(project.starts().values()) == {1}
    assert len(project.starts()) == 9
    assert project.logs_are_equal()
    first = {event.run: event.detail["offset"] for event in reversed(events) if event.event == "output"}
    assert {run: first[run] for run in before} == before  # no gap, no doubling


async def leave_when(project: Project, word: str, count: int) -> list[Event]:
    """Apply, and leave as Ctrl-C does as soon as `word` has happened to `count` jobs."""
    seen: list[Event] = []
    events = api.apply(await project.plan(), project.jobs, project.inventory, fleet=project.fleet)
    async with aclosing(events):
        async for event in events:
            seen.append(event)
            if len({event.job for event in seen if event.event == word}) == count:
                break
    return seen


async def test_leaving_detaches_and_attach_goes_on_with_the_queue(project: Project) -> None:
    project.write({f"job-{n}": {"command": gated(project.folder)} for n in range(8)})
    plan = await project.plan()
    await leave_when(project, "output", 6)
    statuses = {run.job: run.status for run in await project.status()}
    assert sorted(statuses.values()) == ["queued"] * 2 + ["running"] * 6
    waiting = next(job for job, status in statuses.items() if status == "queued")
    for follow in (False, True):
        stream = api.logs(project.folder, project.inventory, waiting, follow=follow, fleet=project.fleet)
        warning, status = [event async for event in stream]
        assert "waits in the queue and was not started" in warning.detail["message"]
        assert "`gpulayer attach` goes on with the queue" in warning.detail["fix"]
        assert (warning.job, status.job, status.event) == (waiting, waiting, "queued")
    release(project)
    assert summary(await project.attach(plan)) == (0, {"succeeded": 8})
    assert set(project.starts().values()) == {1}
    assert project.logs_are_equal()


async def test_attach_leaves_the_queue_of_a_stale_plan_alone(project: Project) -> None:
    project.write({f"job-{n}": {"command": gated(project.folder)} for n in range(8)})
    plan = await project.plan()
    await leave_when(project, "output", 6)
    project.write({f"job-{n}": {"command": gated(project.folder), "timeout": "1h"} for n in range(8)})
    release(project)
    seen = []
    with pytest.raises(StalePlanError, match=r"jobs\.yaml: was changed"):  # noqa: PT012
        async for event in api.attach(project.jobs, project.inventory, plan, fleet=project.fleet):
            seen.append(event)  # noqa: PERF401
    assert summary(seen) == (0, {"succeeded": 6})
    assert len(project.starts()) == 6


async def test_detach_returns_when_all_that_can_start_are_launched(project: Project) -> None:
    project.write({f"job-{n}": {"command": gated(project.folder), "outputs": ["*"]} for n in range(7)})
    plan = await project.plan()
    assert summary(await project.apply(plan, detach=True)) == (0, {"running": 6, "queued": 1})
    release(project)
    events = await project.attach(plan)
    assert summary(events) == (0, {"succeeded": 7})
    assert project.logs_are_equal()
    assert len([event for event in events if event.event == "fetched"]) == 7


async def test_a_detached_run_that_has_ended_is_caught_up_with(project: Project) -> None:
    project.write({"a": {"command": f"{STARTED}; echo hello > out; echo said", "outputs": ["out"]}})
    plan = await project.plan()
    await project.apply(plan, detach=True)
    (run,) = project.runs()
    while (again := await project.plan()).jobs[0].action is not Action.UP_TO_DATE:
        assert again.jobs[0].action is Action.FOLLOW
    events = await project.apply(again)
    assert summary(events) == (0, {"up_to_date": 1})
    assert output(events, "a") == b"said\n"
    assert (project.paths.outputs(run) / "out").read_text() == "hello\n"
    assert "fetched" not in words(await project.apply(again), "a")


async def test_a_cut_link_is_mended_and_nothing_is_lost(project: Project) -> None:
    project.write({f"job-{n}": {"command": gated(project.folder), "where": {"hosts": ["run-one"]}} for n in range(2)})
    seen: list[Event] = []
    cut = False
    async for event in api.apply(await project.plan(), project.jobs, project.inventory, fleet=project.fleet):
        seen.append(event)
        if not cut and len({event.job for event in seen if event.event == "output"}) == 2:
            project.hosts["run-one"].cut()
            cut = True
        if event.event == "link_back":
            release(project)
    assert summary(seen) == (0, {"succeeded": 2})
    assert [event.event for event in seen if event.host == "run-one"].count("link_lost") == 1
    assert [event.event for event in seen if event.host == "run-one"].count("link_back") == 1
    assert project.logs_are_equal()
    assert set(project.starts().values()) == {1}


async def test_a_host_that_stays_away_leaves_its_runs_unknown(project: Project) -> None:
    project.write({"away": {"command": gated(project.folder), "where": {"hosts": ["run-three"]}},
                   "here": {"command": STARTED, "where": {"hosts": ["run-one"]}}})  # fmt: skip
    plan, seen, host = await project.plan(), [], project.hosts["run-three"]
    try:
        async for event in api.apply(plan, project.jobs, project.inventory, fleet=project.fleet, patience=0.5):
            seen.append(event)
            if event.event == "output" and host.process is not None:
                host.stop()
        assert summary(seen) == (4, {"succeeded": 1, "unknown": 1})
        runs = await project.status()
        assert {run.job: run.status for run in runs} == {"away": "unknown", "here": "exited"}
        # What cannot be known is never run elsewhere, whatever the plan says.
        project.write({"away": {"command": gated(project.folder)}})
        again = await project.plan()
        assert again.jobs[0].action == "follow"
        assert summary(await project.apply(again))[0] == 4
    finally:
        host.start()
    release(project)
    assert summary(await project.apply(await project.plan()))[0] == 0
    assert set(project.starts().values()) == {1}


async def test_cancel_from_elsewhere_ends_what_runs_and_drops_what_waits(project: Project) -> None:
    project.write({f"job-{n}": {"command": gated(project.folder)} for n in range(8)}, grace="1s")
    with project.controller("apply") as controller:
        assert controller.stdout is not None
        lines, streaming = [], set()
        for line in controller.stdout:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "output":
                streaming.add(lines[-1]["job"])
            if len(streaming) == 6:
                break
        events = await project.cancel(None)
        assert summary(events) == (1, {"cancelled": 8})
        lines += [json.loads(line) for line in controller.stdout]
    assert lines[-1]["counts"] == {"cancelled": 8}
    assert lines[-1]["exit_code"] == 1
    assert len(project.starts()) == 6
    assert project.logs_are_equal() or len(project.runs()) == 8


async def cancel_out_of_reach(project: Project) -> None:
    """Launch a job that ends by itself only when the gate opens, and cancel it while its host does not answer."""
    project.write({"away": {"command": gated(project.folder), "where": {"hosts": ["run-three"]}}}, grace="1s")
    assert summary(await project.apply(detach=True)) == (0, {"running": 1})
    host = project.hosts["run-three"]
    host.stop()
    try:
        events = await project.cancel(None)
        assert summary(events) == (4, {"unknown": 1})
        said = [event.detail["message"] for event in events if event.event == "warning"]
        assert "its cancel is kept, and sent when the host answers next" in said
        (run,) = await project.status()
        assert run.status == "unknown"
        assert run.reason is not None
        assert run.reason.endswith("; its cancel is kept, and sent when the host answers next")
    finally:
        host.start()


async def test_a_cancel_out_of_reach_is_sent_by_attach(project: Project) -> None:
    await cancel_out_of_reach(project)
    events = await project.attach(await project.plan())
    assert summary(events) == (1, {"cancelled": 1})
    assert "its cancel, which was kept while the host did not answer, was sent now" in [
        event.detail["message"] for event in events if event.event == "warning"
    ]
    with Store.open(project.folder) as store:
        assert store.kept_cancels() == []


async def test_a_cancel_out_of_reach_is_sent_by_status(project: Project) -> None:
    await cancel_out_of_reach(project)
    (run,) = await project.status()
    assert (run.status, run.reason) == (
        "running", "its cancel, which was kept while the host did not answer, was sent now",
    ) or run.status in {"stopping", "cancelled"}  # fmt: skip
    while run.status != "cancelled":
        (run,) = await project.status()


async def test_a_cancel_out_of_reach_is_sent_by_an_apply_of_other_jobs(project: Project) -> None:
    await cancel_out_of_reach(project)
    project.write({"another": {"command": STARTED, "where": {"hosts": ["run-one"]}}})
    assert summary(await project.apply()) == (0, {"succeeded": 1})
    with Store.open(project.folder) as store:
        assert store.kept_cancels() == []
    runs = await project.status()
    while "cancelled" not in {run.status for run in runs}:
        runs = await project.status()


async def test_a_cancel_out_of_reach_is_sent_by_whoever_follows_when_the_link_is_back(project: Project) -> None:
    project.write({"away": {"command": gated(project.folder), "where": {"hosts": ["run-three"]}}}, grace="1s")
    host, seen = project.hosts["run-three"], []
    try:
        async for event in api.apply(await project.plan(), project.jobs, project.inventory, fleet=project.fleet):
            seen.append(event)
            if event.event == "output" and host.process is not None:
                host.stop()
            if event.event == "link_lost":
                async with Fleet(project.inventory, project.options) as elsewhere:
                    events = [one async for one in api.cancel(project.folder, project.inventory, None, fleet=elsewhere)]
                assert summary(events) == (4, {"unknown": 1})
                host.start()
        assert summary(seen) == (1, {"cancelled": 1})
    finally:
        if host.process is None:
            host.start()


async def test_one_apply_at_a_time(project: Project) -> None:
    project.write({"a": {"command": gated(project.folder)}})
    plan = await project.plan()
    events = api.apply(plan, project.jobs, project.inventory, fleet=project.fleet)
    async with aclosing(events):
        async for event in events:
            if event.event == "output":
                break
        with pytest.raises(UsageError, match="attach"):
            await project.apply(plan)
        seen = []
        async for event in api.attach(project.jobs, project.inventory, plan, fleet=project.fleet):
            seen.append(event)
            release(project)
        assert summary(seen) == (0, {"succeeded": 1})


async def test_logs_and_fetch_after_the_fact(project: Project) -> None:
    waits = f"until test -e {project.folder}/gate; do sleep 0.02; done"
    project.write({"a": {"command": f"{STARTED}; echo one > x.txt; echo said; {waits}",
                         "outputs": ["*.txt", "none/**"]}})  # fmt: skip
    await leave_when(project, "output", 1)
    here, inventory, fleet = project.folder, project.inventory, project.fleet
    assert output([event async for event in api.logs(here, inventory, "a", fleet=fleet)], "a") == b"said\n"
    (run,) = project.runs()
    fetched = [event async for event in api.fetch(here, inventory, "a", fleet=fleet)]
    assert [event.event for event in fetched] == ["fetched", "warning"]
    assert fetched[0].detail["unmatched"] == ["none/**"]
    assert (fetched[1].job, fetched[1].detail["message"]) == ("a", "nothing yet matches 'none/**' of its `outputs`")
    assert (project.paths.outputs(run) / "x.txt").read_text() == "one\n"
    release(project)
    followed = [event async for event in api.logs(here, inventory, "a", follow=True, fleet=fleet)]
    assert output(followed, "a") == b"said\n"
    assert words(followed, "a")[-1] == "exited"
    told = [event.detail["message"] for event in followed if event.event == "warning"]
    assert told == ["nothing matches 'none/**' of its `outputs`"]
    with pytest.raises(UsageError, match="nobody"):
        await anext(api.logs(here, inventory, "nobody", fleet=fleet))


async def test_a_log_that_was_replaced_comes_anew(project: Project) -> None:
    project.write({"a": {"command": gated(project.folder)}})
    await leave_when(project, "output", 1)
    (run,) = project.runs()
    path = project.paths.log(run)
    path.write_bytes(b"somebody else's words\n")
    release(project)
    events = await project.attach(None)
    assert "log_replaced" in words(events, "a")
    assert project.logs_are_equal()
    assert [old.read_bytes() for old in path.parent.glob("*.replaced-*")] == [b"somebody else's words\n"]


async def test_devices_of_others_are_waited_for(project: Project, tmp_path: Path) -> None:
    project.write({f"job-{n}": {"command": gated(project.folder), "where": {"hosts": ["run-one"]}} for n in range(2)})
    await leave_when(project, "output", 2)
    other = Project(
        folder=tmp_path / f"{project.name}-other", hosts=project.hosts, options=project.options, extra=project.extra
    )
    other.folder.mkdir()
    other.write({"late": {"command": STARTED, "where": {"hosts": ["run-one"]}}})
    seen = []
    async for event in api.apply(await other.plan(), other.jobs, other.inventory, fleet=other.fleet):
        seen.append(event)
        if event.event == "queued":
            release(project)
    assert summary(seen) == (0, {"succeeded": 1})
    assert words(seen, "late")[0] == "queued"
    with Store.open(other.folder) as store:
        assert [run.status for run in store.runs()] == ["exited"]
    await other.close()


async def test_a_queue_that_moves_asks_soon_again_about_devices_of_others(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(gate: str) -> dict[str, object]:
        return {"command": f"{STARTED}; echo here; until test -e {tmp_path}/{gate}; do sleep 0.02; done",
                "where": {"hosts": ["run-one"]}}  # fmt: skip

    asked: list[int] = []

    class Polls(tuple[float, ...]):
        __slots__ = ()

        def __getitem__(self, index: Any) -> Any:
            asked.append(index)
            if index == 1:  # it has become more seldom: one device of the others' gets free
                (tmp_path / "first").touch()
            if asked.count(0) == 2:  # a job has started there: the other device is asked about soon again
                (tmp_path / "last").touch()
            return 0.05

    project.write({"one": waits("first"), "two": waits("last")})
    await leave_when(project, "output", 2)
    monkeypatch.setattr(executor, "TICK", 0.02)
    monkeypatch.setattr(executor, "POLLS", Polls((0.05,) * 100))
    other = Project(
        folder=tmp_path / f"{project.name}-other", hosts=project.hosts, options=project.options, extra=project.extra
    )
    other.folder.mkdir()
    other.write({"early": waits("last"), "late": waits("last")})
    async with asyncio.timeout(30):
        assert summary(await other.apply()) == (0, {"succeeded": 2})
    assert asked.count(0) >= 2
    await other.close()


@pytest.mark.parametrize("word", ["launching", "launched"])
async def test_kill_9_around_a_launch_starts_each_job_once(project: Project, word: str) -> None:
    """Between intent and send, before the answer, after it: wherever the kill falls, the host settles it."""
    project.write({f"job-{n}": {"command": f"{STARTED}; echo {n}"} for n in range(4)})
    plan = await project.plan()
    with project.controller("apply") as controller:
        assert controller.stdout is not None
        for line in controller.stdout:
            if json.loads(line)["event"] == word:
                controller.send_signal(signal.SIGKILL)
                break
    assert summary(await project.attach(plan)) == (0, {"succeeded": 4})
    assert set(project.starts().values()) == {1}
    assert len(project.starts()) == 4
    assert project.logs_are_equal()


async def test_the_queue_goes_on_elsewhere_when_a_host_stays_away(project: Project) -> None:
    project.extra = {name: {"max_jobs": 1} for name in project.hosts}
    del project.hosts["run-two"]
    waits = f"{STARTED}; echo here; until test -e {project.folder}/%s; do sleep 0.02; done"
    project.write({"away": {"command": waits % "never", "where": {"hosts": ["run-three"]}, "timeout": "1m"},
                   "first": {"command": waits % "gate", "where": {"hosts": ["run-one"]}},
                   "second": {"command": STARTED}, "third": {"command": STARTED}})  # fmt: skip
    seen: list[Event] = []
    host = project.hosts["run-three"]
    plan = await project.plan()
    try:
        async for event in api.apply(plan, project.jobs, project.inventory, fleet=project.fleet, patience=0.3):
            seen.append(event)
            if len({event.job for event in seen if event.event == "output"}) == 2 and host.process is not None:
                host.stop()
            if event.event == "unknown":
                release(project)
    finally:
        host.start()
    assert summary(seen) == (4, {"succeeded": 3, "unknown": 1})
    assert {event.host for event in seen if event.event == "exited"} == {"run-one"}
    assert summary(await project.cancel(["away"], grace=1.0)) == (1, {"cancelled": 1})


async def test_a_job_of_one_of_two_names_for_a_machine(project: Project) -> None:
    """Two names of one state folder are one host; two folders of one machine share its slots."""
    one = project.hosts["run-one"]
    project.hosts = {"run-one": one, "same": one, "sibling": one}
    project.extra = {name: {"max_jobs": 2} for name in project.hosts}
    project.extra["sibling"]["state_dir"] = "~/another"
    project.write({f"job-{n}": {"command": STARTED} for n in range(4)})
    views = {answer.view.host.name: answer.view for answer in await api.probe(project.inventory, fleet=project.fleet)}
    assert {name: view.reached for name, view in views.items()} == {"run-one": True, "same": False, "sibling": True}
    assert "run-one" in (views["same"].error or "")
    assert views["run-one"].domain == views["sibling"].domain
    plan = await project.plan()
    assert [job.action for job in plan.jobs].count(Action.QUEUE) == 2
    assert summary(await project.apply(plan)) == (0, {"succeeded": 4})
