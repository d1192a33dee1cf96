"""Facts of a host as typed values, made from its probe report. Pure.

A fact is known, absent, or unknown (None); unknown is never 0 and never satisfies a demand. A report comes from a
machine that may be hostile or broken: every field is held to its type, range and size before it is used. Texts are kept
as they came; whoever shows them escapes them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Health = Literal["ok", "degraded", "unusable", "unknown"]
Severity = Literal["info", "warning", "error"]

SCHEMA = "gpulayer.probe/1"

_BYTES = 1 << 60
_DEVICES = 64
_FRAMEWORKS = 16
_NOTES = 1000
_CAPABILITIES = 256
_OPS = 1000
_TEXT = 1000
_CPUS = 1 << 16

_ACCELERATORS = ("mps", "cuda", "rocm", "xpu", "cpu")
_MEMORY_KINDS = ("dedicated", "unified")
_SYSTEMS = ("darwin", "linux")
_STATUSES = ("ok", "not_installed", "import_failed", "timeout", "crashed", "not_probed")
_RESULTS = ("ok", "unsupported", "wrong", "error", "crashed", "timeout")
_SELECTORS = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "ONEAPI_DEVICE_SELECTOR",
)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}(\.[a-z0-9_]{1,64}){0,3}")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._/-]{0,127}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)")
_VERSION = re.compile(r"(\d{1,3})\.(\d{1,2})")


class BadReportError(ValueError):
    """A probe report that cannot be believed. `field` is the path of what is wrong in it."""

    def __init__(self, field: str, message: str) -> None:
        """`message` goes after the field's path and a colon."""
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that the probe observed; codes are the closed set of `probe.schema.json`."""

    code: str
    subject: str
    severity: Severity
    message: str
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU (or MIG instance), or the CPU of a host. Sizes are bytes; None is unknown.

    `usable_bytes` is what a workload can really get (Metal's recommended working set on a Mac).
    """

    id: str
    accelerator: str
    index: int
    name: str | None = None
    parent_id: str | None = None
    compute_capability: tuple[int, int] | None = None
    virtual: bool | None = None
    memory_kind: str | None = None
    memory_bytes: int | None = None
    usable_bytes: int | None = None
    free_bytes: int | None = None
    health: Health = "unknown"
    select_env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkFact:
    """One framework as the probed interpreter sees it.

    `ops` holds proven results by operator or dtype, on the device whose id is `ops_device`.
    """

    name: str
    version: str | None
    status: str
    ops: Mapping[str, str] = field(default_factory=dict)
    ops_device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host is, as its report says. Devices are in the report's order."""

    hostname: str | None
    os: str | None
    arch: str | None
    boot_id: str | None
    machine_id: str | None
    cpu_logical: int | None
    memory_bytes: int | None
    memory_limit_bytes: int | None
    memory_available_bytes: int | None
    disk_free_bytes: int | None
    python: str | None
    python_version: str | None
    driver_version: str | None
    devices: tuple[Device, ...]
    frameworks: Mapping[str, FrameworkFact]
    capabilities: frozenset[str]
    notes: tuple[Note, ...]
    complete: bool
    probed_at: str
    python_real_path: str | None = None


def facts_from_report(report: object) -> HostFacts:
    """Read a probe report (`probe.schema.json`).

    Raises BadReportError, naming the field, for whatever is missing, of another type, out of range or too large.
    Unknown keys are dropped; `disk_free_bytes` and `real_path` may be missing.
    """
    root = _Reader("report", report)
    if (schema := root.get("schema")) != SCHEMA:
        raise BadReportError("schema", f"{_shown(schema)} is not {SCHEMA!r}")
    host = root.object("host")
    python = host.object("python")
    devices = tuple(_device(entry) for entry in root.objects("devices", _DEVICES))
    ids = [device.id for device in devices]
    if twice := next((one for one in ids if ids.count(one) > 1), None):
        raise BadReportError("devices", f"{_shown(twice)} is there twice")
    frameworks = {fact.name: fact for fact in map(_framework, root.objects("frameworks", _FRAMEWORKS))}
    drivers = [entry.text("driver_version") for entry in root.objects("devices", _DEVICES)]
    return HostFacts(
        hostname=host.text("hostname"),
        os=host.choice("os", _SYSTEMS),
        arch=host.text("arch"),
        boot_id=host.text("boot_id"),
        machine_id=host.text("machine_id"),
        cpu_logical=host.number("cpu_logical", 1, _CPUS),
        memory_bytes=host.number("memory_bytes", 1),
        memory_limit_bytes=host.number("memory_limit_bytes", 1),
        memory_available_bytes=host.number("memory_available_bytes", 0),
        disk_free_bytes=host.number("disk_free_bytes", 0, optional=True),
        python=python.text("executable"),
        python_version=python.text("version"),
        python_real_path=python.text("real_path", optional=True),
        driver_version=next((version for version in drivers if version is not None), None),
        devices=devices,
        frameworks=frameworks,
        capabilities=frozenset(root.words("capabilities", _CAPABILITIES)),
        notes=tuple(_note(entry) for entry in root.objects("notes", _NOTES)),
        complete=root.flag("complete"),
        probed_at=root.matching("started_at", _TIME),
    )


def fingerprint(
    facts: HostFacts, device_ids: Collection[str], pythons: Mapping[str, HostFacts | None]
) -> dict[str, Any]:
    """Return the stable facts that a placement on `device_ids` stands on, as plain data that can be compared.

    `pythons` are the facts as the placed jobs' own interpreters see them, by the interpreter's name. Free memory, notes
    and the like change all the time and are checked on the host at launch.
    """
    seen = {device.id for its in (facts, *pythons.values()) if its is not None for device in its.devices}
    return {
        "boot_id": facts.boot_id,
        "devices": sorted(seen & set(device_ids)),  # some are told of by a job's own interpreter alone
        "driver": facts.driver_version,
        **_interpreter(facts),
        "pythons": {name: _interpreter(its) for name, its in sorted(pythons.items()) if its is not None},
    }


def _interpreter(facts: HostFacts) -> dict[str, Any]:
    return {
        "python": facts.python,
        "python_real_path": facts.python_real_path,
        "python_version": facts.python_version,
        "frameworks": {name: fact.version for name, fact in sorted(facts.frameworks.items())},
    }


def _device(entry: _Reader) -> Device:
    memory = entry.number("memory_bytes", 1)
    usable = entry.number("usable_memory_bytes", 1, memory or _BYTES)
    compute = entry.get("compute_capability")
    return Device(
        id=entry.matching("id", _ID),
        accelerator=entry.one_of("accelerator", _ACCELERATORS),
        index=entry.whole("index", 0, _CPUS),
        name=entry.text("name"),
        parent_id=None if entry.get("parent_id") is None else entry.matching("parent_id", _ID),
        compute_capability=None if compute is None else entry.version("compute_capability"),
        virtual=None if entry.get("virtual") is None else entry.flag("virtual"),
        memory_kind=entry.choice("memory_kind", _MEMORY_KINDS),
        memory_bytes=memory,
        usable_bytes=usable,
        free_bytes=entry.number("free_memory_bytes", 0, memory or _BYTES),
        health=entry.one_of("health", get_args(Health)),
        select_env=entry.texts("select_env", _SELECTORS),
    )


def _framework(entry: _Reader) -> FrameworkFact:
    detail = entry.object("detail")
    return FrameworkFact(
        name=entry.matching("name", _WORD),
        version=entry.text("version"),
        status=entry.one_of("status", _STATUSES),
        ops=detail.results("ops") if "ops" in detail.value else {},
        ops_device=detail.text("ops_device", optional=True),
    )


def _note(entry: _Reader) -> Note:
    return Note(
        code=entry.matching("code", _WORD),
        subject=entry.required_text("subject"),
        severity=entry.one_of("severity", get_args(Severity)),
        message=entry.required_text("message"),
        detail=entry.text("detail"),
    )


class _Reader:
    """An object of the report, with getters that know its path: each returns a value of its type or raises."""

    def __init__(self, path: str, value: object) -> None:
        self.path = path
        if not isinstance(value, dict):
            raise BadReportError(path, f"{_shown(value)} is not an object")
        self.value: dict[Any, Any] = value

    def fail(self, key: str, expected: str) -> BadReportError:
        return BadReportError(self.at(key), f"{_shown(self.value[key])} is not {expected}")

    def at(self, key: str) -> str:
        return key if self.path == "report" else f"{self.path}.{key}"

    def get(self, key: str) -> Any:  # noqa: ANN401  # from outside
        if key not in self.value:
            raise BadReportError(self.at(key), "is missing")
        return self.value[key]

    def object(self, key: str) -> _Reader:
        return _Reader(self.at(key), self.get(key))

    def array(self, key: str, most: int) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise self.fail(key, "a list")
        if len(value) > most:
            raise BadReportError(self.at(key), f"{len(value)} entries are more than {most}")
        return value

    def objects(self, key: str, most: int) -> list[_Reader]:
        return [_Reader(f"{self.at(key)}[{place}]", entry) for place, entry in enumerate(self.array(key, most))]

    def words(self, key: str, most: int) -> list[str]:
        values = self.array(key, most)
        for place, value in enumerate(values):
            if not (isinstance(value, str) and _WORD.fullmatch(value)):
                raise BadReportError(f"{self.at(key)}[{place}]", f"{_shown(value)} is not a word")
        return values

    def text(self, key: str, *, optional: bool = False) -> str | None:
        if optional and key not in self.value:
            return None
        return None if self.get(key) is None else self.required_text(key)

    def required_text(self, key: str) -> str:
        value = self.get(key)
        if not (isinstance(value, str) and len(value) <= _TEXT):
            raise self.fail(key, f"a text of at most {_TEXT} characters")
        return value

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self.required_text(key)
        if not pattern.fullmatch(value):
            raise self.fail(key, "of its form")
        return value

    def version(self, key: str) -> tuple[int, int]:
        found = _VERSION.fullmatch(self.required_text(key))
        if found is None:
            raise self.fail(key, "a version such as '8.6'")
        return int(found[1]), int(found[2])

    def one_of(self, key: str, allowed: tuple[Any, ...]) -> Any:  # noqa: ANN401  # a member of `allowed`
        value = self.get(key)
        if not (isinstance(value, str) and value in allowed):
            raise self.fail(key, f"one of {', '.join(allowed)}")
        return value

    def choice(self, key: str, allowed: tuple[str, ...]) -> str | None:
        return None if self.get(key) is None else str(self.one_of(key, allowed))

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def whole(self, key: str, least: int, most: int) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.fail(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, least: int, most: int = _BYTES, *, optional: bool = False) -> int | None:
        if (optional and key not in self.value) or self.get(key) is None:
            return None
        return self.whole(key, least, most)

    def texts(self, key: str, allowed: tuple[str, ...] | None = None) -> dict[str, str]:
        reader = self.object(key)
        if len(reader.value) > _OPS:
            raise BadReportError(reader.path, f"{len(reader.value)} entries are more than {_OPS}")
        for name in reader.value:
            if not isinstance(name, str) or len(name) > _TEXT or (allowed is not None and name not in allowed):
                raise BadReportError(reader.path, f"{_shown(name)} is not a name that may stand here")
        return {name: reader.required_text(name) for name in reader.value}

    def results(self, key: str) -> dict[str, str]:
        reader = self.object(key)
        return {name: reader.one_of(name, _RESULTS) for name in self.texts(key)}


def _shown(value: object) -> str:
    """Return a value as it may stand in an error: short, whatever it is."""
    if isinstance(value, dict | list):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < _BYTES << 4 else "a number beyond all bounds"
    return text if len(text) <= 80 else f"{text[:77]}..."  # noqa: PLR2004  # one line
