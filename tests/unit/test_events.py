"""The schemas of events and status say what the code says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpulayer.placement.plan import KnownRun
from gpulayer.remote import states
from gpulayer.run.afterwards import status_document
from gpulayer.run.events import EVENTS, Event, now, status_event
from gpulayer.run.work import EXIT_CODES, Outcome

SCHEMAS = Path(__file__).parents[2] / "schemas"


def schema(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(document)
    return document


def run(status: str) -> KnownRun:
    return KnownRun(run="a-0123456789ab-a1", job="a", key="0123456789ab", attempt=1, host="h", status=status, code=0)


def summary_of(document: dict[str, Any]) -> dict[str, Any]:
    (rule,) = [
        rule["then"]["properties"]
        for rule in document["allOf"]
        if rule["if"]["properties"]["event"].get("const") == "summary"
    ]
    return dict(rule)


def test_words_of_events_are_equal() -> None:
    assert set(schema("event")["properties"]["event"]["enum"]) == EVENTS
    statuses = schema("event")["allOf"][0]["if"]["properties"]["event"]["enum"]
    assert set(statuses) == set(states.MOVES)


def test_words_of_status_are_equal() -> None:
    words = schema("status")["properties"]["runs"]["items"]["properties"]["status"]["enum"]
    assert set(words) == set(states.MOVES)


def test_what_is_left_has_one_form_in_events_and_status() -> None:
    event, status = schema("event"), schema("status")
    for name in ("foreign_process", "left"):
        assert status["properties"]["runs"]["items"]["properties"][name] == event["properties"][name]
    assert status["$defs"] == event["$defs"]


def test_words_of_the_summary_are_equal() -> None:
    summary = summary_of(schema("event"))
    assert set(summary["counts"]["propertyNames"]["enum"]) == {outcome.value for outcome in Outcome}
    assert set(summary["exit_code"]["enum"]) == {int(code) for code in EXIT_CODES.values()}
    assert set(EXIT_CODES) == set(Outcome)


@pytest.mark.parametrize("status", sorted(states.MOVES))
def test_a_status_holds(status: str) -> None:
    assert jsonschema.Draft202012Validator(schema("event")).is_valid(status_event(run(status)).to_json())
    assert jsonschema.Draft202012Validator(schema("status")).is_valid(status_document([run(status)]))


@pytest.mark.parametrize(
    ("event", "detail"),
    [
        ("output", {}),
        ("fetched", {"files": 1, "bytes": 2, "path": "p", "skipped": []}),
        ("warning", {"message": "m"}),
        ("summary", {"counts": {"perhaps": 1}, "exit_code": 0}),
        ("summary", {"counts": {}, "exit_code": 2}),
        ("running", {}),
        ("guess", {}),
    ],
)
def test_an_event_without_what_belongs_to_it_is_refused(event: str, detail: dict[str, Any]) -> None:
    document = Event(event=event, at=now(), job="a", run="r", host="h", detail=detail).to_json()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema("event"))
