from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.errors import InvalidDocumentError
from gpulayer.spec import documents
from gpulayer.spec.documents import Document, parse
from tests.fuzz import documents as fuzz


def read(text: str | bytes) -> Document:
    return parse(text.encode() if isinstance(text, str) else text, "f.yaml")


def value_of(text: str) -> Any:
    document = read(text)
    assert document.problems == []
    return document.value


def places(text: str | bytes) -> list[tuple[int, int, str]]:
    """All problems of a text, whether it can be read on or not."""
    try:
        problems = tuple(read(text).problems)
    except InvalidDocumentError as error:
        problems = error.problems
    return [(problem.line, problem.column, problem.message) for problem in problems]


def only(text: str | bytes) -> tuple[int, int, str]:
    (place,) = places(text)
    return place


# What scalars mean


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("NO", "NO"),
        ("yes", "yes"),
        ("on", "on"),
        ("True", "True"),
        ("Null", "Null"),
        ("22:22", "22:22"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0x1F", "0x1F"),
        ("0o17", "0o17"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
        ("nan", "nan"),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-7", -7),
        ("+5", 5),
        ("1.50", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("6e-05", 6e-05),
        ("9223372036854775807", 2**63 - 1),
        ('"3"', "3"),
        ("'true'", "true"),
        ('""', ""),
        ("|\n  a\n  b", "a\nb"),
    ],
)
def test_a_scalar_means_what_people_mean_by_it(written: str, value: object) -> None:
    got = value_of(f"x: {written}")["x"]
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize("key", ["on", "NO", "true", "1", "1.0", "0755", "2024-01-01", "~", "22:22"])
def test_a_key_is_the_text_that_is_written(key: str) -> None:
    assert value_of(f"{key}: push") == {key: "push"}


@pytest.mark.parametrize(
    "written", ["0755", "-012", "00", "007.5", ".nan", ".NaN", ".inf", "-.Inf", "+.INF", "NaN", "-Infinity", "1e999"]
)
def test_a_number_that_is_ambiguous_or_not_finite_is_refused_with_its_fix(written: str) -> None:
    line, column, message = only(f"a: 1\nx: {written}\n")
    assert (line, column) == (2, 4)
    assert f'write "{written}"' in message


def test_a_number_beyond_64_bits_is_refused() -> None:
    assert "64 bits" in only("x: 9223372036854775808")[2]
    assert "64 bits" in only("x: " + "9" * 10_000)[2]


# Keys, anchors, tags


def test_a_key_that_is_here_twice_is_refused_with_both_lines() -> None:
    document = read("resources:\n  gpus: 1\n  cpus: 2\n  gpus: 8\n")
    (problem,) = document.problems
    assert (problem.line, problem.column, problem.field) == (4, 3, "resources.gpus")
    assert "lines 2 and 4" in problem.message
    assert document.value == {"resources": {"gpus": 1, "cpus": 2}}


def test_each_repeated_key_is_told() -> None:
    assert [(line, column) for line, column, _ in places("a: 1\na: {b: 1, b: 2}\na: 3\n'<<': 1\n'<<': 2")] == [
        (2, 1),
        (2, 11),
        (3, 1),
        (5, 1),
    ]


def test_anchors_and_merge_keys_work_and_written_keys_win() -> None:
    document = read(
        "base: &base {a: 1, b: [x, y]}\n"
        "more: &more {c: 3, a: 9}\n"
        "one: {b: own, <<: *base}\n"
        "two: {<<: [*base, *more], d: 4}\n"
        "list: &l [1]\n"
        "same: *l\n"
        "text: &t hello\n"
        "again: *t\n"
    )
    assert document.problems == []
    assert document.value["one"] == {"b": "own", "a": 1}
    assert document.value["two"] == {"d": 4, "a": 1, "b": ["x", "y"], "c": 3}
    assert document.value["same"] == [1]
    assert document.value["again"] == "hello"
    assert document.position(["one", "a"]) == (1, 17)
    assert document.position(["two", "c"], key=True) == (2, 14)
    assert document.position(["one", "b"]) == (3, 10)
    assert document.position(["two", "d"]) == (4, 30)


@pytest.mark.parametrize("text", ["a: {<<: 3}", "a: {<<: [1]}", "a: {<<: []}", "b: &b [1]\na: {<<: *b}"])
def test_a_merge_of_something_else_is_refused(text: str) -> None:
    assert "merge" in only(text)[2]


def test_a_quoted_merge_key_is_a_key() -> None:
    assert value_of("{'<<': 1, b: 2}") == {"<<": 1, "b": 2}


def test_an_alias_to_itself_is_refused() -> None:
    assert only("a: &a [*a]") == (1, 8, "the alias *a stands inside its own anchor")
    assert "inside its own anchor" in only("a: &a {b: {<<: *a}}")[2]


def test_an_alias_of_nothing_is_refused() -> None:
    assert "no anchor &b" in only("a: *b")[2]


@pytest.mark.parametrize(
    "text",
    [
        'a: !!python/object/apply:os.system ["touch touched"]',
        "a: !!binary aGVsbG8=",
        "a: !!set {b}",
        "a: !!omap [b: 1]",
        "a: !mine 3",
        "a: !!str 3",
        "a: ! x",
        "!mine a: 3",
    ],
)
def test_a_tag_is_refused_and_nothing_is_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tag" in only(text)[2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["[a]: 1", "{a: 1}: 1", "a: &k b\n? *k\n: 1"])
def test_a_key_that_is_no_text_is_refused(text: str) -> None:
    assert "a key must be plain text" in only(text)[2]


# Limits


def bomb(levels: int = 9) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_an_alias_bomb_costs_nothing() -> None:
    text = bomb()
    tracemalloc.start()
    try:
        assert "1,000,000 values" in only(text)[2]
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    start = time.process_time()
    assert places(text)
    assert time.process_time() - start < 0.1


def test_nodes_are_counted_with_aliases_expanded() -> None:
    block = f"a: &a [{', '.join(['1'] * 997)}]\n"  # 998 nodes: the list and its entries
    # The outer mapping, its two keys and the list b make four more: 1,002 x 998 + 4 = 1,000,000.
    assert len(read(block + "b: [" + ", ".join(["*a"] * 1_001) + "]\n").value["b"]) == 1_001
    assert "1,000,000 values" in only(block + "b: [" + ", ".join(["*a"] * 1_002) + "]\n")[2]


@pytest.mark.parametrize("opening", ["[", "{a: "])
@pytest.mark.parametrize("count", [65, 1_000, 100_000])
def test_too_deep_is_refused(opening: str, count: int) -> None:
    assert "64 deep" in only(opening * count)[2]


def test_depth_64_is_fine_and_aliases_count() -> None:
    assert value_of("[" * 64 + "]" * 64)
    half = "a: &a " + "[" * 40 + "]" * 40
    assert value_of(f"{half}\nb: " + "[" * 22 + "*a" + "]" * 22)
    assert "64 deep" in only(f"{half}\nb: " + "[" * 24 + "*a" + "]" * 24)[2]


def test_a_file_above_16_mib_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(documents.MAX_BYTES + 1)
    with pytest.raises(InvalidDocumentError, match="larger than 16 MiB"):
        documents.load(path)


def test_problems_are_bounded_too() -> None:
    found = places("x: [" + ", ".join(["0755"] * 5_000) + "]")
    assert len(found) == documents.MAX_PROBLEMS + 1
    assert "the rest was not read" in found[-1][2]


# Encodings and files


@pytest.mark.parametrize(
    ("data", "place", "words"),
    [
        ("a: 1".encode("utf-16"), (1, 1), "looks like UTF-16"),
        ("a: 1".encode("utf-16-le"), (1, 2), "NUL"),
        (b"a: 1\nb: \xffx", (2, 4), "0xff"),
        ("é: ".encode() + b"\xe9", (1, 4), "not UTF-8"),
        (b"a: 1\r\nb: x\0", (2, 5), "NUL"),
        (b"a: \x1b[0m", (1, 4), "U+001B"),
        (b"a: 1\nb: \x7f", (2, 4), "U+007F"),
        (b"\ta: 1", (1, 1), "tab"),
        (b"a: 'x", (1, 6), "not valid YAML"),
        (b"a: 1\nb", (2, 2), "could not find"),
        (b"a: 1\nb: [\n", (3, 1), "not valid YAML"),
        (b"a: 1\n---\nb: 2", (2, 1), "second document"),
        (b"\xef\xbb\xbf\xef\xbb\xbfa: 1", (1, 1), "two byte order marks"),
        (b"", (1, 1), "empty"),
        (b"# nothing\n", (1, 1), "empty"),
        (b"--- \n", (1, 1), ""),
    ],
)
def test_what_is_no_document_is_refused_at_its_place(data: bytes, place: tuple[int, int], words: str) -> None:
    found = places(data)
    if not words:
        assert found == []  # an empty document is the value null, and the schema's to refuse
        return
    ((line, column, message),) = found
    assert (line, column) == place
    assert words in message


def test_a_byte_order_mark_alone_is_accepted() -> None:
    document = read(b"\xef\xbb\xbfa: 1\nb: 0755")
    assert document.value["a"] == 1
    assert document.problems[0].source == "b: 0755"
    assert document.position(["a"], key=True) == (1, 1)
    (problem,) = read(b"\xef\xbb\xbfa: 0755").problems
    assert (problem.line, problem.column, problem.source) == (1, 4, "a: 0755")


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, words in (
        (fifo, "a pipe"),
        (tmp_path, "a folder"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "missing.yaml", "no such file"),
        (tmp_path / "missing" / "a.yaml", "no such file"),
        (Path("a\0b"), "cannot be opened"),
    ):
        with pytest.raises(InvalidDocumentError, match=words) as caught:
            documents.load(path)
        assert str(caught.value).startswith(f"{path}: ")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: ü\n", "utf-8")
    document = documents.load(path)
    assert (document.value, document.path) == ({"a": "ü"}, str(path))


# Places and messages


def test_a_problem_has_the_form_that_editors_know() -> None:
    document = read("a:\n  b: [x, {c: dedicatd}]\n")
    assert str(document.problem(["a", "b", 1, "c"], "is not a word")) == (
        "f.yaml:2:14: a.b[1].c: is not a word\n      b: [x, {c: dedicatd}]\n                 ^"
    )


def test_where_the_pointer_leads_past_what_is_written_the_last_part_counts() -> None:
    document = read("a:\n  b: 1\n")
    assert document.position(["a", "z", "y"]) == (2, 3)
    assert document.position(["a", "b", "c"]) == (2, 6)
    assert document.position([]) == (1, 1)


def test_what_is_missing_at_the_end_is_missing_behind_the_last_character() -> None:
    problem = read("---").problem([], "is empty")
    assert (problem.line, problem.column, problem.source) == (1, 4, "---")


def test_a_line_is_shown_without_what_a_terminal_would_obey() -> None:
    document = read("a: \u202e0\tx\n")
    assert document.source(1) == "a: \N{REPLACEMENT CHARACTER}0 x"
    assert read("a: " + "x" * 500).source(1) is None


def test_lines_are_counted_as_the_parser_counts_them() -> None:
    document = read("a: 1\r\nb: 2\rc: 3\u2028d: 4\x85e: 0755\n")
    (problem,) = document.problems
    assert (problem.line, problem.column, problem.source) == (5, 4, "e: 0755")


# Properties


_text = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp", "Cn"], exclude_characters="\ufeff\ufffe\uffff"),
    max_size=12,
)
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    _text,
    st.sampled_from(["NO", "0755", "~", "null", "<<", "1e5", "2024-01-01", "", "&a", "*a", "!x", "# x", ": "]),
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4), max_leaves=12
)


def leaves(value: Any, pointer: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*pointer, key))
    elif isinstance(value, list):
        for nth, inner in enumerate(value):
            yield from leaves(inner, (*pointer, nth))
    else:
        yield pointer, value


@given(_values)
@settings(deadline=None)
def test_json_comes_back_as_it_was_and_each_value_is_where_it_is_said_to_be(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2)
    document = read(text)
    assert document.problems == []
    assert json.dumps(document.value) == json.dumps(value)
    lines = text.split("\n")
    for pointer, leaf in leaves(value):
        line, column = document.position(pointer)
        written = json.dumps(leaf, ensure_ascii=False)
        assert lines[line - 1][column - 1 :].startswith(written)
        if pointer and isinstance(pointer[-1], str):
            line, column = document.position(pointer, key=True)
            assert lines[line - 1][column - 1 :].startswith(json.dumps(pointer[-1], ensure_ascii=False))


_fragments = st.sampled_from(
    [
        *("version: 1\n", "jobs:\n", "hosts:\n", "  a:\n", "    command: x\n", "{", "}", "[", "]", ",", ": ", "- "),
        *(
            "&a ",
            "*a",
            "<<: ",
            "? ",
            "!x ",
            "|\n",
            ">\n",
            "'",
            '"',
            "\n",
            "  ",
            "\t",
            "#",
            "---\n",
            "...\n",
            "%YAML 1.1\n",
        ),
        *("0755", ".nan", "1e999", "~", "a", "é", "\u2028", "\x85", "\0", "\x1b", "\ufeff", "\U000e0041"),
    ]
)


@given(st.one_of(st.binary(max_size=60), st.lists(_fragments, max_size=25).map(lambda parts: "".join(parts).encode())))
@settings(deadline=None, max_examples=300)
def test_any_bytes_hold_or_their_problems_stand_at_places_of_the_file(data: bytes) -> None:
    fuzz.check(data)
