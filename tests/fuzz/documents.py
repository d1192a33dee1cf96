"""What holds for any bytes that are read as a document, whoever wrote them."""

from __future__ import annotations

import contextlib
from typing import Any

import yaml

from gpulayer.errors import InvalidDocumentError, Problem
from gpulayer.spec.documents import MAX_DEPTH, Document, parse
from gpulayer.spec.inventory import parse_inventory
from gpulayer.spec.jobs import parse_jobs


def check(data: bytes) -> None:
    """Read `data` as jobs and as an inventory: either they hold, or their problems stand at places of the file."""
    document = _parsed(data)
    if document is None:
        return
    if b"<<" not in data and not document.problems:
        with contextlib.suppress(yaml.composer.ComposerError):  # an anchor that is named twice, which YAML 1.2 allows
            assert _same(document.value, _as_yaml_reads_it(data)), data
    for read in (parse_jobs, parse_inventory):
        try:
            assert read(document)
        except InvalidDocumentError as error:
            _stand_in(data, error.problems)


def _parsed(data: bytes) -> Document | None:
    try:
        document = parse(data, "f.yaml")
    except InvalidDocumentError as error:
        _stand_in(data, error.problems)
        return None
    if document.problems:
        _stand_in(data, tuple(document.problems))
    assert _depth(document.value) <= MAX_DEPTH
    return document


def _stand_in(data: bytes, problems: tuple[Problem, ...]) -> None:
    """There are problems, each with a place between the file's first and last character and one line of words."""
    assert problems, data
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    lines = text.replace("\r\n", "\n")
    for mark in "\r\x85\u2028\u2029":
        lines = lines.replace(mark, "\n")
    widths = [len(line) for line in lines.split("\n")]
    for problem in problems:
        assert 1 <= problem.line <= len(widths), (data, problem)
        assert 1 <= problem.column <= widths[problem.line - 1] + 1, (data, problem)
        assert str(problem).startswith(f"f.yaml:{problem.line}:{problem.column}: ")
        assert problem.message.isprintable(), (data, problem)


def _as_yaml_reads_it(data: bytes) -> Any:
    """The same document by PyYAML, in which each scalar is text. It was bounded before."""
    return yaml.load(data, yaml.CBaseLoader)  # noqa: S506 - makes text, lists and mappings alone


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return isinstance(theirs, dict) and list(ours) == list(theirs) and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return isinstance(theirs, list) and len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if not isinstance(theirs, str):
        return False
    if isinstance(ours, bool):
        return theirs == str(ours).lower()
    if isinstance(ours, int | float):
        return ours == (int(theirs) if isinstance(ours, int) else float(theirs))
    return theirs in {"", "~", "null"} if ours is None else bool(ours == theirs)


def _depth(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0
