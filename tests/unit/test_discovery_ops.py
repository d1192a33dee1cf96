"""Operators and dtypes: the real MLX and PyTorch on the CPU, made to crash, hang and compute wrongly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpulayer.gpu import discovery_ops, mlx_ops_child, torch_ops_child
from gpulayer.gpu.discovery import probe
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_ops import RESULTS, prove
from gpulayer.gpu.discovery_process import Outcome
from gpulayer.gpu.discovery_report import Target
from gpulayer.gpu.discovery_system import Answer
from gpulayer.gpu.facts import _RESULTS
from gpulayer.spec.support import DTYPES
from tests.machines import write_program

LACKING = {"complex128", "float8_e4m3fn", "float8_e5m2"}  # MLX has no such dtypes


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that runs `sitecustomize.py` in the folder `site` beside it first."""
    (tmp_path / "site").mkdir()
    return write_program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH="{tmp_path}/site" exec {sys.executable} "$@"\n')


def spoiled(python: Path, source: str, **options: Any) -> dict[str, Any]:
    """Probe the real MLX after `source` has spoiled it (`mx` is its core)."""
    (python.parent / "site" / "sitecustomize.py").write_text(f"import os, time\nimport mlx.core as mx\n{source}\n")
    return probe(str(python), ["mlx"], **{"deep": True, **options})


def detail(report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = report["frameworks"][0]["detail"]
    return found


def test_a_crash_costs_one_result_and_the_rest_are_tried_alone(python: Path) -> None:
    report = spoiled(python, "mx.fast.scaled_dot_product_attention = lambda *_, **__: os.abort()")
    ops = detail(report)["ops"]
    assert ops["sdpa_noncontig"] == "crashed"
    assert ops["conv2d_noncontig_weight"] == "ok"
    assert {key for key, result in ops.items() if result == "ok"} == set(ops) - LACKING - {"sdpa_noncontig"}
    note = next(note for note in report["notes"] if note["code"] == "child_crashed")
    assert (note["subject"], note["detail"]) == ("mlx ops", "SIGABRT during sdpa_noncontig")
    assert report["frameworks"][0]["status"] == "ok"


def test_a_hang_costs_one_result(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_ops, "OPS_LIMIT_S", 3.0)
    report = spoiled(python, "mx.fast.scaled_dot_product_attention = lambda *_, **__: time.sleep(600)")
    ops = detail(report)["ops"]
    assert (ops["sdpa_noncontig"], ops["conv2d_noncontig_weight"]) == ("timeout", "ok")
    assert report["complete"] is False


def test_wrong_numbers_and_errors_are_told_apart(python: Path) -> None:
    report = spoiled(
        python,
        "seen = []\ndef conv2d(image, *_, **__):\n    seen.append(1)\n    return image * len(seen)\n"
        "def solve(*_, **__): raise RuntimeError('[malloc] out of memory')\n"
        "def cumsum(*_, **__): raise ValueError('[cumsum] int64 is not yet supported on the GPU.')\n"
        "mx.linalg.solve, mx.cumsum, mx.conv2d = solve, cumsum, conv2d",
    )
    ops, errors = detail(report)["ops"], detail(report)["op_errors"]
    assert (ops["conv2d_noncontig_weight"], ops["linalg_solve"], ops["int64"]) == ("wrong", "error", "unsupported")
    assert (errors["linalg_solve"], errors["int64"]) == ("RuntimeError", "ValueError")
    assert set(ops) == set(mlx_ops_child._ITEMS)


def test_what_was_proven_is_known_to_later_probes(python: Path, tmp_path: Path) -> None:
    kept = tmp_path / "state"
    kept.mkdir()
    crash = "mx.fast.scaled_dot_product_attention = lambda *_, **__: os.abort()"
    asked = detail(spoiled(python, crash, state_root=str(kept)))
    assert asked["ops"]["sdpa_noncontig"] == "crashed"
    later = probe(str(python), ["mlx"], state_root=str(kept))
    assert (detail(later)["ops"], detail(later)["ops_device"]) == (asked["ops"], "cpu:0")
    assert detail(probe(str(python), ["mlx"], state_root=str(kept), fresh=True))["ops"] == {}
    again = detail(spoiled(python, "", state_root=str(kept)))
    assert again["ops"]["sdpa_noncontig"] == "ok"
    assert detail(probe(str(python), ["mlx"], state_root=str(kept)))["ops"] == again["ops"]


@pytest.mark.linux("a machine without an Apple GPU; hardware_tests prove that one")
def test_the_real_torch_of_this_interpreter() -> None:
    report = probe(sys.executable, ["torch"], deep=True)
    assert report["frameworks"][0]["status"] == "ok"
    assert {"torch", "torch.distributed.gloo"} <= set(report["capabilities"])
    assert report["devices"][-1]["id"] == "cpu:0"
    assert "torch.mps" not in report["capabilities"]
    assert detail(report)["ops"] == dict.fromkeys(sorted(torch_ops_child._ITEMS), "ok")
    assert detail(report)["ops_device"] == "cpu:0"


def scripted(*answers: Answer) -> Any:
    remaining = list(answers)
    return lambda _arguments, _limit: remaining.pop(0)


def said(**values: Any) -> Answer:
    return Answer({"done": True, **values}, {}, valid=True, outcome=Outcome(code=0))


def test_double_that_works_on_the_apple_gpu_was_not_on_it() -> None:
    notes = Notes()
    keys = ["float32", "float64", "complex128"]
    answer = said(keys=keys, float32="ok", float64="ok", complex128="unsupported", memory={"driver": 1})
    proven = prove("torch", Target("mps", "apple:0"), scripted(answer), notes)
    assert proven.ops == {"float32": "ok", "float64": "wrong", "complex128": "unsupported"}
    assert [(note["code"], note["subject"]) for note in notes.entries] == [("cpu_fallback_suspected", "apple:0")]
    assert proven.memory == {"driver": 1}
    elsewhere = prove("torch", Target("cuda:0", "GPU-1"), scripted(answer), Notes())
    assert elsewhere.ops["float64"] == "ok"


def test_what_was_not_reached_is_unknown() -> None:
    gone = Answer({"keys": ["int8"]}, {}, valid=True, outcome=Outcome(timed_out=True))
    notes = Notes()
    assert prove("torch", Target("cpu", "cpu:0"), scripted(gone, gone), notes).ops == {}
    assert [note["code"] for note in notes.entries] == ["child_timeout"]


@pytest.mark.parametrize("child", [torch_ops_child, mlx_ops_child])
def test_every_dtype_that_a_job_can_ask_for_is_tried(child: Any) -> None:
    operators = {"alloc_compute", "linalg_solve", "sdpa_noncontig", "conv2d_noncontig_weight"}
    assert set(child._ITEMS) == {*DTYPES, *operators}


def test_the_words_for_results_are_the_same_in_producer_reader_schema_and_documentation() -> None:
    root = Path(__file__).parents[2]
    schema = json.loads((root / "schemas" / "probe.schema.json").read_text())
    frameworks = schema["properties"]["frameworks"]["items"]["properties"]
    assert frameworks["detail"]["properties"]["ops"]["additionalProperties"]["enum"] == list(RESULTS) == list(_RESULTS)
    text = (root / "docs" / "probe.md").read_text()
    section = text[text.index("## Operators and dtypes") : text.index("## Notes")]
    assert [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")] == list(RESULTS)
