"""One row of the matrix, proven on the machine under test: probe, plan and apply over SSH, then the numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

import gpulayer
from gpulayer.errors import ExitCode
from gpulayer.gpu.facts import Device, HostFacts
from gpulayer.placement.explain import sentence
from gpulayer.placement.plan import Action, Plan, PlannedJob
from gpulayer.run.events import FETCHED, OUTPUT, SUMMARY
from gpulayer.spec.support import Accelerator, Framework, JobKind, Row
from hardware_tests.evidence import HARDWARE, SKIPPED, SKIPS, VIRTUAL, Evidence
from hardware_tests.ssh import Reached, ssh_host

PROGRAMS: Final = Path(__file__).parent / "programs"
SIZE: Final = 512
TOLD: Final = ("GPULAYER_ACCELERATOR", "GPULAYER_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")

_WRONG: Final = {"cuda_wrong_result", "mps_wrong_result", "mlx_wrong_result", "cpu_fallback_suspected"}

# What a framework lacks where it is installed, the device is there, and neither is broken.
_CANNOT: Final = {
    "torch_cpu_build", "mps_not_built", "macos_too_old_for_torch", "gpu_arch_unsupported", "driver_too_old",
    "mlx_no_gpu", "executorch_needs_torch", "executorch_backend_registered_unusable",
}  # fmt: skip


class NothingToProveError(Exception):
    """This machine cannot show what the test is about; `code` is a word of SKIPS."""

    def __init__(self, code: str, detail: str = "") -> None:
        """`detail` goes after the code's own sentence."""
        super().__init__(f"{SKIPS[code]}{f': {detail}' if detail else ''}")
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A job that ran: its line of the plan and the `result.json` that was fetched (None: there is none)."""

    planned: PlannedJob
    result: dict[str, Any] | None
    output: str


@contextmanager
def recorded(name: str, test: str, accelerator: Accelerator) -> Iterator[Evidence]:
    """Give the test's evidence, and write it however the test ends.

    NothingToProveError skips the test; where GPULAYER_REQUIRE_<ACCELERATOR> is 1 it fails it.
    """
    evidence = Evidence(name=name, test=test)
    required = os.environ.get(f"GPULAYER_REQUIRE_{accelerator.upper()}") == "1"
    nothing: NothingToProveError | None = None
    try:
        yield evidence
    except NothingToProveError as error:
        nothing = error
        evidence.code, evidence.message = error.code, str(error)
        evidence.outcome = evidence.outcome if required else SKIPPED
    except BaseException as error:
        evidence.message = f"{type(error).__name__}: {error}"
        raise
    finally:
        evidence.write()
    if nothing is not None and required:
        pytest.fail(f"[{nothing.code}] {nothing}, and GPULAYER_REQUIRE_{accelerator.upper()} is set")
    if nothing is not None:
        pytest.skip(f"[{nothing.code}] {nothing}")


async def prove(row: Row, test: str, folder: Path) -> None:
    """Run one job on each device of the row's accelerator, and hold what they computed against the right numbers."""
    with recorded(row.name, test, row.accelerator) as evidence:
        evidence.framework = row.framework
        with ssh_host(folder) as reached:
            devices = await usable_devices(reached, row, evidence)
            if row.kind is JobKind.DISTRIBUTED:
                await run_gang(reached, row, devices, folder, evidence)
            else:
                for job, device in await run_jobs(reached, row, devices, folder, evidence):
                    check(row, job, device)
        virtual = any(device.virtual for device in devices)
        evidence.outcome = VIRTUAL if virtual else HARDWARE


async def usable_devices(reached: Reached, row: Row, evidence: Evidence) -> list[Device]:
    """Return the row's devices, whose framework works; raises NothingToProveError where there are none."""
    facts = await probed(reached, (row.framework.value,) if row.framework else (), evidence)
    devices = [device for device in facts.devices if device.accelerator == row.accelerator]
    _expect_device(row, devices)
    _expect_framework(row, facts, virtual=any(device.virtual for device in devices))
    return devices


async def probed(reached: Reached, frameworks: Sequence[str], evidence: Evidence) -> HostFacts:
    """Return what the probe finds through SSH; its report becomes part of the evidence. A wrong number fails."""
    evidence.server = reached.server
    (answer,) = await gpulayer.probe(reached.inventory, frameworks=frameworks, options=reached.options)
    assert answer.view.facts is not None, answer.view.error
    evidence.report = answer.report
    wrong = [note.message for note in answer.view.facts.notes if note.code in _WRONG]
    assert not wrong, f"a wrong number: {wrong}"
    return answer.view.facts


def _expect_device(row: Row, devices: Sequence[Device]) -> None:
    if devices:
        return
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    assert not (row.accelerator is Accelerator.MPS and apple), "every Mac with Apple Silicon reports its GPU"
    raise NothingToProveError("no_device", row.accelerator)


def _expect_framework(row: Row, facts: HostFacts, *, virtual: bool) -> None:
    """Nothing is to be proven where the framework is not there or was built without the device; else it must work."""
    if row.framework is None:
        return
    fact = facts.frameworks[row.framework]
    installed = importlib.util.find_spec(row.framework) is not None
    assert installed == (fact.status != "not_installed"), f"{row.framework} is installed: {installed}; probe: {fact}"
    if not installed:
        raise NothingToProveError("framework_not_installed", row.framework)
    if facts.capabilities & set(row.capabilities):
        return
    lacking = [note.message for note in facts.notes if note.code in _CANNOT]
    if lacking or _lacks_backend(row, facts):
        raise NothingToProveError("framework_cannot", " ".join(lacking) or f"it has none of {row.capabilities}")
    notes = [f"{note.code}: {note.message} ({note.detail})" for note in facts.notes if note.severity != "info"]
    if virtual:
        raise NothingToProveError("virtual_gpu_unusable", " ".join(notes))
    raise AssertionError(f"{row.framework} is {fact.status} and shows none of {row.capabilities}: {notes}")


def _lacks_backend(row: Row, facts: HostFacts) -> bool:
    """ExecuTorch's wheels differ in the backends that they register; one that is not there is no fault."""
    return row.framework is Framework.EXECUTORCH and facts.frameworks[row.framework].status == "ok"


async def run_jobs(
    reached: Reached, row: Row, devices: Sequence[Device], folder: Path, evidence: Evidence
) -> list[tuple[Done, Device]]:
    """Plan and apply one job for each device, all at once; return each with the device that it was placed on."""
    names = [f"proof-{place}" for place in range(len(devices))]
    plan, exit_code, output, results = await _apply(reached, [_job(name, row) for name in names], folder)
    by_id = {device.id: device for device in devices}
    done = []
    for job in plan.jobs:
        (place,) = job.placements
        (device,) = place.devices or (devices[0].id,)
        result = next(iter(results.get(job.job, ())), None)
        evidence.jobs.append({"job": job.job, "devices": list(place.devices), "result": result})
        done.append((Done(planned=job, result=result, output=output[job.job].decode(errors="replace")), by_id[device]))
    if exit_code != ExitCode.OK and any(device.virtual for device in devices):
        raise NothingToProveError("virtual_gpu_unusable", output["proof-0"].decode(errors="replace")[-300:])
    assert exit_code == ExitCode.OK, [job.output for job, _ in done]
    return done


async def run_gang(
    reached: Reached, row: Row, devices: Sequence[Device], folder: Path, evidence: Evidence
) -> None:  # fmt: skip
    """Plan and apply one gang with a rank on each device (two on the CPU), and hold what its ranks computed."""
    ranks = 2 if row.accelerator is Accelerator.CPU else len(devices)
    if ranks == 1:
        raise NothingToProveError("one_device")
    plan, exit_code, output, results = await _apply(reached, [_job("gang", row, ranks)], folder)
    ((place,),) = (job.placements for job in plan.jobs)
    found = sorted(results.get("gang", ()), key=lambda result: int(result["rank"]))
    wrong = sum(int(result["wrong_rows"]) for result in found)
    evidence.jobs.append(
        {"job": "gang", "devices": list(place.devices), "result": {"wrong_rows": wrong, "ranks": found}}
    )
    assert exit_code == ExitCode.OK, output["gang"].decode(errors="replace")
    assert [result["rank"] for result in found] == list(range(ranks))
    for rank, result in enumerate(found):
        check_rank(row, result, rank, place.devices)


def check_rank(row: Row, result: dict[str, Any], rank: int, devices: Sequence[str]) -> None:
    """Hold what one rank computed: with the others, and on a device of its own."""
    ranks = len(devices) or 2
    assert (result["wrong_rows"], result["size"], result["world"]) == (0, SIZE, ranks)
    if row.framework is Framework.TORCH:
        assert result["backend"] == ("gloo" if row.accelerator is Accelerator.CPU else "nccl")
        assert result["weights"] == [-(ranks + 1) / 2] * 4  # the mean of 1 to `ranks`
    told = result["environment"]
    assert (told["GPULAYER_ACCELERATOR"], told["GPULAYER_DEVICES"]) == (row.accelerator, ",".join(devices))
    if row.accelerator is Accelerator.CUDA:
        assert (told["CUDA_VISIBLE_DEVICES"], result["visible"]) == (",".join(devices), ranks)
        assert devices[rank].partition("-")[2] == result["uuid"]


async def _apply(
    reached: Reached, jobs: Sequence[gpulayer.JobSpec], folder: Path
) -> tuple[Plan, int | None, dict[str, bytes], dict[str, list[dict[str, Any]]]]:
    """Plan and apply; return the plan, the exit code, and by job its output and the results that were fetched."""
    project = folder / "project"
    project.mkdir()
    declared = gpulayer.JobSet(
        project="hardware", jobs={job.name: job for job in jobs}, path=project / "jobs.yaml"
    )  # fmt: skip
    plan = await gpulayer.plan(declared, reached.inventory, options=reached.options)
    _expect_placed(plan)
    output = {job.job: b"" for job in plan.jobs}
    results: dict[str, list[dict[str, Any]]] = {}
    exit_code = None
    async for event in gpulayer.apply(plan, declared, reached.inventory, options=reached.options):
        if event.event == OUTPUT and event.job:
            output[event.job] += event.data
        elif event.event == FETCHED and event.job:
            results[event.job] = _results(Path(event.detail["path"]))
        elif event.event == SUMMARY:
            exit_code = event.detail["exit_code"]
    return plan, exit_code, output, results


def _results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("result*.json"))]


def program(row: Row) -> str:
    """Return the name of the program that a row's jobs run: a framework's, else the accelerator's own."""
    if row.kind is JobKind.DISTRIBUTED and row.framework:
        return f"{row.framework}_gang.py"
    return f"{row.framework}_product.py" if row.framework else f"plain_{row.accelerator}.py"


def _job(name: str, row: Row, ranks: int | None = None) -> gpulayer.JobSpec:
    common: dict[str, Any] = {
        "name": name,
        "accelerator": row.accelerator,
        "framework": row.framework,
        "command": ("python", program(row)),
        "env": {"PROOF": name},
        "workdir": PROGRAMS,
        "outputs": ("result*.json",),
        "timeout": 300.0,
    }
    if ranks is None:
        return gpulayer.IndependentJob(**common)
    gpus = None if row.accelerator is Accelerator.CPU else ranks
    return gpulayer.DistributedJob(
        **common,
        resources=gpulayer.ResourceRequest(gpus=gpus),
        distributed=gpulayer.Distributed(nodes=1, processes_per_node=ranks),
    )


def _expect_placed(plan: Plan) -> None:
    refusals = [grouped.refusal for verdict in plan.shapes.values() for grouped in verdict.refusals]
    assert {job.action for job in plan.jobs} == {Action.RUN}, [sentence(refusal) for refusal in refusals]
    placed = [device for job in plan.jobs for place in job.placements for device in place.devices]
    assert len(placed) == len(set(placed)), f"two jobs on one device: {placed}"


def check(row: Row, job: Done, device: Device) -> None:
    """Hold a job to its device: what it was told, which device it saw, and that every number is right."""
    assert job.result is not None, job.output
    assert job.result["wrong_rows"] == 0, f"{device.id} computed {job.result['wrong_rows']} wrong rows of {SIZE}"
    assert job.result["size"] == SIZE
    told = job.result["environment"]
    assert told.keys() == set(TOLD)
    assert told["GPULAYER_ACCELERATOR"] == row.accelerator
    if row.accelerator is Accelerator.CPU:
        assert (told["GPULAYER_DEVICES"], told["CUDA_VISIBLE_DEVICES"]) == ("", "")
        return
    assert told["GPULAYER_DEVICES"] == device.id
    if row.accelerator is Accelerator.CUDA:
        assert (told["CUDA_VISIBLE_DEVICES"], told["CUDA_DEVICE_ORDER"]) == (device.id, "PCI_BUS_ID")
        assert job.result["visible"] == 1
        if "uuid" in job.result:
            assert device.id.partition("-")[2] == job.result["uuid"]
