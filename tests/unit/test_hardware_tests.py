"""The hardware tests themselves: one for each row, outcomes that cannot flatter, and evidence that holds."""

from __future__ import annotations

import ast
import importlib
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.outcomes import Failed, Skipped

from gpulayer.gpu.facts import Device
from gpulayer.placement.plan import Action, PlannedJob
from gpulayer.spec import support
from gpulayer.spec.support import Accelerator, Evidence, Framework, JobKind
from hardware_tests import proof, ssh
from hardware_tests.evidence import FOLDER, HARDWARE, SCHEMA, SKIPPED, machine_name
from hardware_tests.proof import Done, NothingToProveError, prove, recorded
from hardware_tests.test_gpu_smoke import SMOKE
from hardware_tests.test_matrix import OTHERS

ROOT = Path(__file__).parents[2]
FILES = sorted(FOLDER.glob("*/*.json"))
TESTS = sorted((ROOT / "hardware_tests").glob("test_*.py"))
CUDA = support.row(Accelerator.CUDA, JobKind.INDEPENDENT, Framework.TORCH)
GPU = Device(id="GPU-1", accelerator="cuda", index=0)


def test_each_row_that_may_be_declared_has_one_test_and_a_program() -> None:
    tests = [row.name for row in (*SMOKE.values(), *OTHERS)]
    assert sorted(tests) == sorted(row.name for row in support.matrix() if row.allowed)
    smoke = importlib.import_module("hardware_tests.test_gpu_smoke")
    assert {name for name in vars(smoke) if name.startswith("test_")} == set(SMOKE)
    wanted = {proof.program(row) for row in support.matrix() if row.allowed}
    assert wanted == {path.name for path in proof.PROGRAMS.glob("*.py")} - {"product.py"}


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_every_test_writes_evidence_and_skips_by_a_code_alone(path: Path) -> None:
    module = ast.parse(path.read_text())
    tests = [node for node in ast.walk(module) if getattr(node, "name", "").startswith("test_")]
    assert tests
    for test in tests:
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        assert names & {"recorded", "proven"}, f"{test} has no evidence"
    assert "skip" not in {node.attr for node in ast.walk(module) if isinstance(node, ast.Attribute)}


def test_a_row_claims_hardware_exactly_where_a_real_device_passed() -> None:
    passed = {path.stem for path in FILES if json.loads(path.read_text())["outcome"] == HARDWARE}
    claimed = {row.name for row in support.matrix() if row.evidence is Evidence.HARDWARE}
    assert claimed == passed & {row.name for row in support.matrix()}, (
        "mend _PROVEN in gpulayer/spec/support.py, or run `pytest hardware_tests` on such a device"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_of_evidence_holds(path: Path) -> None:
    document = json.loads(path.read_text())
    assert (document["schema"], document["name"]) == (SCHEMA, path.stem)
    assert machine_name(document) == path.parent.name
    assert document["outcome"] == HARDWARE, "what proves nothing is not kept"
    names = {row.name: row for row in support.matrix()}
    if path.stem in names:
        devices = [one["id"] for one in document["devices"] if one["accelerator"] == names[path.stem].accelerator]
        used = [device for job in document["jobs"] for device in job["devices"] or ["cpu:0"]]
        assert sorted(used) == sorted(devices)
        assert all(job["result"]["wrong_rows"] == 0 for job in document["jobs"])


def outcome(test: Callable[[], None]) -> str:
    try:
        test()
    except (Skipped, Failed, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


@pytest.mark.parametrize(("required", "word"), [({}, "Skipped"), ({"CUDA": "1"}, "Failed"), ({"MPS": "1"}, "Skipped")])
def test_a_skip_has_a_code_and_fails_where_the_accelerator_is_required(
    required: dict[str, str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULAYER_EVIDENCE", str(tmp_path))
    for name, value in required.items():
        monkeypatch.setenv(f"GPULAYER_REQUIRE_{name}", value)

    def test() -> None:
        with recorded("name", "test", Accelerator.CUDA):
            raise NothingToProveError("no_device", "cuda")

    assert outcome(test).startswith(f"{word}: [no_device] this machine has no such device")
    written = json.loads((tmp_path / "unreached" / "name.json").read_text())
    assert (written["outcome"], written["code"]) == (SKIPPED if word == "Skipped" else "failed", "no_device")


def done(**changes: Any) -> Done:
    told = {
        "GPULAYER_ACCELERATOR": "cuda", "GPULAYER_DEVICES": "GPU-1",
        "CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
    result = {"environment": told, "wrong_rows": 0, "size": 512, "visible": 1, "uuid": "1", **changes}
    planned = PlannedJob(job="proof-0", key="0", shape="0", action=Action.RUN)
    return Done(planned=planned, result=result, output="")


@pytest.mark.parametrize(
    "changes",
    [{"wrong_rows": 1}, {"visible": 2}, {"uuid": "2"}, {"size": 64}, {"environment": dict.fromkeys(proof.TOLD)}],
)
def test_a_wrong_number_or_device_fails(changes: dict[str, Any]) -> None:
    proof.check(CUDA, done(), GPU)
    with pytest.raises(AssertionError):
        proof.check(CUDA, done(**changes), GPU)


@pytest.mark.parametrize(
    "changes",
    [{"wrong_rows": 1}, {"world": 1}, {"visible": 1}, {"uuid": "2"}, {"backend": "gloo"}, {"weights": [-1.0] * 4}],
)
def test_a_rank_that_computed_alone_or_elsewhere_fails(changes: dict[str, Any]) -> None:
    row = support.row(Accelerator.CUDA, JobKind.DISTRIBUTED, Framework.TORCH)
    devices = ("GPU-1", "GPU-2")
    told = {"GPULAYER_ACCELERATOR": "cuda", "GPULAYER_DEVICES": "GPU-1,GPU-2", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    result: dict[str, Any] = {
        "environment": told, "wrong_rows": 0, "size": 512, "world": 2, "visible": 2, "uuid": "1", "backend": "nccl",
        "weights": [-1.5] * 4,
    }  # fmt: skip
    proof.check_rank(row, result, 0, devices)
    with pytest.raises(AssertionError):
        proof.check_rank(row, result | changes, 0, devices)


def test_the_check_of_products_finds_every_kind_of_wrong_entry() -> None:
    product = runpy.run_path(str(proof.PROGRAMS / "product.py"))
    matrix, size, period = product["matrix"](), product["SIZE"], 7
    columns = list(zip(*matrix, strict=True))
    rows = [[sum(map(float.__mul__, row, column)) for column in columns] for row in matrix[:period]]
    square = [list(rows[row % period]) for row in range(size)]
    assert product["wrong_rows"](square) == 0
    square[3][5] += 1
    square[70][511] += 0.25
    square[9], square[10] = square[10], square[9]
    assert product["wrong_rows"](square) == 4


async def test_a_row_is_proven_through_a_server_of_the_tests_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULAYER_EVIDENCE", str(tmp_path / "evidence"))
    monkeypatch.setattr(ssh, "which_sshd", lambda: None)
    row = support.row(Accelerator.CPU, JobKind.INDEPENDENT, None)
    await prove(row, "here", tmp_path)
    (path,) = (tmp_path / "evidence").glob(f"*/{row.name}.json")
    written = json.loads(path.read_text())
    assert (written["outcome"], written["jobs"][0]["result"]["wrong_rows"]) == (HARDWARE, 0)
    assert written["server"].startswith("asyncssh")
    assert str(tmp_path) not in path.read_text()
