"""A simulated Mac, a simulated CUDA host and a CPU host, each behind a real sshd: one plan, one apply.

What the probe sees of the machines is simulated; nothing here is evidence for hardware.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpulayer.errors import StalePlanError
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.placement.plan import Action, Code
from gpulayer.remote.leases import Leases
from gpulayer.run import api, executor
from gpulayer.run.survey import fleet_document
from tests.machines import H200_IDS, MAC_TORCH, simulated_cuda_host, simulated_mac, write_torch
from tests.run.project import STARTED, Project, output, summary
from tests.sshd import SshdHost

TOLD = 'echo "$GPULAYER_ACCELERATOR|$GPULAYER_DEVICES|${CUDA_VISIBLE_DEVICES-unset}|$GPULAYER_HOST"'


@pytest.fixture(scope="session")
def machines(
    sshd_host: Callable[..., SshdHost], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, SshdHost]:  # fmt: skip
    """Three hosts; the inventory names the interpreters that simulate two of them."""
    folder = tmp_path_factory.mktemp("machines")
    return {
        "sim-mac": sshd_host("sim-mac", python=str(simulated_mac(folder / "mac").python)),
        "sim-cuda": sshd_host("sim-cuda", python=str(simulated_cuda_host(folder / "cuda").python)),
        "sim-cpu": sshd_host("sim-cpu"),
    }


@pytest.fixture
async def mixed(
    tmp_path: Path, machines: dict[str, SshdHost], connect_options: ConnectOptions
) -> AsyncIterator[Project]:  # fmt: skip
    folder = tmp_path / f"mixed-{tmp_path.name.strip('_').replace('_', '-')}"[:60]
    folder.mkdir()
    project = Project(folder=folder, hosts=machines, options=connect_options, extra={})
    yield project
    await project.close()


async def test_the_right_job_runs_on_each_machine(mixed: Project) -> None:
    command = {"command": f"{STARTED}; {TOLD}"}
    mixed.write({
        "apple": command | {"accelerator": "mps", "framework": "torch"},
        "nvidia": command | {"accelerator": "cuda", "framework": "torch", "resources": {"gpu_memory_gb": 100}},
        "both": command | {"accelerator": "cuda", "resources": {"gpus": 2}},
        "plain": command | {"accelerator": "cpu", "where": {"hosts": ["sim-cpu"]}},
        "either": command | {"accelerator": ["cuda", "mps", "cpu"]},
    })  # fmt: skip
    plan = await mixed.plan()
    placed = {job.job: job.placements[0].host for job in plan.jobs if job.placements}
    assert placed["apple"] == "sim-mac"
    assert placed["nvidia"] == "sim-cuda"
    events = await mixed.apply(plan)
    assert summary(events) == (0, {"succeeded": 5})
    assert output(events, "apple") == b"mps|apple:0|unset|sim-mac\n"
    accelerator, devices, visible, host = output(events, "nvidia").decode().strip().split("|")
    assert (accelerator, host) == ("cuda", "sim-cuda")
    assert devices == visible
    assert devices in H200_IDS
    assert output(events, "both").decode() == f"cuda|{','.join(H200_IDS)}|{','.join(H200_IDS)}|sim-cuda\n"
    assert output(events, "plain") == b"cpu|||sim-cpu\n"
    assert output(events, "either").startswith(b"cuda|")
    assert set(mixed.starts().values()) == {1}


async def test_a_cuda_job_never_goes_to_a_mac(mixed: Project) -> None:
    mixed.write({"a": {"command": STARTED, "accelerator": "cuda", "where": {"hosts": ["sim-mac"]}},
                 "b": {"command": STARTED, "accelerator": "mps", "resources": {"dtypes": ["float64"]}}})  # fmt: skip
    plan = await mixed.plan()
    assert {job.action for job in plan.jobs} == {Action.REFUSE}
    assert summary(await mixed.apply(plan, partial=True)) == (3, {"refused": 2})
    assert mixed.runs() == {}


async def test_each_job_is_judged_in_the_interpreter_that_it_will_run_on(mixed: Project, tmp_path: Path) -> None:
    """The inventory's interpreter of the Mac has torch, that of the CPU host is asked for what it has."""
    bare = str(simulated_mac(tmp_path / "bare", torch=None).python)
    newer = str(simulated_mac(tmp_path / "newer", torch={**MAC_TORCH, "version": "3.0"}).python)
    told = {"command": ["python", "-c", "import torch; print(torch.__version__)"], "where": {"hosts": ["sim-mac"]}}
    torch = told | {"accelerator": "mps", "framework": "torch"}
    mixed.write({
        "the-hosts": torch,
        "without": torch | {"python": bare},
        "newer": torch | {"python": newer},
        "missing": torch | {"python": "/no/such/python"},
        "no-demand": {"command": "true", "python": bare, "accelerator": "mps", "where": told["where"]},
    })  # fmt: skip
    plan = await mixed.plan()
    actions = {job.job: job.action for job in plan.jobs}
    assert actions.pop("without") is actions.pop("missing") is Action.REFUSE
    assert set(actions.values()) == {Action.RUN, Action.QUEUE}
    reasons = {
        job.job: {entry.refusal.code for entry in plan.shapes[job.shape].refusals if entry.hosts == ("sim-mac",)}
        for job in plan.jobs
    }
    assert reasons["without"] == {Code.CAPABILITY}
    assert reasons["missing"] == {Code.UNKNOWN}
    events = await mixed.apply(plan, partial=True)
    assert summary(events) == (3, {"succeeded": 3, "refused": 2})
    assert (output(events, "the-hosts"), output(events, "newer")) == (b"2.14.1\n", b"3.0\n")


async def test_a_plan_is_stale_when_a_jobs_own_interpreter_has_changed(mixed: Project, tmp_path: Path) -> None:
    own = simulated_mac(tmp_path / "own")
    mixed.write({"a": {"command": "true", "accelerator": "mps", "framework": "torch", "python": str(own.python)}})
    plan = await mixed.plan()
    write_torch(own.folder / "site", {**MAC_TORCH, "version": "3.0"})
    (own.folder / "site" / "torch-3.0.dist-info").mkdir()  # as an installer does: it tells the cache
    await mixed.close()
    mixed.fleets.clear()  # over one connection a probe holds for some seconds
    with pytest.raises(StalePlanError, match=r"torch of .*/own/bin/python3 was 2\.14\.1, is 3\.0"):
        await mixed.apply(plan)


async def test_saved_facts_say_nothing_of_an_interpreter_that_was_not_asked(mixed: Project, tmp_path: Path) -> None:
    own = str(simulated_mac(tmp_path / "own").python)
    mixed.write({"a": {"command": "true", "accelerator": "mps", "framework": "torch", "python": own}})
    saved = fleet_document(await api.probe(mixed.inventory, ["sim-mac"], fleet=mixed.fleet))
    (verdict,) = (await api.plan_against(mixed.jobs, None, saved)).shapes.values()
    assert {(entry.refusal.code, entry.refusal.about) for entry in verdict.refusals} == {
        (Code.UNKNOWN, Code.CAPABILITY)
    }
    saved = fleet_document(await api.probe(mixed.inventory, ["sim-mac"], python=own, fleet=mixed.fleet))
    assert (await api.plan_against(mixed.jobs, None, saved)).jobs[0].action is Action.RUN


async def test_more_jobs_than_devices_take_turns(mixed: Project) -> None:
    """Each run notes when it has a device and when it gives it back; no two have one at the same time."""
    journal = mixed.folder / "journal"
    turn = f'echo "+ $GPULAYER_DEVICES" >> {journal}; sleep 0.05; echo "- $GPULAYER_DEVICES" >> {journal}'
    mixed.write({f"job-{n}": {"command": turn, "accelerator": "cuda"} for n in range(7)})
    events = await mixed.apply()
    assert summary(events) == (0, {"succeeded": 7})
    held: set[str] = set()
    lines = [line.split() for line in journal.read_text().splitlines()]
    assert len(lines) == 14
    for sign, device in lines:
        assert (device in held) is (sign == "-")
        held ^= {device}
    assert {device for _, device in lines} == set(H200_IDS)


async def test_a_device_that_somebody_took_after_the_plan_is_left_for_one_that_is_free(
    mixed: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def noted(pause: float) -> float:
        pauses.append(pause)
        return 0.0

    monkeypatch.setattr(executor, "jittered", noted)
    mixed.write({"job": {"command": TOLD, "accelerator": "cuda"}})
    plan = await mixed.plan()
    (job,) = plan.jobs
    (place,) = job.placements
    other = Leases(str(mixed.hosts["sim-cuda"].entry["lease_dir"]))
    locks = other.take_devices(list(place.devices), 1, "somebody-else")
    try:
        async with asyncio.timeout(30):
            events = await mixed.apply(plan)
    finally:
        for lock in locks:
            os.close(lock)
    assert summary(events) == (0, {"succeeded": 1})
    assert pauses[0] == executor.BUSY[0]
    (free,) = set(H200_IDS) - set(place.devices)
    assert f"|{free}|" in output(events, "job").decode()


async def test_others_on_the_gpus_are_named_in_the_plan_and_the_job_waits_for_them(
    mixed: Project, machines: dict[str, SshdHost]
) -> None:
    apps = Path(machines["sim-cuda"].entry["python"]).with_name("apps.csv")
    mixed.write({"a": {"command": STARTED, "accelerator": "cuda"}})
    stranger = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        apps.write_text("".join(f"{device}, {stranger.pid}, 4096\n" for device in H200_IDS))
        plan = await mixed.plan()
        (job,) = plan.jobs
        assert job.action == Action.QUEUE
        found = [entry.refusal.found for entry in plan.shapes[job.shape].refusals if entry.refusal.code == "busy"]
        assert found
        assert all(holder.startswith(f"process {stranger.pid} (sleep, user ") for holder in found)
        applied = asyncio.create_task(mixed.apply(plan))
        done, _ = await asyncio.wait([applied], timeout=1)
        assert not done
    finally:
        stranger.kill()
        await stranger.wait()
        apps.unlink(missing_ok=True)
    assert summary(await applied) == (0, {"succeeded": 1})


async def test_a_saved_fleet_plans_as_the_fleet_itself(mixed: Project) -> None:
    mixed.write({"apple": {"command": "true", "accelerator": "mps", "framework": "torch"},
                 "none": {"command": "true", "accelerator": "rocm"}})  # fmt: skip
    surveyed = await api.probe(mixed.inventory, fleet=mixed.fleet)
    document = fleet_document(surveyed)
    saved = await api.plan_against(mixed.jobs, mixed.inventory, document)
    asked = await mixed.plan()
    assert not saved.applicable
    assert saved.shapes == asked.shapes
    assert [job.action for job in saved.jobs] == [job.action for job in asked.jobs]
