"""YAML documents as plain data, with the line and column of every key and value.

YAML here is what people mean by it: `NO`, `on`, `22:22` and `2024-01-01` are text, only true, false and null (or `~`,
or nothing) are not, numbers are decimal, and what could be read in two ways is refused. Documents come from others, so
size, depth and the number of nodes after alias expansion are bounded while the parser's events are read.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import yaml

from gpulayer.errors import InvalidDocumentError, Problem
from gpulayer.spec import files

MAX_BYTES: Final = 16 * 2**20
MAX_NODES: Final = 1_000_000
MAX_DEPTH: Final = 64
MAX_PROBLEMS: Final = 1_000

Pointer = Sequence[str | int]
Scalar = str | int | float | bool | None
Mark = yaml.error.Mark
# Mirrors a value: a mark for a scalar, [mark, value…] for a list, [mark, key, value, key, value…] for a mapping.
Marks = Mark | list["Marks"]

# What libyaml counts as the end of a line.
_BREAK: Final = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_UNPRINTABLE: Final = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NUMBER: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INTEGER: Final = re.compile(r"[-+]?[0-9]+")
_LEADING_ZERO: Final = re.compile(r"[-+]?0[0-9]")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)|NaN|[-+]?Infinity")
_PLAIN_FIELD: Final = re.compile(r"[\w-][\w.-]*")
_TOKEN: Final = re.compile(r"(?:&\S+\s+)?([^*\s,\]}][^\s,\]}]*)")
_INTEGER_LIMIT: Final = 2**63
_LONGEST_INTEGER: Final = len(str(-_INTEGER_LIMIT))
_LONGEST_LINE: Final = 200
_LONGEST_VALUE: Final = 80

_TOO_DEEP: Final = f"the document is nested more than {MAX_DEPTH} deep"

# Stands for the key `<<` until its mapping is complete. Keys that are no text never outlive that moment.
_MERGE: Final = object()


class _Unreadable(Exception):  # noqa: N818 - never leaves this module
    """Reading cannot go on; the place is a mark of the parser's."""

    def __init__(self, message: str, mark: Mark | None) -> None:
        super().__init__(message)
        self.message = message
        self.mark = mark


class _Ambiguous(ValueError):  # noqa: N818 - never leaves this module
    """A plain scalar that must be written otherwise."""


class Document:
    """A document's value, and where each part of it is written.

    `value` holds dict, list, str, int, float, bool and None; keys are always text, as written. `problems` left the rest
    readable (duplicate keys, tags, ambiguous numbers): whoever checks the document reports them too.
    `integral_floats` points at numbers like `1.0`, which JSON Schema takes for integers and people do not.
    """

    __slots__ = ("_index", "_lines", "_marks", "integral_floats", "path", "problems", "value")

    def __init__(self, path: str, text: str) -> None:
        """Start without a value: `parse` fills it in."""
        self.path = path
        self.value: Any = None
        self.problems: list[Problem] = []
        self.integral_floats: list[tuple[str | int, ...]] = []
        self._lines: str | list[str] = text
        self._marks: Any = None
        self._index: dict[int, dict[str, int]] = {}

    def position(self, pointer: Pointer, *, key: bool = False) -> tuple[int, int]:
        """Return line and column, from 1, of the value at `pointer`, or with `key` of its key.

        Where the pointer leads past what is written, the last part that is there counts.
        """
        value, marks, key_mark = self.value, self._marks, None
        for part in pointer:
            if isinstance(value, dict) and part in value:
                at = self._place(value, marks)[str(part)]
                value, key_mark, marks = value[part], marks[at], marks[at + 1]
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value, key_mark, marks = value[part], None, marks[part + 1]
            else:
                break
        mark = key_mark if key and key_mark is not None else _first(marks)
        return mark.line + 1, mark.column + 1

    def _place(self, value: dict[str, Any], marks: list[Any]) -> dict[str, int]:
        """Where the marks of each key of a mapping are; kept, since a mapping may have many problems."""
        index = self._index.get(id(marks))
        if index is None:
            index = self._index[id(marks)] = {name: 1 + 2 * nth for nth, name in enumerate(value)}
        return index

    def source(self, line: int) -> str | None:
        """Return a line (from 1) fit to be shown: one column a character; None where it is too long to help."""
        lines = self._all_lines()
        if not 0 < line <= len(lines) or len(lines[line - 1]) > _LONGEST_LINE:
            return None
        return "".join(
            char if char.isprintable() else " " if char == "\t" else "\N{REPLACEMENT CHARACTER}"
            for char in lines[line - 1]
        )

    def _end(self) -> tuple[int, int]:
        """Return line and column, from 1, behind the last character."""
        lines = self._all_lines()
        return len(lines), len(lines[-1]) + 1

    def _all_lines(self) -> list[str]:
        if isinstance(self._lines, str):
            self._lines = _BREAK.split(self._lines)
        return self._lines

    def written(self, pointer: Pointer) -> str:
        """Return the plain scalar at `pointer` as it is written (`3.10` where the value is 3.1); empty for an alias."""
        line, column = self.position(pointer)
        found = _TOKEN.match((self.source(line) or "")[column - 1 :])
        return found[1] if found else ""

    def problem(self, pointer: Pointer, message: str, *, key: bool = False) -> Problem:
        """Return a problem at the value (or key) that `pointer` leads to."""
        line, column = self.position(pointer, key=key)
        return self.problem_at(line, column, message, field=field_name(pointer))

    def problem_at(self, line: int, column: int, message: str, *, field: str = "") -> Problem:
        """Return a problem at a place of the text."""
        # The parser takes the file's end for a line's: what is missing there is missing at the end of the last line.
        line, column = min((line, column), self._end())
        return Problem(path=self.path, line=line, column=column, field=field, message=message, source=self.source(line))


def field_name(pointer: Pointer) -> str:
    """Return the name of a field as messages spell it: `resources.gpus` for `/jobs/matmul/resources/gpus`.

    The name of the job or host is left out, since the line shows where it is.
    """
    parts = pointer[2:] if pointer[2:] and pointer[0] in {"jobs", "hosts"} else pointer
    name = ""
    for part in parts:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += ("." if name else "") + (part if _PLAIN_FIELD.fullmatch(part) else show(part))
    return name


def show(value: object) -> str:
    """Return a value as messages quote it: escaped, on one line, and not long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 2]}…{text[-1]}"


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Turn the cyclic garbage collector off while many long-lived objects are made; it would scan them all, often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load(path: Path) -> Document:
    """Read and parse the file at `path`; only a regular file of at most 16 MiB is read.

    Raises InvalidDocumentError where it is missing, is no regular file, is too large or cannot be read as YAML.
    """
    name = str(path)
    try:
        data = files.read(path, MAX_BYTES)
    except files.UnusableFileError as error:
        raise InvalidDocumentError([Problem(path=name, line=0, column=0, field="", message=str(error))]) from None
    return parse(data, name)


def parse(data: bytes, path: str) -> Document:
    """Return the document in `data`; `path` is the name that its problems carry.

    Raises InvalidDocumentError where the bytes cannot be read as one YAML document within the limits. Problems that
    leave the rest readable are in `Document.problems`.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    text = _decode(data, path)
    document = Document(path, text)
    if text.startswith("\ufeff"):  # the parser would pass over it, and count its places without it
        _give_up(document, "the file begins with two byte order marks; save it as UTF-8 with one or none", None)
    loader = yaml.CSafeLoader(data)
    try:
        with collector_paused():
            _build(loader, document)
    except _Unreadable as error:
        _give_up(document, error.message, error.mark)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if error.problem and "nesting depth" in error.problem:  # the parser looks ahead, and has a limit of its own
            _give_up(document, _TOO_DEEP, mark)
        hint = " (a tab; indent with spaces)" if mark and text[mark.index : mark.index + 1] == "\t" else ""
        _give_up(document, f"this is not valid YAML: {error.problem or error.context}{hint}", mark)
    except yaml.YAMLError:
        # The only one without a mark is the reader's: a character that YAML does not allow.
        found = _UNPRINTABLE.search(text)
        at = found.start() if found else 0
        what = f"the character U+{ord(text[at]):04X} is not allowed in YAML" if found else "this is not valid YAML"
        raise InvalidDocumentError([*document.problems, document.problem_at(*_line_column(text[:at]), what)]) from None
    finally:
        loader.dispose()
    return document


def _give_up(document: Document, message: str, mark: Mark | None) -> NoReturn:
    """Raise what was found so far and `message`, which is why nothing more can be."""
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    raise InvalidDocumentError([*document.problems, document.problem_at(line, column, message)]) from None


def _decode(data: bytes, path: str) -> str:
    """Return the text; YAML's other encodings are refused, since no editor that people use writes them unasked."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        line, column = _line_column(before)
        hint = " (it looks like UTF-16)" if data[:2] in {b"\xff\xfe", b"\xfe\xff"} else ""
        message = f"the file is not UTF-8: byte 0x{data[error.start]:02x}{hint}; save it as UTF-8"
    else:
        at = text.find("\0")
        if at < 0:
            return text
        line, column = _line_column(text[:at])
        message = "the file holds a NUL character; save it as UTF-8 text"
    raise InvalidDocumentError([Problem(path=path, line=line, column=column, field="", message=message)])


def _line_column(before: str) -> tuple[int, int]:
    lines = _BREAK.split(before)
    return len(lines), len(lines[-1]) + 1


def _first(marks: Marks) -> Mark:
    first = marks[0] if isinstance(marks, list) else marks
    return cast("Mark", first)


class _Scalars(dict[str, Scalar]):
    """What each plain scalar means; equal ones are read once and share one object."""

    def __missing__(self, text: str) -> Scalar:
        value = self[text] = _meaning(text)
        return value


def _meaning(text: str) -> Scalar:
    """Return the value of a plain scalar: YAML 1.2's core schema without its octal and hexadecimal numbers."""
    if text in {"", "~", "null"}:
        return None
    if text in {"true", "false"}:
        return text == "true"
    if _NOT_FINITE.fullmatch(text):
        raise _Ambiguous(f'{text} is not a finite number; write "{text}" if text is meant')
    if not _NUMBER.fullmatch(text):
        return text
    if _LEADING_ZERO.match(text):
        raise _Ambiguous(f'{show(text)} could be octal or decimal; write "{text}" for text, or drop the leading zero')
    if _INTEGER.fullmatch(text):
        if len(text) > _LONGEST_INTEGER or not -_INTEGER_LIMIT <= int(text) < _INTEGER_LIMIT:
            raise _Ambiguous("the number does not fit in 64 bits; put it in quotes if text is meant")
        return int(text)
    number = float(text)
    if number in {float("inf"), float("-inf")}:
        raise _Ambiguous(f'{show(text)} is too large to be a finite number; write "{text}" if text is meant')
    return number


def _settle(mapping: dict[Any, Any], marks: list[Any]) -> Mark | None:
    """Drop repeated keys and put in what `<<` names; written keys win over merged ones, earlier sources over later.

    Returns the mark of a `<<` that names something else, or None.
    """
    merged = None
    for nth, key in reversed(list(enumerate(mapping))):
        if not isinstance(key, str):
            value = mapping.pop(key)
            merged = (value, marks[2 + 2 * nth]) if key is _MERGE else merged
            del marks[1 + 2 * nth : 3 + 2 * nth]
    if merged is None:
        return None
    value, own = merged
    sources = (
        [(value, own)]
        if isinstance(value, dict)
        else list(zip(value, own[1:], strict=True))
        if isinstance(value, list)
        else []
    )
    if not sources or not all(isinstance(source, dict) for source, _ in sources):
        return _first(own)
    for source, source_marks in sources:
        for nth, (key, value) in enumerate(source.items()):
            if key not in mapping:
                mapping[key] = value
                marks += source_marks[1 + 2 * nth : 3 + 2 * nth]
    return None


# One loop over local names: each event costs 1.7 us in the parser, and a call for each would add a third of that.
def _build(loader: yaml.CSafeLoader, document: Document) -> None:  # noqa: C901, PLR0912, PLR0915
    """Fill in the document's value and marks from the parser's events."""
    scalar, mapping_start, mapping_end = yaml.ScalarEvent, yaml.MappingStartEvent, yaml.MappingEndEvent
    sequence_start, sequence_end, alias = yaml.SequenceStartEvent, yaml.SequenceEndEvent, yaml.AliasEvent
    next_event: Callable[[], Any] = loader.get_event
    scalars = _Scalars()
    anchors: dict[str, tuple[Any, Any, int, int] | None] = {}  # value, marks, nodes, height; None: still being read
    documents = nodes = depth = peak = 0
    root: list[Any] = []
    root_marks: list[Any] = [None]
    current: Any = root
    marks = root_marks
    key: Any = None
    is_mapping = False
    unsettled: set[int] = set()
    stack: list[tuple[Any, ...]] = []

    def place() -> tuple[str | int, ...]:
        """Where the value that is being read will be."""
        frames = [*stack[1:], (current, marks, is_mapping, key)] if stack else []
        return tuple(frame[3] if frame[2] else len(frame[0]) for frame in frames)

    def complain(message: str, mark: Mark) -> None:
        if len(document.problems) >= MAX_PROBLEMS:
            raise _Unreadable(f"more than {MAX_PROBLEMS} problems; the rest was not read", mark)
        where = tuple(part for part in place() if isinstance(part, str | int))
        problem = document.problem_at(mark.line + 1, mark.column + 1, message, field=field_name(where))
        document.problems.append(problem)

    while True:
        event = next_event()
        kind = type(event)
        if kind is scalar:
            nodes += 1
            value = event.value
            if event.tag is not None:
                complain(f"the tag {show(event.tag)} is not allowed: values are plain data", event.start_mark)
            if is_mapping and key is None:
                key = value = _MERGE if value == "<<" and event.implicit[0] else value
                if value in current:
                    first = marks[1 + 2 * list(current).index(value)].line + 1
                    again = event.start_mark.line + 1
                    complain(
                        f"the key {show(event.value)} is here twice, on lines {first} and {again}; keep one",
                        event.start_mark,
                    )
                    key = object()
                if key.__class__ is object:
                    unsettled.add(id(current))
                marks.append(event.start_mark)
                if event.anchor is not None:
                    anchors[event.anchor] = (event.value, event.start_mark, 1, 0)
                continue
            if event.implicit[0]:
                try:
                    value = scalars[value]
                except _Ambiguous as error:
                    complain(str(error), event.start_mark)
            if value.__class__ is float and value.is_integer():
                document.integral_floats.append(place())
            marks.append(event.start_mark)
            if is_mapping:
                current[key] = value
                key = None
            else:
                current.append(value)
            if event.anchor is not None:
                anchors[event.anchor] = (value, event.start_mark, 1, 0)
        elif kind is mapping_start or kind is sequence_start:
            nodes += 1
            if is_mapping and key is None:
                raise _Unreadable("a key must be plain text, not a list or mapping", event.start_mark)
            if event.tag is not None:
                complain(f"the tag {show(event.tag)} is not allowed: values are plain data", event.start_mark)
            if event.anchor is not None:
                anchors[event.anchor] = None
            stack.append((current, marks, is_mapping, key, event.anchor, nodes, peak))
            depth += 1
            if depth > MAX_DEPTH:
                raise _Unreadable(_TOO_DEEP, event.start_mark)
            peak = depth
            is_mapping = kind is mapping_start
            current = {} if is_mapping else []
            marks = [event.start_mark]
            key = None
        elif kind is mapping_end or kind is sequence_end:
            if id(current) in unsettled:
                unsettled.discard(id(current))
                wrong = _settle(current, marks)
                if wrong is not None:
                    complain("`<<` takes a mapping, or a list of mappings, to merge", wrong)
            value, own = current, marks
            current, marks, is_mapping, key, anchor, before, outer_peak = stack.pop()
            if anchor is not None:
                anchors[anchor] = (value, own, nodes - before + 1, peak - depth + 1)
            depth -= 1
            peak = max(peak, outer_peak)
            marks.append(own)
            if is_mapping:
                current[key] = value
                key = None
            else:
                current.append(value)
        elif kind is alias:
            if is_mapping and key is None:
                raise _Unreadable("a key must be plain text, not an alias", event.start_mark)
            if event.anchor not in anchors:
                raise _Unreadable(
                    f"the alias *{event.anchor} has no anchor &{event.anchor} before it", event.start_mark
                )
            known = anchors[event.anchor]
            if known is None:
                raise _Unreadable(f"the alias *{event.anchor} stands inside its own anchor", event.start_mark)
            value, own, size, height = known
            nodes += size
            peak = max(peak, depth + height)
            if peak > MAX_DEPTH:
                raise _Unreadable(_TOO_DEEP, event.start_mark)
            if value.__class__ is float and value.is_integer():
                document.integral_floats.append(place())
            # A scalar is wrong where it is used; what is wrong within a list or mapping is so where it is written.
            marks.append(own if isinstance(own, list) else event.start_mark)
            if is_mapping:
                current[key] = value
                key = None
            else:
                current.append(value)
        elif kind is yaml.DocumentStartEvent:
            documents += 1
            if documents > 1:
                raise _Unreadable("a second document starts here; a file holds one", event.start_mark)
        elif kind is yaml.StreamEndEvent:
            break
        if nodes > MAX_NODES:
            raise _Unreadable(f"the document holds more than {MAX_NODES:,} values, aliases expanded", event.start_mark)
    if not root:
        raise _Unreadable("the file is empty", None)
    document.value, document._marks = root[0], root_marks[1]  # noqa: SLF001 - built here, for the first time
