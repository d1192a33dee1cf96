"""Gangs over real hosts, with torchrun of a real torch: together from launch to end, whoever looks on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpulayer.placement.plan import Action
from gpulayer.run import api
from gpulayer.run.afterwards import status_document
from gpulayer.run.events import Event
from gpulayer.run.store import Store
from tests.gangs.network import NetworkHost
from tests.gangs.programs import ALL_REDUCE, gated
from tests.run.project import Project, release, summary

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_cpu"
SCHEMAS = {
    name: jsonschema.Draft202012Validator(
        json.loads((Path(__file__).parents[2] / "schemas" / f"{name}.schema.json").read_text())
    )
    for name in ("event", "status", "plan")
}


def said(events: Sequence[Event]) -> dict[int, bytes]:
    """Return the output of each rank; its offsets must follow each other."""
    data: dict[tuple[str | None, int | None], bytes] = {}
    for event in events:
        if event.event == "output":
            log = event.run, event.detail["rank"]
            assert event.detail["offset"] == len(data.get(log, b""))
            data[log] = data.get(log, b"") + event.data
    return {rank: text for (_, rank), text in data.items() if rank is not None}


def sums(events: Sequence[Event]) -> dict[int, str]:
    """Return the last line of each rank: torch may have said something before."""
    return {rank: text.decode().splitlines()[-1] for rank, text in said(events).items()}


def end(events: Sequence[Event], job: str = "g") -> Event:
    """Return the last status of a gang as a whole."""
    return [event for event in events if event.job == job and event.detail.get("node", 0) is None][-1]


def logs_are_equal(project: Project) -> bool:
    """Tell whether each rank's log here is the host's, byte for byte."""
    with Store.open(project.folder) as store:
        parts = [part for run in store.runs(project.name) for part in run.members]
    return all(
        project.paths.log(part.run, rank.rank).read_bytes() == path.read_bytes()
        for part in parts
        for rank in part.ranks
        for path in project.hosts[part.host].home.rglob(f"runs/{part.run}/rank-{rank.rank}.log")
    )


async def watched(
    project: Project, seen: Callable[[list[Event]], None] = lambda _: None, **options: Any
) -> list[Event]:  # fmt: skip
    """Plan, carry out, and let `seen` look at all events after each one."""
    events: list[Event] = []
    stream = api.apply(await project.plan(), project.jobs, project.inventory, fleet=project.fleet, **options)
    async with aclosing(stream):
        async for event in stream:
            events.append(event)
            seen(events)
    return events


def once_all_run(act: Callable[[], object], ranks: int) -> Callable[[list[Event]], None]:
    """Return a watcher that acts once, as soon as so many ranks have said that they are there."""
    done: list[object] = []

    def look(events: list[Event]) -> None:
        if not done and events[-1].event == "output" and len(said(events)) == ranks:
            done.append(act())

    return look


async def test_an_all_reduce_over_four_hosts_gives_the_sum(project: Project) -> None:
    project.write({"g": {"command": ["python", "-c", ALL_REDUCE], "framework": "torch", "distributed": {"nodes": 4},
                         "outputs": ["*.txt", "rank0.txt", "none"]}})  # fmt: skip
    plan = await project.plan()
    assert [place.host for place in plan.jobs[0].placements] == list(project.hosts)
    events = await project.apply(plan)
    assert summary(events) == (0, {"succeeded": 1})
    assert sums(events) == dict.fromkeys(range(4), "sum 10 of 4")
    assert [event.event for event in events if event.detail.get("node", 0) is None] == [
        "queued", "launching", "running", "exited",
    ]  # fmt: skip
    warnings = [event.detail["message"] for event in events if event.event == "warning"]
    assert warnings == ["nothing matches 'none' of its `outputs`"]  # rank0.txt is on one host only, which is enough
    assert logs_are_equal(project)
    (run,) = project.runs()
    alpha = project.hosts["alpha"]
    way = f"{alpha.host.address} {'eth0' if isinstance(alpha, NetworkHost) else 'lo'}"
    for node in range(4):
        assert (project.paths.outputs(f"{run}-n{node}") / f"rank{node}.txt").read_text() == way
    for event in events:
        SCHEMAS["event"].validate(event.to_json())
    document = status_document(await project.status())
    SCHEMAS["status"].validate(document)
    assert [rank["code"] for node in document["runs"][0]["nodes"] for rank in node["ranks"]] == [0] * 4
    assert {job.action for job in (await project.plan()).jobs} == {Action.UP_TO_DATE}


@pytest.mark.parametrize(("fail", "word", "number"), [("3:7", "exited", 7), ("1:KILL", "signaled", 9)])
async def test_a_rank_that_fails_ends_the_gang_as_it_ended(
    project: Project, fail: str, word: str, number: int
) -> None:  # fmt: skip
    project.write({"g": gated(project.folder, real=True, processes=2, fail=fail)})
    events = await watched(project, once_all_run((project.folder / "gate.fail").touch, 4))
    assert summary(events) == (1, {"failed": 1})
    rank = int(fail[0])
    host = list(project.hosts)[rank // 2]
    last = end(events)
    assert (last.event, last.detail["signal" if word == "signaled" else "code"]) == (word, number)
    assert (last.detail["first_failure"]["rank"], last.detail["first_failure"]["host"]) == (rank, host)
    ends = {entry["rank"]: entry for entry in last.detail["ranks"]}
    assert ends[rank]["status"] == word
    for other in ends.keys() - {rank}:
        assert (ends[other]["status"], ends[other]["reason"]) == (
            "cancelled", f"stopped because rank {rank} on {host} failed",
        )  # fmt: skip
    assert logs_are_equal(project)


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", text, re.MULTILINE)]


async def test_the_example_trains_alone_as_by_two_ranks_of_one_host(project: Project) -> None:
    """One command, and the gradients' mean over equal parts of the data is the whole's."""
    env = {"STEPS": "100"}
    project.write({"g": {"command": ["python", "train.py"], "workdir": str(EXAMPLE), "framework": "torch", "env": env,
                         "distributed": {"nodes": 1, "processes_per_node": 2}, "outputs": ["weights.pt"]}})  # fmt: skip
    together = asyncio.create_task(project.apply())
    alone = await asyncio.to_thread(
        subprocess.run, [sys.executable, str(EXAMPLE / "train.py")], check=True, capture_output=True, text=True,
        cwd=project.folder, env=os.environ | env,
    )  # fmt: skip
    events = await together
    assert summary(events) == (0, {"succeeded": 1})
    fallen = losses(said(events)[0].decode())
    assert fallen[-1] < fallen[0] / 5
    assert fallen == pytest.approx(losses(alone.stdout), rel=0.01)
    assert losses(said(events)[1].decode()) == []
    (run,) = project.runs()
    assert (project.paths.outputs(f"{run}-n0") / "weights.pt").stat().st_size > 1000


async def test_a_time_limit_ends_all_of_a_gang(project: Project) -> None:
    project.write({"g": gated(project.folder, timeout="3s", grace="1s")})
    events = await project.apply()
    assert summary(events) == (1, {"failed": 1})
    last = end(events)
    assert last.event == "timed_out"
    assert {entry["status"] for entry in last.detail["ranks"]} == {"timed_out"}


async def test_a_cancel_from_elsewhere_ends_all_of_a_gang(project: Project) -> None:
    project.write({"g": gated(project.folder)})
    cancels: list[asyncio.Task[list[Event]]] = []
    look = once_all_run(lambda: cancels.append(asyncio.create_task(project.cancel(["g"], grace=1.0))), 2)
    events = await watched(project, look)
    assert summary(events) == (1, {"cancelled": 1})
    assert {entry["status"] for entry in end(events).detail["ranks"]} == {"cancelled"}
    assert summary(await cancels[0]) == (1, {"cancelled": 1})


async def test_who_left_and_who_comes_later_find_the_gang_again(project: Project, tmp_path: Path) -> None:
    project.write({"g": gated(project.folder)})
    plan = await project.plan()
    stream = api.apply(plan, project.jobs, project.inventory, fleet=project.fleet)
    seen: list[Event] = []
    async with aclosing(stream):
        async for event in stream:
            seen.append(event)
            if event.event == "output" and len(said(seen)) == 2:
                break
    elsewhere = tmp_path / "another-machine" / project.name
    elsewhere.mkdir(parents=True)
    for name in ("jobs.yaml", "inventory.yaml"):
        (elsewhere / name).write_text((project.folder / name).read_text())
    other = Project(folder=elsewhere, hosts=project.hosts, options=project.options, extra=project.extra)
    (found,) = (await other.plan()).jobs
    assert (found.action, len(found.placements)) == (Action.FOLLOW, 2)
    (run,) = await project.status()
    assert (run.status, [rank.status for part in run.members for rank in part.ranks]) == ("running", ["running"] * 2)
    release(project)
    assert summary(await other.attach(None)) == (0, {"succeeded": 1})
    assert summary(await project.attach(plan)) == (0, {"succeeded": 1})
    assert logs_are_equal(project)
    assert logs_are_equal(other)
    one = [event async for event in api.logs(other.folder, other.inventory, "g", rank=1, fleet=other.fleet)]
    assert said(one) == {1: b"rank 1 of 2\ndone\n"}
    await other.close()
    assert sum(starts(project).values()) == 2


def starts(project: Project) -> dict[str, int]:
    """Return how often each node's run was started, as the hosts' journals say; each rank journals once."""
    with Store.open(project.folder) as store:
        gangs = {run.run for run in store.runs(project.name)}
    found: dict[str, int] = {}
    for host in project.hosts.values():
        for line in (host.home / "journal").read_text().split() if (host.home / "journal").exists() else ():
            if re.sub(r"-n\d+$", "", line) in gangs:
                found[line] = found.get(line, 0) + 1
    return found


@pytest.mark.parametrize("count", [1, 2])
async def test_a_controller_that_dies_between_launches_leaves_nothing_that_runs_twice(
    project: Project, count: int
) -> None:  # fmt: skip
    """After the first node is held nothing has begun; after the second the gang goes on without its controller."""
    project.write({"g": gated(project.folder)})
    release(project)
    with project.controller("apply", GL_FAIL=f"part-held:kill:{count}") as controller:
        controller.communicate()
    assert controller.returncode == -signal.SIGKILL
    events = await project.apply()
    assert summary(events)[0] == 0
    assert sorted(starts(project).values()) == [1, 1]


async def test_two_controllers_that_launch_one_gang_start_it_once(project: Project, tmp_path: Path) -> None:
    """Neither knows of the other, and both have planned the same."""
    project.write({"g": gated(project.folder)})
    release(project)
    folder = tmp_path / "another-machine" / project.name
    folder.mkdir(parents=True)
    for name in ("jobs.yaml", "inventory.yaml"):
        (folder / name).write_text((project.folder / name).read_text())
    other = Project(folder=folder, hosts=project.hosts, options=project.options, extra=project.extra)
    plans = [await one.plan() for one in (project, other)]
    ends = await asyncio.gather(*(one.apply(plan) for one, plan in zip((project, other), plans, strict=True)))
    await other.close()
    assert [summary(events)[0] for events in ends] == [0, 0]
    assert sorted(starts(project).values()) == [1, 1]
    assert logs_are_equal(project)
    assert logs_are_equal(other)


async def test_a_gang_that_another_controller_starts_while_it_waits_here_is_followed(
    project: Project, tmp_path: Path
) -> None:
    """All hosts are full. Another controller starts the gang on two of them; then the other two come free."""
    names = list(project.hosts)
    project.extra = {name: {"max_jobs": 1} for name in names}
    full = replace(project, folder=tmp_path / f"{project.name}-full", fleets=[])
    first = replace(
        project, folder=tmp_path / "first" / project.name, hosts={name: project.hosts[name] for name in names[:2]},
        extra={name: {"max_jobs": 3} for name in names}, fleets=[],
    )  # fmt: skip
    for folder in (full.folder, first.folder):
        folder.mkdir(parents=True)
    waits = "until test -e {}; do sleep 0.05; done"
    full.write({
        name: {"command": waits.format(full.folder / f"gate-{name in names[:2]}"), "where": {"hosts": [name]}}
        for name in names
    })  # fmt: skip
    for one in (first, project):
        one.write({"g": gated(project.folder)})
    await full.apply(detach=True)

    started: list[asyncio.Task[None]] = []

    async def start() -> None:
        assert summary(await first.apply(detach=True)) == (0, {"running": 1})
        (full.folder / "gate-False").touch()

    def look(events: list[Event]) -> None:
        if events[-1].event == "queued" and not started:
            started.append(asyncio.create_task(start()))
        elif events[-1].event == "launched":
            release(project)

    events = await watched(project, look)
    await started[0]
    assert summary(events) == (0, {"succeeded": 1})
    (launched,) = [event for event in events if event.event == "launched"]
    assert (launched.detail["hosts"], launched.detail["new"]) == (names[:2], False)
    assert sorted(starts(project).values()) == [1, 1]
    assert logs_are_equal(project)
    (full.folder / "gate-True").touch()
    assert summary(await full.attach(None))[0] == 0
    for other in (full, first):
        await other.close()


async def test_two_gangs_that_want_the_same_hosts_come_one_after_the_other(project: Project, tmp_path: Path) -> None:
    """Two controllers, neither of which knows of the other, and one slot on each host."""
    for name in project.hosts:
        project.extra[name] = {"max_jobs": 1}
    folder = tmp_path / f"{project.name}-other"
    folder.mkdir()
    other = Project(folder=folder, hosts=project.hosts, options=project.options, extra=project.extra)
    where = {"hosts": ["alpha", "beta"]}
    for one in (project, other):
        one.write({"g": gated(one.folder, where=where)})
        release(one)
    plans = [await one.plan() for one in (project, other)]
    ends = await asyncio.gather(*(one.apply(plan) for one, plan in zip((project, other), plans, strict=True)))
    await other.close()
    assert [summary(events) for events in ends] == [(0, {"succeeded": 1})] * 2
    assert sorted([*starts(project).values(), *starts(other).values()]) == [1] * 4
