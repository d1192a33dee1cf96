"""The saved fleet and jobs of tests/cases come out as expected.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.errors import StateError
from gpulayer.placement.document import from_json, to_json
from gpulayer.spec.jobs import load_jobs
from tests.fleets import plan_json, views_of
from tests.oracle import judge
from tests.unit.test_facts import places, put

CASES = Path(__file__).parents[1] / "cases"
FLEET = json.loads((CASES / "fleet.json").read_text())
EXPECTED: dict[str, Any] = json.loads((CASES / "expected.json").read_text())


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    return plan_json(load_jobs(CASES / "jobs.yaml"), views_of(FLEET))


@pytest.mark.parametrize("job", EXPECTED)
def test_case(plan: dict[str, Any], job: str) -> None:
    line = next(line for line in plan["jobs"] if line["job"] == job)
    verdict, expected = plan["shapes"][line["shape"]], EXPECTED[job]
    assert set(verdict["fits"]) == set(expected["fits"])
    for host, codes in expected["refused"].items():
        found = {refusal["code"] for refusal in verdict["refusals"] if host in refusal["hosts"]}
        assert set(codes) <= found
    if "accelerator" in expected:
        assert line["accelerator"] == expected["accelerator"]


def test_every_case_has_an_expectation(plan: dict[str, Any]) -> None:
    assert {line["job"] for line in plan["jobs"]} == EXPECTED.keys()


def test_the_judge_has_nothing_against_it(plan: dict[str, Any]) -> None:
    jobs = yaml.safe_load((CASES / "jobs.yaml").read_text())
    assert judge(plan, FLEET, jobs) == []


STRANGE: list[Any] = [
    None,
    True,
    0,
    -1,
    10**30,
    1e308,
    "",
    "a",
    "\ud800",
    [],
    {},
    [1],
    [[]],
    {"a": 1},
    {"any_of": 1},
    {"from": "a", "to": 1},
]


@given(st.data())
def test_an_edited_plan_is_refused_with_its_place_or_can_be_shown(plan: dict[str, Any], data: st.DataObject) -> None:
    part = data.draw(st.sampled_from(["jobs", "hosts", "shapes"]))
    path = data.draw(st.sampled_from([(part, *below) for below in places(plan[part])]))
    edited = put(plan, path, data.draw(st.sampled_from(STRANGE)))
    told, shown = "", None
    try:
        shown = to_json(from_json(edited))
    except StateError as error:
        told = error.message
    assert told.startswith("plan.") or json.dumps(shown, allow_nan=False)
