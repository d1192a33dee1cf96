"""The probe's words: what producers say, the schema allows and the documentation tells are the same sets."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpulayer.gpu import discovery, facts
from gpulayer.gpu.discovery import FRAMEWORKS, probe
from gpulayer.gpu.discovery_notes import NOTE_CODES, NOTES
from gpulayer.gpu.discovery_nvidia import _TROUBLE
from gpulayer.spec.support import CAPABILITIES, Framework
from tests.machines import mac_recording, play

ROOT = Path(__file__).parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "schemas" / "probe.schema.json").read_text())
DOCUMENT = (ROOT / "docs" / "probe.md").read_text()
PRODUCERS = sorted((ROOT / "gpulayer" / "gpu").glob("discovery*.py"))


def produced() -> Iterator[str]:
    """Every code that a producer adds by name, and those that the driver's troubles are named by."""
    calls = (node for path in PRODUCERS for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add" and isinstance(call.args[0], ast.Constant):
            yield str(call.args[0].value)
    yield from _TROUBLE


def property_of(*path: str) -> Any:
    node = SCHEMA
    for key in path:
        node = node[key]
    return node


def test_notes_are_the_same_in_producers_schema_and_documentation() -> None:
    codes = set(NOTE_CODES)
    assert set(produced()) == codes
    assert set(property_of("properties", "notes", "items", "properties", "code", "enum")) == codes
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", DOCUMENT, re.MULTILINE)
    assert dict(rows) == dict(NOTES)


def test_capabilities_of_the_schema_are_those_of_the_matrix() -> None:
    assert property_of("properties", "capabilities", "items", "enum") == list(CAPABILITIES)
    documented = set(re.findall(r"`((?:torch|mlx|executorch)[\w.]*)`", DOCUMENT))
    assert {word for word in documented if word in CAPABILITIES} >= {"torch", "torch.mps", "torch.cuda", "torch.rocm"}


def test_frameworks_are_those_that_jobs_name() -> None:
    assert set(FRAMEWORKS) == set(Framework)
    assert set(property_of("properties", "frameworks", "items", "properties", "name", "enum")) == set(Framework)


def test_the_reader_and_the_schema_allow_the_same_words() -> None:
    device = property_of("properties", "devices", "items", "properties")
    assert device["accelerator"]["enum"] == list(facts._ACCELERATORS)
    assert device["memory_kind"]["enum"] == [*facts._MEMORY_KINDS, None]
    assert device["select_env"]["propertyNames"]["enum"] == list(facts._SELECTORS)
    assert property_of("properties", "frameworks", "items", "properties", "status", "enum") == list(facts._STATUSES)
    assert property_of("properties", "host", "properties", "os", "enum") == [*facts._SYSTEMS, None]
    assert property_of("properties", "schema", "const") == facts.SCHEMA == discovery.SCHEMA


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with every object closed: a producer writes no key that the schema does not have."""
    inner = {key: closed(value) if isinstance(value, dict) else value for key, value in schema.items()}
    return {**inner, "additionalProperties": False} if "properties" in inner and "required" in inner else inner


@pytest.mark.parametrize("mac", [True, False])
def test_reports_hold_against_the_schema(mac: bool) -> None:
    report = probe(sys.executable, ["mlx"], system=play(mac_recording()) if mac else None)
    validator = jsonschema.Draft202012Validator(closed(SCHEMA))
    assert [error.message for error in validator.iter_errors(report)] == []
    assert list(report) == SCHEMA["required"]


def test_the_schema_refuses_what_no_probe_says() -> None:
    report = probe(sys.executable, system=play(mac_recording()))
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for path, value in (("memory_bytes", 0), ("accelerator", "tpu"), ("memory_kind", "vram"), ("health", None)):
        wrong = json.loads(json.dumps(report))
        wrong["devices"][0][path] = value
        assert not validator.is_valid(wrong)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m gpulayer.probe` without site-packages. Never imported: as a name of the SDK `probe` is a function."""
    program = [sys.executable, "-S", "-m", "gpulayer.probe", *arguments]
    return subprocess.run(program, cwd=ROOT, check=False, capture_output=True, text=True)


def test_the_command_prints_one_document_and_needs_nothing_installed() -> None:
    answer = command("--frameworks", "")
    assert (answer.returncode, answer.stderr) == (0, "")
    report = json.loads(answer.stdout)
    assert (report["schema"], report["frameworks"]) == ("gpulayer.probe/1", [])


def test_a_reader_of_the_command_that_leaves_is_no_fault() -> None:
    program = [sys.executable, "-S", "-m", "gpulayer.probe", "--frameworks", ""]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_the_command_refuses_a_framework_that_it_does_not_know() -> None:
    answer = command("--frameworks", "tensorflow")
    assert answer.returncode == 2
    assert "'tensorflow' is not one of torch, mlx, executorch" in answer.stderr
