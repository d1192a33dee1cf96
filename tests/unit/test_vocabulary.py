"""A word that is missing in one place is missed by name: schemas, producers, documentation, tests and README agree."""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpulayer.gpu.discovery_notes import NOTE_CODES
from gpulayer.gpu.facts import facts_from_report
from gpulayer.placement.plan import HostView
from gpulayer.placement.verdicts import Fits, verdict
from gpulayer.spec import jobs, support
from gpulayer.spec.inventory import Host
from gpulayer.spec.support import Evidence, Row, matrix
from tests import vocabulary
from tests.fleet_folders import FOLDERS
from tests.vocabulary import ROOT, SOURCES, SPELLED, enumerations, schema_path

SCHEMAS = sorted({name for name, _ in (*SOURCES, *SPELLED)})
PROBE_PAGE = (ROOT / "docs" / "probe.md").read_text(encoding="utf-8")


@functools.cache
def constants() -> set[Any]:
    """Every constant that our code spells out."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "gpulayer").rglob("*.py")]
    return {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}


@functools.cache
def shown_by_tests() -> set[str]:
    """Every text that a test spells out, and every word in the facts that a machine's folder demands."""
    tests = [path for path in (ROOT / "tests").rglob("*.py") if "stand_ins" not in path.parts]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in tests]
    found = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    demanded = [json.loads((folder / "facts.json").read_text()) for folder in FOLDERS]
    words = {word for facts in demanded for word in (*facts["notes"], *facts["capabilities"])}
    return words | {value for value in found if isinstance(value, str)}


@pytest.mark.parametrize("path", vocabulary.derived(), ids=lambda path: path.name)
def test_every_file_has_the_words_of_the_code(path: Path) -> None:
    told = vocabulary.difference(path, vocabulary.derived()[path])
    assert not told, told


def test_every_enumeration_of_a_schema_has_its_source() -> None:
    schemas = {name: json.loads(schema_path(name).read_text(encoding="utf-8")) for name in SCHEMAS}
    there = {(name, path) for name, schema in schemas.items() for path, _ in enumerations(schema)}
    assert there == SOURCES.keys() | SPELLED
    assert {path.name.partition(".")[0] for path in (ROOT / "schemas").glob("*.json")} == set(SCHEMAS)


def test_what_no_constant_owns_is_spelled_out_where_it_is_produced() -> None:
    schemas = {name: json.loads(schema_path(name).read_text(encoding="utf-8")) for name, _ in SPELLED}
    nowhere = [
        f"schemas/{name}.schema.json: {path}: {word!r} is nowhere in gpulayer/"
        for name, schema in schemas.items()
        for path, words in enumerations(schema)
        if (name, path) in SPELLED
        for word in words
        if word is not None and word not in constants()
    ]
    assert nowhere == []


def test_every_note_is_shown_by_a_test() -> None:
    assert [code for code in NOTE_CODES if code not in shown_by_tests()] == []


def test_every_capability_is_shown_by_a_test() -> None:
    assert [name for name in support.CAPABILITIES if name not in shown_by_tests()] == []


def test_the_capabilities_are_the_same_in_vocabulary_and_documentation() -> None:
    section = PROBE_PAGE.partition("\n## Capabilities\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    assert set(documented) == set(support.CAPABILITIES), "docs/probe.md, Capabilities"
    assert len(documented) == len(support.CAPABILITIES)


def test_every_retired_name_is_documented() -> None:
    assert [name for name in support.RETIRED if f"`{name}`" not in PROBE_PAGE] == []


@functools.cache
def views() -> tuple[HostView, ...]:
    """Every machine of the simulated fleet, as its folder's report says."""
    reports = [json.loads((folder / "report.json").read_text()) for folder in FOLDERS]
    facts = [facts_from_report({**report, "started_at": "2026-11-30T10:00:00Z"}) for report in reports]
    return tuple(HostView(host=Host(name="machine"), reached=True, facts=one) for one in facts)


def is_simulated(row: Row) -> bool:
    """Whether some machine of the simulated fleet would take such a job: of gangs one machine proves nothing."""
    if not row.allowed or row.kind is support.JobKind.DISTRIBUTED:
        return False
    job = jobs.IndependentJob(name="job", accelerator=row.accelerator, framework=row.framework, command=("true",))
    return any(isinstance(verdict(job, view), Fits) for view in views())


@pytest.mark.parametrize("row", matrix(), ids=lambda row: f"{row.accelerator}-{row.kind}-{row.framework or 'any'}")
def test_a_row_is_called_simulated_exactly_where_a_simulated_machine_takes_the_job(row: Row) -> None:
    expected = Evidence.SIMULATED if is_simulated(row) else Evidence.NONE
    assert row.evidence in {expected, Evidence.HARDWARE}, f"gpulayer/spec/support.py: {row}"
