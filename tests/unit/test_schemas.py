from __future__ import annotations

import dataclasses
import http.server
import json
import string
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.errors import InvalidDocumentError, Problem, UsageError
from gpulayer.spec import inventory, jobs, schemas, support
from gpulayer.spec.documents import Document, parse


def read(text: str) -> Document:
    return parse(text.encode(), "f.yaml")


def refused(work: Callable[[], object]) -> tuple[Problem, ...] | None:
    """The problems with which `work` ends, or None where it does not."""
    try:
        work()
    except InvalidDocumentError as error:
        return error.problems
    return None


def parts(part: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema."""
    yield where, part
    inner = [(key, own) for name in ("properties", "$defs") for key, own in part.get(name, {}).items()]
    inner += [(key, part[key]) for key in ("items", "propertyNames", "additionalProperties") if key in part]
    inner += [(f"anyOf[{nth}]", own) for nth, own in enumerate(part.get("anyOf", []))]
    for key, own in inner:
        if isinstance(own, dict):
            yield from parts(own, f"{where}.{key}")


def kinds(part: dict[str, Any]) -> set[str]:
    kind = part.get("type", [])
    return {kind} if isinstance(kind, str) else set(kind)


SCHEMAS = [(name, *one) for name in ("inventory", "jobs") for one in parts(schemas.schema(name), name)]


@pytest.mark.parametrize("name", ["inventory", "jobs"])
def test_a_schema_is_one_and_says_what_it_is_for(name: str) -> None:
    schema = schemas.schema(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"].startswith("urn:gpulayer:")
    assert schema["title"]
    for where, part in parts(schema, name):
        for key, own in part.get("properties", {}).items():
            assert "$ref" in own or own.get("description"), f"an editor shows nothing for {where}.{key}"


def test_every_rule_of_a_schema_has_words_for_who_breaks_it() -> None:
    structural = {"properties", "items", "propertyNames", "additionalProperties", "anyOf", "$ref", "$defs"}
    notes = {"$id", "$schema", "title", "description", "x-rule"}
    for _, where, part in SCHEMAS:
        assert part.keys() <= structural | notes | schemas._MESSAGES.keys(), where
        if "pattern" in part or "anyOf" in part:
            assert part["x-rule"], where


def test_every_schema_is_bounded_and_closed() -> None:
    for _, where, part in SCHEMAS:
        if "string" in kinds(part) or "pattern" in part:
            assert "maxLength" in part, where
        if "array" in kinds(part):
            assert "maxItems" in part, where
        if "pattern" in part:  # re.fullmatch and the compiled validator's search agree on these alone
            assert part["pattern"].startswith("^"), where
            assert part["pattern"].endswith("$"), where
        if "object" in kinds(part):
            assert part["additionalProperties"] is False or "propertyNames" in part, where
        if part.get("uniqueItems"):
            assert not {"object", "array"} & kinds(part["items"]), where


# One vocabulary


def enumerations(name: str) -> dict[str, set[str]]:
    """Each enumeration of a schema by the property that has it."""
    found: dict[str, set[str]] = {}
    for where, part in parts(schemas.schema(name), name):
        if "enum" in part:
            found[where.removesuffix(".items").rsplit(".", 1)[-1]] = {word for word in part["enum"] if word is not None}
    return found


def test_the_words_of_the_schemas_are_those_of_the_support_matrix() -> None:
    assert enumerations("jobs") == {
        "accelerator": set(support.Accelerator),
        "framework": set(support.Framework),
        "gpu_memory_kind": set(support.MemoryKind),
        "capabilities": set(support.CAPABILITIES),
        "dtypes": set(support.DTYPES),
        "backend": set(support.Backend),
        "on": set(jobs.Cause),
    }
    assert enumerations("inventory") == {
        "accelerator": set(support.Accelerator),
        "transport": set(inventory.TransportKind),
        "jobs_per_device": {1},
    }


def fields(value: type) -> set[str]:
    return {one.name for one in dataclasses.fields(value)}


def test_a_schema_has_the_fields_of_its_values_and_no_others() -> None:
    job = schemas.schema("jobs")["$defs"]["job"]["properties"]
    host = schemas.schema("inventory")["$defs"]["host"]["properties"]
    assert set(job) == fields(jobs.DistributedJob) - {"name"}
    assert set(job["resources"]["properties"]) == fields(jobs.ResourceRequest)
    assert set(job["where"]["properties"]) == fields(jobs.Where)
    assert set(job["distributed"]["properties"]) == fields(jobs.Distributed)
    assert set(host) == fields(inventory.Host) - {"name"} | {"jobs_per_device"}
    assert set(host["expect"]["properties"]) == fields(inventory.Expectation)


def test_an_unknown_schema_is_a_usage_error_that_names_the_known() -> None:
    assert {"inventory", "jobs"} <= set(schemas.names())
    with pytest.raises(UsageError, match="inventory"):
        schemas.schema("jbs")


def test_no_schema_makes_a_validator_fetch_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    hits = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/x"
        with urllib.request.urlopen(address) as answer:  # the control: a request is seen
            assert answer.status == 200
        assert hits.pop() == "/x"
        monkeypatch.setattr(schemas, "schema", lambda _: {"type": "object", "properties": {"a": {"$ref": address}}})
        with pytest.raises(Exception, match="not fetched"):
            schemas._gate("remote")
        with pytest.raises(Exception, match="Unresolvable"):
            list(schemas._judge("remote").iter_errors({"a": 1}))
        assert hits == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        schemas._gate.cache_clear()
        schemas._judge.cache_clear()


@pytest.mark.parametrize(
    ("key", "entries"),
    [
        ("outputs", ", ".join(f"{{a: {n}}}" for n in range(2_000))),
        ("secrets", ", ".join(f"s{n}" for n in range(20_000))),
        ("accelerator", ", ".join(f"[{n}]" for n in range(20_000))),
        ("accelerator", ", ".join("a" for _ in range(20_000))),
    ],
)
def test_a_list_that_is_too_long_is_told_so_and_not_read_through(key: str, entries: str) -> None:
    document = read(f"version: 1\njobs: {{a: {{command: x, {key}: [{entries}]}}}}")
    schemas.validate(document, "jobs")  # what is loaded for the first time is not what is measured
    start = time.process_time()
    problems = schemas.validate(document, "jobs")
    assert time.process_time() - start < 1
    assert "entries are too many" in problems[0].message
    assert len(problems) <= 2


def test_a_mapping_that_is_too_long_is_told_so_alone() -> None:
    many = ", ".join(f"0-{n}: 1" for n in range(2_000))
    (problem,) = schemas.validate(read(f"version: 1\njobs: {{a: {{command: x, env: {{{many}}}}}}}"), "jobs")
    assert problem.message == "2,000 entries are too many; at most 1,000"


_words = st.text(string.ascii_lowercase + "-_.=> 0129\n", max_size=8)
_loose = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 1_000_000),
        st.sampled_from([0.0, 1.0, 2.5, -1.0, 1e9]),
        _words,
        st.sampled_from(["cuda", "mps", "torch", "gloo", "float64", "2h", ">=8.0", "SHA256:x", "~/x", "../x", "a"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=4,
)


def properties(name: str, definition: str) -> list[str]:
    return [*schemas.schema(name)["$defs"][definition]["properties"], "gpuz", "x"]


@st.composite
def _near_documents(draw: st.DrawFn) -> tuple[str, Any]:
    name, entries, definition = draw(st.sampled_from([("jobs", "jobs", "job"), ("inventory", "hosts", "host")]))
    entry = st.dictionaries(st.sampled_from(properties(name, definition)), _loose, max_size=4) | _loose
    names = st.sampled_from(["a", "b-1", "A", "x\n", "-rf", ""])
    document: dict[str, Any] = {
        "version": draw(st.sampled_from([1, 1, 1, 2, 1.0])),
        entries: draw(st.dictionaries(names, entry, max_size=3)),
    }
    if draw(st.booleans()):
        document["defaults"] = draw(entry)
    return name, document


@given(_near_documents())
@settings(deadline=None, max_examples=150)
def test_what_the_gate_refuses_is_explained_and_nothing_else_is(case: tuple[str, Any]) -> None:
    name, value = case
    document = read(json.dumps(value))
    holds = schemas._gate(name).is_valid(value) and not schemas._doubtful(document, name)
    problems = schemas.validate(document, name)
    assert holds == (not problems)
    check = jobs.parse_jobs if name == "jobs" else inventory.parse_inventory
    told = refused(lambda: check(document))
    assert set(problems) <= set(told or ())
    assert holds or told
