"""JSON Schemas: where they are, and what a document that does not hold is told.

A compiled validator decides; only for what it refuses does the slower one say where and why, and the words are ours.
Nothing is ever fetched: the schemas are complete in themselves, and neither validator has a way out.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from gpulayer.errors import Problem, UsageError
from gpulayer.spec.documents import MAX_PROBLEMS, Document, show

if TYPE_CHECKING:
    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

    Rule = Callable[[Validator, object, Sized, Mapping[str, Any]], Any]

# The mapping of a document whose entries are alike and many: what is good in it is left out of the slow second look.
_ENTRIES: Final = {"jobs": "jobs", "inventory": "hosts"}

_TYPES: Final = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "object": "a mapping",
    "array": "a list",
    "boolean": "true or false",
}
# Rules of a mapping that speak of its keys, one finding each.
_OF_KEYS: Final = frozenset({"required", "additionalProperties"})
_LISTED_WORDS: Final = 14
_NO_ADVICE: Final[Mapping[str, str]] = {}


def _folder() -> Path:
    """Return the folder of the schemas: inside the package where a wheel was installed, else the checkout's own.

    An editable install leaves a copy in site-packages that grows old; it is not beside this file and never read.
    """
    package = Path(__file__).resolve().parents[1]
    packaged = package / "schemas"
    return packaged if packaged.is_dir() else package.parent / "schemas"


def names() -> tuple[str, ...]:
    """Return the names of all schemas, sorted: inventory, jobs, probe and so on."""
    return tuple(sorted(path.name.removesuffix(".schema.json") for path in _folder().glob("*.schema.json")))


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """Return the schema called `name`, shared by all callers. Raises UsageError where there is none."""
    if name not in names():
        raise UsageError(f"there is no schema {show(name)}", fix=f"name one of {', '.join(names())}")
    content: dict[str, Any] = json.loads((_folder() / f"{name}.schema.json").read_text("utf-8"))
    return content


def suggestion(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word that is nearest to `word`, or nothing."""
    near = difflib.get_close_matches(word.lower(), known, n=1)
    return f" (did you mean {str(near[0])!r}?)" if near else ""


def unknown_word(word: str, known: Sequence[str], advice: Mapping[str, str]) -> str:
    """Say that `word` is none of `known`: what is, which is nearest, and what `advice` has for it."""
    hint = f" ({advice[word]})" if word in advice else suggestion(word, known)
    if len(known) > _LISTED_WORDS and hint:
        return (
            f"{show(word)} cannot be asked for: {advice[word]}"
            if word in advice
            else f"{show(word)} is not known{hint}"
        )
    return f"{show(word)} is not one of {', '.join(repr(str(one)) for one in known)}{hint}"


def validate(document: Document, name: str, *, advice: Mapping[str, str] = _NO_ADVICE) -> list[Problem]:
    """Return all that is wrong with `document` by the schema called `name`, in the order of the file.

    The document's own problems are among them. `advice` maps words that no enumeration has to what their user is told.
    """
    problems = list(document.problems)
    seen = {(problem.line, problem.column) for problem in problems}
    found = itertools.islice(_problems(document, name, advice), MAX_PROBLEMS)
    problems += [problem for problem in found if (problem.line, problem.column) not in seen]
    return sorted(problems, key=lambda problem: (problem.line, problem.column))


def sound(document: Document, name: str) -> dict[str, Any]:
    """Return the entries (jobs, hosts), less what does not hold in them: `validate` has told of that already.

    Entries are left out as a whole where their name, or the document's defaults, do not hold.
    """
    value, entries = document.value, _ENTRIES[name]
    if not isinstance(value, dict) or not isinstance(value.get(entries), dict):
        return {}
    gate = _gate(name)
    if not gate.is_valid({"version": 1, "defaults": value.get("defaults"), entries: {"one": {}}}):
        return {}
    bad, doubtful = _bad_entries(document, name), _doubtful(document, name)
    found: dict[str, Any] = {}
    for key, one in value[entries].items():
        if key not in bad:
            found[key] = one
        elif isinstance(one, dict) and gate.is_valid({"version": 1, entries: {key: {}}}):
            found[key] = {
                part: own
                for part, own in one.items()
                if (entries, key, part) not in doubtful and gate.is_valid({"version": 1, entries: {key: {part: own}}})
            }
    return found


def _bad_entries(document: Document, name: str) -> dict[str, Any]:
    gate, entries = _gate(name), _ENTRIES[name]
    entries_in_doubt = {pointer[:2] for pointer in _doubtful(document, name)}
    many: dict[str, Any] = document.value[entries]
    return {
        key: one
        for key, one in many.items()
        if (entries, key) in entries_in_doubt or not gate.is_valid({"version": 1, entries: {key: one}})
    }


def _doubtful(document: Document, name: str) -> set[tuple[str | int, ...]]:
    """Return where a number like `1.0` stands for a whole number. For JSON Schema it is one, for people it is not."""
    return {pointer[:3] for pointer in document.integral_floats if pointer and pointer[-1] in _integers(name)}


def _problems(document: Document, name: str, advice: Mapping[str, str]) -> Iterator[Problem]:
    if not _doubtful(document, name) and _gate(name).is_valid(document.value):
        return
    value, entries = document.value, _ENTRIES.get(name)
    if entries is not None and isinstance(value, dict) and isinstance(value.get(entries), dict):
        some = _bad_entries(document, name) or dict(itertools.islice(value[entries].items(), 1))
        value = {**value, entries: some}
    told: set[tuple[str | int, ...]] = set()
    for error in _judge(name).iter_errors(value):
        place = _place(error)
        # One rule a place is enough: what is empty need not be told that it has a wrong form too.
        if place not in told:
            yield from _explain(document, error, advice)
        if error.validator not in _OF_KEYS:
            told.add(place)


@functools.cache
def _gate(name: str) -> Any:  # noqa: ANN401 - the compiled validator has no public type of its own
    import jsonschema_rs  # noqa: PLC0415 - 40 ms that `--help` must not pay

    return jsonschema_rs.Draft202012Validator(
        schema(name), retriever=_refuse, pattern_options=jsonschema_rs.RegexOptions()
    )


def _refuse(uri: str) -> NoReturn:
    raise LookupError(f"{uri} is not fetched: a schema is complete in itself")


@functools.cache
def _judge(name: str) -> Validator:
    import jsonschema  # noqa: PLC0415 - 130 ms that only a document with problems pays
    import referencing  # noqa: PLC0415

    def pattern(_: Validator, wanted: str, instance: object, __: object) -> Iterator[ValidationError]:
        # Python's `$` also matches before a last line feed; all patterns here are meant to match the whole text.
        if isinstance(instance, str) and not re.fullmatch(wanted, instance):
            yield jsonschema.ValidationError("")

    def unique(_: Validator, __: object, instance: object, ___: object) -> Iterator[ValidationError]:
        if _repeated(instance) is not None:
            yield jsonschema.ValidationError("")

    rules = jsonschema.Draft202012Validator.VALIDATORS

    def bounded(rule: str, limit: str) -> Rule:
        # Who is told that there are too many entries need not be told what is wrong with each.
        def look(validator: Validator, wanted: object, instance: Sized, own: Mapping[str, Any]) -> Any:  # noqa: ANN401
            too_many = isinstance(instance, list | dict) and len(instance) > own.get(limit, len(instance))
            return () if too_many else rules[rule](validator, wanted, instance, own)

        return look

    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    strict = jsonschema.validators.extend(
        jsonschema.Draft202012Validator,
        validators={
            "pattern": pattern,
            "uniqueItems": unique,
            "items": bounded("items", "maxItems"),
            "propertyNames": bounded("propertyNames", "maxProperties"),
            "additionalProperties": bounded("additionalProperties", "maxProperties"),
        },
        type_checker=types,
    )
    judge: Validator = strict(schema(name), registry=referencing.Registry())
    return judge


@functools.cache
def _integers(name: str) -> frozenset[str]:
    """Return the names of all properties that are whole numbers."""

    def walk(part: object) -> Iterator[str]:
        if isinstance(part, dict):
            for key, inner in part.items():
                if key == "properties":
                    yield from (
                        prop
                        for prop, own in inner.items()
                        if any("integer" in str(one.get("type", "")) for one in (own, *own.get("anyOf", ())))
                    )
                yield from walk(inner)
        elif isinstance(part, list):
            for inner in part:
                yield from walk(inner)

    return frozenset(walk(schema(name)))


def _place(error: ValidationError) -> tuple[str | int, ...]:
    """Return the pointer of what is wrong: a value, or the key that has a wrong name."""
    place = tuple(error.absolute_path)
    return (*place, error.instance) if "propertyNames" in error.absolute_schema_path else place


def _explain(document: Document, error: ValidationError, advice: Mapping[str, str]) -> Iterator[Problem]:
    """Say in our words what one of the judge's findings means, and where."""
    pointer = _place(error)
    rule = str(error.validator)
    if rule == "anyOf":
        meant = _meant(error)
        if not meant:
            yield document.problem(pointer, f"{_kind(error.instance)} is not {error.schema['x-rule']}")
        for inner in meant:
            yield from _explain(document, inner, advice)
    elif rule == "additionalProperties":
        known = error.schema["properties"]
        for key in error.instance:
            if key not in known:
                yield document.problem((*pointer, key), f"unknown key{_known_keys(key, known)}", key=True)
    else:
        is_key = "propertyNames" in error.absolute_schema_path
        yield document.problem(pointer, _MESSAGES[rule](document, error, advice), key=is_key)


def _meant(error: ValidationError) -> list[ValidationError]:
    """Return the findings of the alternative whose kind of value this is; none where it is of no allowed kind."""
    for _, group in itertools.groupby(error.context, key=lambda inner: inner.schema_path[0]):
        found = list(group)
        if not any(
            inner.validator == "type" or (inner.validator == "enum" and not isinstance(inner.instance, str))
            for inner in found
            if not inner.relative_path
        ):
            return found
    return []


def _kind(value: object) -> str:
    """Name a value: as it is, or its kind where it may be large."""
    return {dict: "a mapping", list: "a list", type(None): "nothing"}.get(type(value)) or show(value)


def _known_keys(key: str, known: Mapping[str, Any]) -> str:
    for name, own in known.items():
        if key in own.get("properties", {}):
            return f" (did you mean '{name}.{key}'?)"
    return suggestion(key, list(known)) or f"; the keys here are {', '.join(known)}"


def _type(document: Document, error: ValidationError, _: Mapping[str, str]) -> str:
    """`2` where text is wanted, `"2"` where a number is: the fix is mostly a matter of quotes."""
    wanted = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
    wanted = [word for word in wanted if word != "null"]
    value, fix = error.instance, ""
    written = document.written(tuple(error.absolute_path)) if not isinstance(value, dict | list) else ""
    if "string" in wanted and value is None:
        fix = '; write "" for empty text'
    elif "string" in wanted and written:
        pattern = error.schema.get("pattern", "")
        fits = re.fullmatch(pattern, written) if pattern else True
        fix = f'; write "{written}"' if fits else f": write {error.schema['x-rule']}"
    elif "integer" in wanted and isinstance(value, float) and value.is_integer():
        fix = f"; write {int(value)}"
    elif isinstance(value, str) and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", value) and {"integer", "number"} & set(wanted):
        fix = f"; write {value} without quotes"
    elif "array" in wanted and isinstance(value, str):
        fix = f"; write [{written}]"
    expected = " or ".join(_TYPES[word] for word in wanted)
    if "object" in wanted:
        expected = error.schema.get("x-rule", expected)
        if "x-rule" not in error.schema and (keys := error.schema.get("properties")):
            fix = f"; its keys are {', '.join(keys)}"
    if value is None:
        return f"is empty; {expected} is needed{fix}"
    subject = written or _kind(value) if isinstance(value, bool | int | float) else _kind(value)
    return f"{subject} is not {expected}{fix}"


def _enum(_: Document, error: ValidationError, advice: Mapping[str, str]) -> str:
    value, words = error.instance, [word for word in error.validator_value if word is not None]
    if "x-rule" in error.schema:
        return f"{_kind(value)} is not valid: {error.schema['x-rule']}"
    return unknown_word(value, words, advice) if isinstance(value, str) else f"{_kind(value)} is not one of {words}"


def _pattern(_: Document, error: ValidationError, __: Mapping[str, str]) -> str:
    shown, exact = show(error.instance), ascii(error.instance)
    # Letters of other scripts can look like ours.
    which = "" if error.instance.isascii() or shown == exact else f", which is {exact},"
    return f"{shown}{which} is not valid: {error.schema['x-rule']}"


def _too_many(_: Document, error: ValidationError, __: Mapping[str, str]) -> str:
    unit = {"maxLength": "characters", "maxItems": "entries", "maxProperties": "entries"}[str(error.validator)]
    return f"{len(error.instance):,} {unit} are too many; at most {error.validator_value:,}"


def _empty(_: Document, __: ValidationError, ___: Mapping[str, str]) -> str:
    return "is empty; at least one is needed"


def _twice(_: Document, error: ValidationError, __: Mapping[str, str]) -> str:
    return f"{show(_repeated(error.instance))} is here twice; keep one"


def _repeated(items: object) -> str | None:
    """Return the first word that a list holds twice; other values are none of a unique list's, and told as such.

    The validator's own rule compares each pair of mappings: thousands of them would take minutes.
    """
    seen: set[str] = set()
    for item in items if isinstance(items, list) else ():
        if isinstance(item, str):
            if item in seen:
                return item
            seen.add(item)
    return None


def _number(sentence: str) -> Callable[[Document, ValidationError, Mapping[str, str]], str]:
    return lambda _, error, __: f"{error.instance} {sentence.format(error.validator_value)}"


_MESSAGES: Final[dict[str, Callable[[Document, ValidationError, Mapping[str, str]], str]]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda _, error, __: f"{_kind(error.instance)} is not {error.validator_value}, which is all that there is",
    "pattern": _pattern,
    "required": lambda _, error, __: f"{error.message.split(' is ')[0]} is missing",
    "minimum": _number("is below {}, the least that is possible"),
    "exclusiveMinimum": _number("is not above {}"),
    "maximum": _number("is above {}, the most that is possible"),
    "minLength": _empty,
    "minItems": _empty,
    "minProperties": _empty,
    "maxLength": _too_many,
    "maxItems": _too_many,
    "maxProperties": _too_many,
    "uniqueItems": _twice,
}
