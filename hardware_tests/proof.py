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
            done = await run_jobs(reached, row, devices, folder, evidence)
        virtual = any(device.virtual for device in devices)
        for job, device in done:
            check(row, job, device)
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
    project = folder / "project"
    project.mkdir()
    jobs = gpulayer.JobSet(
        project="hardware",
        jobs={f"proof-{place}": _job(f"proof-{place}", row) for place in range(len(devices))},
        path=project / "jobs.yaml",
    )
    plan = await gpulayer.plan(jobs, reached.inventory, options=reached.options)
    _expect_placed(plan)
    output = {job.job: b"" for job in plan.jobs}
    results: dict[str, dict[str, Any]] = {}
    exit_code = None
    async for event in gpulayer.apply(plan, jobs, reached.inventory, options=reached.options):
        if event.event == OUTPUT and event.job:
            output[event.job] += event.data
        elif event.event == FETCHED and event.job and (written := Path(event.detail["path"]) / "result.json").exists():
            results[event.job] = json.loads(written.read_text(encoding="utf-8"))
        elif event.event == SUMMARY:
            exit_code = event.detail["exit_code"]
    by_id = {device.id: device for device in devices}
    done = []
    for job in plan.jobs:
        (place,) = job.placements
        (device,) = place.devices or (devices[0].id,)
        result = results.get(job.job)
        evidence.jobs.append({"job": job.job, "devices": list(place.devices), "result": result})
        done.append((Done(planned=job, result=result, output=output[job.job].decode(errors="replace")), by_id[device]))
    if exit_code != ExitCode.OK and any(device.virtual for device in devices):
        raise NothingToProveError("virtual_gpu_unusable", output["proof-0"].decode(errors="replace")[-300:])
    assert exit_code == ExitCode.OK, [job.output for job, _ in done]
    return done


def program(row: Row) -> str:
    """Return the name of the program that a row's jobs run: a framework's, else the accelerator's own."""
    return f"{row.framework}_product.py" if row.framework else f"plain_{row.accelerator}.py"


def _job(name: str, row: Row) -> gpulayer.JobSpec:
    kind = gpulayer.DistributedJob if row.kind is JobKind.DISTRIBUTED else gpulayer.IndependentJob
    return kind(
        name=name,
        accelerator=row.accelerator,
        framework=row.framework,
        command=("python", program(row)),
        env={"PROOF": name},
        workdir=PROGRAMS,
        outputs=("result.json",),
        timeout=300.0,
    )


def _expect_placed(plan: Plan) -> None:
    refusals = [grouped.refusal for verdict in plan.shapes.values() for grouped in verdict.refusals]
    if any(job.nodes for job in plan.jobs):
        raise NothingToProveError("distributed_not_launched")
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
