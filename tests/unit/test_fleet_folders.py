"""The machines of `tests/fleet_folders`: each is asked, and what must come out comes out."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpulayer.gpu.facts import HostFacts, facts_from_report
from gpulayer.placement.plan import HostView
from gpulayer.placement.verdicts import Fits, verdict
from gpulayer.spec.documents import parse
from gpulayer.spec.inventory import Host
from gpulayer.spec.jobs import JobSpec, parse_jobs
from tests import fleet_folders
from tests.fleet_folders import FOLDERS, Found

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "schemas" / "probe.schema.json").read_text())
GIB = 1 << 30
REPORT_LIMIT = 64 << 10

# What people ask for; every folder says of each whether it fits there, or why not.
JOBS: dict[str, dict[str, Any]] = {
    "cuda": {"accelerator": "cuda"},
    "cuda, dedicated": {"accelerator": "cuda", "resources": {"gpu_memory_kind": "dedicated"}},
    "cuda, unified": {"accelerator": "cuda", "resources": {"gpu_memory_kind": "unified"}},
    "cuda, torch": {"accelerator": "cuda", "framework": "torch"},
    "rocm, torch": {"accelerator": "rocm", "framework": "torch"},
    "mps": {"accelerator": "mps"},
    "mps, torch": {"accelerator": "mps", "framework": "torch"},
    "mps, mlx": {"accelerator": "mps", "framework": "mlx"},
    "mps, float64": {"accelerator": "mps", "resources": {"dtypes": ["float64"]}},
    "cpu, torch": {"accelerator": "cpu", "framework": "torch"},
}

# The machines that the project promises to know.
PROMISED = {
    *("m1", "m2-ultra", "m3-max-mps-unavailable", "m4-max", "mac-vm", "intel-mac", "h200x2", "rtx-4090", "gb10"),
    *("jetson-orin", "jetson-thor", "gh200", "n1x", "a100-mig", "rocm", "strix-halo", "intel-arc", "wsl"),
    *("hung-driver", "hung-nvidia-smi", "jetson-xavier", "cpu-only"),
}

machines = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@functools.cache
def found(folder: Path) -> Found:
    return fleet_folders.ask(folder)


@functools.cache
def jobs() -> dict[str, JobSpec]:
    named = {f"job-{place}": {**job, "command": "true"} for place, job in enumerate(JOBS.values())}
    document = parse(json.dumps({"version": 1, "jobs": named}).encode(), "jobs.json")
    return dict(zip(JOBS, parse_jobs(document).jobs.values(), strict=True))


def judged(job: JobSpec, facts: HostFacts) -> str | list[str]:
    """`fits`, or the codes of why it does not."""
    answer = verdict(job, HostView(host=Host(name="machine"), reached=True, facts=facts))
    return "fits" if isinstance(answer, Fits) else sorted({str(refusal.code) for refusal in answer.refusals})


def gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 2)


def summary(facts: HostFacts) -> dict[str, Any]:
    """The facts as `facts.json` has them; memory in GiB."""
    return {
        "os": facts.os,
        "arch": facts.arch,
        "memory": gib(facts.memory_bytes),
        "devices": {
            device.id: {
                "accelerator": device.accelerator,
                "kind": device.memory_kind,
                "memory": gib(device.memory_bytes),
                "usable": gib(device.usable_bytes),
                "virtual": device.virtual,
                "health": device.health,
            }
            for device in facts.devices
        },
        "capabilities": sorted(facts.capabilities),
        "notes": sorted({note.code for note in facts.notes}),
        "complete": facts.complete,
        "jobs": {name: judged(job, facts) for name, job in jobs().items()},
    }


@machines
def test_the_facts_that_must_come_out_do(folder: Path) -> None:
    report = {**found(folder).report, "started_at": "2026-11-30T10:00:00Z"}
    assert summary(facts_from_report(report)) == json.loads((folder / "facts.json").read_text())


@machines
def test_the_report_is_the_one_in_the_folder(folder: Path) -> None:
    mend = f"python -m tests.fleet_folders {folder.name}"
    assert fleet_folders.report_text(found(folder)) == (folder / "report.json").read_text(), mend
    assert fleet_folders.asked_text(found(folder)) == (folder / "asked.txt").read_text(), mend


@machines
def test_the_report_holds_against_the_schema_and_is_small(folder: Path) -> None:
    report = {**found(folder).report, "started_at": "2026-11-30T10:00:00Z", "elapsed_ms": 1}
    report["frameworks"] = [{**entry, "elapsed_ms": 1} for entry in report["frameworks"]]
    assert [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(report)] == []
    assert len(json.dumps(report)) < REPORT_LIMIT


@machines
def test_no_answer_lies_there_that_nothing_asks_for(folder: Path) -> None:
    assert set(fleet_folders.answers(folder)) <= found(folder).asked.keys()


@machines
def test_the_folder_says_where_it_comes_from(folder: Path) -> None:
    readme = (folder / "README.md").read_text()
    assert re.search(r"^Origin: (recorded|partly recorded|hand-written)\b", readme, re.MULTILINE), readme


def test_every_promised_machine_has_its_folder() -> None:
    assert {folder.name for folder in FOLDERS} >= PROMISED


def test_the_report_of_the_largest_host_is_small() -> None:
    """Eight A100, each in seven instances: nothing has more devices."""
    told = fleet_folders.recording(fleet_folders.HERE / "a100-mig")
    (only,) = (line[1] for line in told["children"]["nvml_child"] if line[0] == "gpu:0")
    gpus = [
        {
            **only,
            "uuid": f"GPU-aaaaaaaa-0000-4000-8000-00000000000{gpu}",
            "pci": f"00000000:0{gpu + 1}:00.0",
            "instances": [
                {**only["instances"][0], "uuid": f"MIG-aaaaaaaa-0000-4000-8000-00000000{gpu}00{part}"}
                for part in range(7)
            ],
        }
        for gpu in range(8)
    ]
    lines = [["init", 0], ["driver", "550.90.07"], *([f"gpu:{place}", gpu] for place, gpu in enumerate(gpus))]
    told["children"]["nvml_child"] = [*lines, ["done", True]]
    report = fleet_folders.ask_recorded(told).report
    assert len([device for device in report["devices"] if device["accelerator"] == "cuda"]) >= 8 * 7
    assert len(json.dumps(report)) < REPORT_LIMIT
