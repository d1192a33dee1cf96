"""The entries of a document (jobs, hosts): defaults merged into them, and where each part of one is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpulayer.errors import InvalidDocumentError, Problem
from gpulayer.spec.documents import Document

_NOTHING: Mapping[str, Any] = {}


class Fault(NamedTuple):
    """Something that the schema cannot see: at the value of `pointer` below an entry, or with `key` at its key."""

    pointer: tuple[str | int, ...]
    message: str
    key: bool = False


def merged(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `own` over `defaults`: mappings key by key, lists as a whole. What is null (`~`) is left out."""
    values: dict[str, Any] = {}
    for key, value in (*defaults.items(), *own.items()):
        if isinstance(value, dict):
            base = values.get(key)
            values[key] = merged(base if isinstance(base, dict) else _NOTHING, value)
        elif value is None:
            values.pop(key, None)
        else:
            values[key] = value
    return values


def located(document: Document, entries: str, name: str, faults: Iterable[Fault]) -> list[Problem]:
    """Return the faults of one entry as problems, each where it is written: in the entry, else in the defaults."""
    return [_located(document, entries, name, fault) for fault in faults]


def _located(document: Document, entries: str, name: str, fault: Fault) -> Problem:
    for start in ((entries, name), ("defaults",)):
        pointer = (*start, *fault.pointer)
        if _is_written(document.value, pointer):
            return document.problem(pointer, fault.message, key=fault.key)
    return document.problem((entries, name), fault.message, key=True)


def _is_written(value: Any, pointer: Sequence[str | int]) -> bool:  # noqa: ANN401 - a document's value is anything
    try:
        for part in pointer:
            value = value[part]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def refuse(problems: Iterable[Problem]) -> InvalidDocumentError:
    """Return the error that carries all problems, each once (a default has them for many), in the order of the file."""
    return InvalidDocumentError(sorted(dict.fromkeys(problems), key=lambda problem: (problem.line, problem.column)))
