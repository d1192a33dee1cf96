"""The project's words in every place that repeats them, derived from the one place that owns each.

`python -m tests.vocabulary` writes what can be derived: the schemas' enumerations and README's support matrix. What a
person has to write (the meaning of a note or of a capability) the tests name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from gpulayer.gpu import facts
from gpulayer.gpu.discovery import FRAMEWORKS
from gpulayer.gpu.discovery_notes import NOTE_CODES
from gpulayer.placement.plan import Action, Code, Kind
from gpulayer.remote import states
from gpulayer.run.events import EVENTS
from gpulayer.run.work import EXIT_CODES, Outcome
from gpulayer.spec import support
from gpulayer.spec.inventory import TransportKind
from gpulayer.spec.jobs import Cause
from gpulayer.spec.support import Accelerator, Framework, JobKind, Row, matrix, row

ROOT = Path(__file__).parents[1]
MEND = "python -m tests.vocabulary"

_EACH_FRAMEWORK: tuple[Framework | None, ...] = (*Framework, None)

# Every enumeration of a schema whose words another place owns: schema, path of the enumeration, words.
SOURCES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("event", "properties/event"): tuple(EVENTS),
    ("event", "allOf/queued/if/properties/event"): tuple(states.MOVES),
    ("event", "allOf/summary/then/properties/counts/propertyNames"): tuple(Outcome),
    ("event", "allOf/summary/then/properties/exit_code"): tuple(
        dict.fromkeys(int(code) for code in EXIT_CODES.values())
    ),
    ("inventory", "$defs/host/properties/transport"): (*TransportKind, None),
    ("inventory", "$defs/host/properties/expect/properties/accelerator"): tuple(Accelerator),
    ("jobs", "$defs/accelerator"): tuple(Accelerator),
    ("jobs", "$defs/job/properties/framework"): (*Framework, None),
    ("jobs", "$defs/job/properties/resources/properties/gpu_memory_kind"): (*support.MemoryKind, None),
    ("jobs", "$defs/job/properties/resources/properties/capabilities/items"): support.CAPABILITIES,
    ("jobs", "$defs/job/properties/resources/properties/dtypes/items"): support.DTYPES,
    ("jobs", "$defs/job/properties/retries/anyOf/1/properties/on/items"): tuple(Cause),
    ("jobs", "$defs/job/properties/distributed/properties/backend"): (*support.Backend, None),
    ("plan", "$defs/job/properties/action"): tuple(Action),
    ("plan", "$defs/job/properties/accelerator"): (*Accelerator, None),
    ("plan", "$defs/refusal/properties/code"): tuple(Code),
    ("plan", "$defs/refusal/properties/kind"): tuple(kind.name.lower() for kind in Kind),
    ("plan", "$defs/refusal/properties/accelerator"): (*Accelerator, None),
    ("plan", "$defs/refusal/properties/memory_kind"): (*support.MemoryKind, None),
    ("probe", "properties/host/properties/os"): (*facts._SYSTEMS, None),
    ("probe", "properties/devices/items/properties/accelerator"): facts._ACCELERATORS,
    ("probe", "properties/devices/items/properties/memory_kind"): (*facts._MEMORY_KINDS, None),
    ("probe", "properties/devices/items/properties/select_env/propertyNames"): facts._SELECTORS,
    ("probe", "properties/devices/items/properties/health"): get_args(facts.Health),
    ("probe", "properties/frameworks/items/properties/name"): FRAMEWORKS,
    ("probe", "properties/frameworks/items/properties/status"): facts._STATUSES,
    ("probe", "properties/frameworks/items/properties/detail/properties/ops/additionalProperties"): facts._RESULTS,
    ("probe", "properties/capabilities/items"): support.CAPABILITIES,
    ("probe", "properties/notes/items/properties/code"): NOTE_CODES,
    ("probe", "properties/notes/items/properties/severity"): get_args(facts.Severity),
    ("status", "properties/runs/items/properties/status"): tuple(states.MOVES),
}

# Enumerations that no constant owns: whoever produces such a value spells it out.
SPELLED = {
    ("event", "properties/left/properties/tree"),
    ("event", "properties/left/properties/devices/additionalProperties"),
    ("status", "properties/runs/items/properties/left/properties/tree"),
    ("status", "properties/runs/items/properties/left/properties/devices/additionalProperties"),
    ("event", "allOf/syncing/if/properties/event"),
    ("inventory", "$defs/host/properties/jobs_per_device"),
    ("plan", "$defs/host/properties/doubts/items/properties/health"),
    ("plan", "$defs/refusal/properties/about"),
    ("probe", "properties/host/properties/virtualization"),
    ("probe", "properties/host/properties/memory_pressure"),
    ("probe", "properties/devices/items/properties/usable_source"),
    ("probe", "properties/devices/items/properties/free_source"),
}


def schema_path(name: str) -> Path:
    return ROOT / "schemas" / f"{name}.schema.json"


def enumerations(node: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield every enumeration of a schema with its path."""
    if isinstance(node, dict):
        if isinstance(node.get("enum"), list):
            yield path, node["enum"]
        for key, value in node.items():
            yield from enumerations(value, f"{path}/{key}" if path else key)
    elif isinstance(node, list):
        for place, value in enumerate(node):
            yield from enumerations(value, f"{path}/{_branch(value) or place}")


def _branch(node: Any) -> Any:
    """Return the first event that a branch of `allOf` is for: its place changes with every branch before it."""
    event = node.get("if", {}).get("properties", {}).get("event", {}) if isinstance(node, dict) else {}
    return event.get("const") or next(iter(event.get("enum", ())), None)


def in_order(words: tuple[Any, ...], present: list[Any]) -> list[Any]:
    """Return `words` in the order in which the schema has them; new ones come last, None at the very end."""
    plain = [word.value if hasattr(word, "value") else word for word in words]
    kept = [word for word in present if word in plain and word is not None]
    new = [word for word in plain if word not in present and word is not None]
    return kept + new + ([None] if None in plain else [])


def schema_text(name: str) -> str:
    """Return a schema's file as it has to be."""
    document = json.loads(schema_path(name).read_text(encoding="utf-8"))
    for path, present in enumerations(document):
        if (name, path) in SOURCES:
            present[:] = in_order(SOURCES[name, path], present)
    is_ascii = schema_path(name).read_text(encoding="utf-8").isascii()
    return json.dumps(document, indent=2, ensure_ascii=is_ascii) + "\n"


def _cell(entry: Row) -> str:
    """What a job demands of a host there, and what evidence there is that it works."""
    if not entry.allowed:
        return "no"
    demand = " or ".join(f"`{capability}`" for capability in entry.capabilities) or "yes"
    return f"{demand} ({entry.evidence})"


def matrix_text() -> str:
    """Return the support matrix as README shows it: the table, then why what is not allowed is not."""
    lines = [
        f"| job | accelerator | {' | '.join(framework or 'any other program' for framework in _EACH_FRAMEWORK)} |",
        f"| --- | --- |{' --- |' * len(_EACH_FRAMEWORK)}",
    ]
    for kind in JobKind:
        for accelerator in Accelerator:
            cells = " | ".join(_cell(row(accelerator, kind, framework)) for framework in _EACH_FRAMEWORK)
            lines.append(f"| {kind} | `{accelerator}` | {cells} |")
    reasons = dict.fromkeys(entry.why for entry in matrix() if not entry.allowed)
    return "\n".join([*lines, "", "What is not allowed, and why:", "", *(f"- {reason}" for reason in reasons)])


def readme_text() -> str:
    """Return README as it has to be; raises ValueError where the marks of the matrix are not there."""
    present = (ROOT / "README.md").read_text(encoding="utf-8")
    opening, closing = "<!-- matrix -->\n", "\n<!-- /matrix -->"
    start, end = present.index(opening) + len(opening), present.index(closing)
    return present[:start] + matrix_text() + present[end:]


def derived() -> dict[Path, str]:
    """Return every file that repeats words, as it has to be."""
    names = sorted({name for name, _ in SOURCES})
    return {**{schema_path(name): schema_text(name) for name in names}, ROOT / "README.md": readme_text()}


def difference(path: Path, wanted: str) -> str:
    """Return how a file differs from what it has to be, and the command that mends it; empty where it does not."""
    name = str(path.relative_to(ROOT))
    lines = difflib.unified_diff(path.read_text(encoding="utf-8").splitlines(), wanted.splitlines(), name, name, n=0)
    told = "\n".join(lines)
    return f"{told}\nmend it with: {MEND}" if told else ""


if __name__ == "__main__":
    for file, text in derived().items():
        file.write_text(text, encoding="utf-8")
