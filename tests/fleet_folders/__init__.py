"""Machines as folders: what the probe asked each, what it answered, and what must come out of that.

A folder that is dropped in beside this file is a test. It holds

- `README.md`: what the machine is, and a line `Origin:` that says `recorded`, `partly recorded` or `hand-written`;
- `answers.json`: a recording (`tests.machines.simulate` has its keys), and `*_child.jsonl`: what children wrote;
- `facts.json`: the facts and verdicts that must come out, written by hand;
- `asked.txt` and `report.json`: every question, answered or not, and the whole report. Both are written by
  `python -m tests.fleet_folders [NAME...]`; what it changes is to be read before it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpulayer.gpu.discovery import FRAMEWORKS, probe
from gpulayer.gpu.discovery_system import System
from tests.machines.simulate import Recorded

HERE = Path(__file__).parent
FOLDERS = tuple(sorted(path.parent for path in HERE.glob("*/answers.json")))

_OF_THE_MOMENT = ("started_at", "elapsed_ms")


class Found(NamedTuple):
    """What a machine said in the end, and by which questions: {question: whether it was answered}."""

    report: dict[str, Any]
    asked: dict[str, bool]


def recording(folder: Path) -> dict[str, Any]:
    """Return the recording that `System` is replaced by."""
    told: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    lines = {path.stem: path.read_text().splitlines() for path in folder.glob("*_child.jsonl")}
    return {**told, "children": {name: [json.loads(line) for line in said] for name, said in lines.items()}}


def ask(folder: Path) -> Found:
    """Probe the machine in `folder` for everything; whatever it does not answer is not there."""
    return ask_recorded(recording(folder))


def ask_recorded(told: dict[str, Any]) -> Found:
    """Probe the machine of a recording."""
    asked: dict[str, bool] = {}

    class Machine(_Listening, Recorded, System):
        recording = told
        seam = System
        heard = asked

    report = probe(told["python"], FRAMEWORKS, system=Machine(deadline=60.0))
    for part in (report, *report["frameworks"]):
        for key in _OF_THE_MOMENT:
            part.pop(key, None)
    return Found(report, asked)


def answers(folder: Path) -> Iterator[str]:
    """Yield every question to which the folder has an answer, as `ask` names them."""
    told = recording(folder)
    yield from (f"file {path}" for path in told.get("files", {}))
    yield from (f"tool {name}" for name in told.get("tools", {}))
    yield from (f"run {words}" for words in told.get("commands", {}))
    yield from (f"sysctl {name}" for name in told.get("sysctl", {}))
    yield from (f"child {name}" for name in told["children"])


def asked_text(found: Found) -> str:
    """Return `asked.txt`: one line a question, sorted, since frameworks are asked side by side."""
    return "".join(f"{'answered' if found.asked[key] else 'no answer'}: {key}\n" for key in sorted(found.asked))


def report_text(found: Found) -> str:
    """Return `report.json`: the report without what is of the moment."""
    return json.dumps(found.report, indent=1) + "\n"


class _Listening:
    """Writes down what is asked of a recorded machine; a child that was not recorded is an error, not a process."""

    heard: dict[str, bool]
    recording: dict[str, Any]

    def read(self, path: str) -> Any:
        return self._note(f"file {path}", super().read(path))  # type: ignore[misc]  # Recorded's

    def exists(self, path: str) -> Any:
        return self._note(f"file {path}", super().exists(path))  # type: ignore[misc]

    def names(self, folder: str) -> Any:
        return self._note(f"file {folder}/*", super().names(folder))  # type: ignore[misc]

    def which(self, tool: str, folders: Any) -> Any:
        return self._note(f"tool {tool}", super().which(tool, folders))  # type: ignore[misc]

    def run(self, command: Any, *, limit: float) -> Any:
        outcome = super().run(command, limit=limit)  # type: ignore[misc]
        if command[0].endswith("/sysctl"):
            for name in command[1:]:
                self._note(f"sysctl {name}", f"{name}: " in outcome.text)
            return outcome
        self._note(f"run {' '.join(command)}", outcome.error is None)
        return outcome

    def child(self, name: str, **options: Any) -> Any:
        if name not in self.recording["children"]:
            raise AssertionError(f"{name} was asked, and the folder has no {name}.jsonl")
        self._note(f"child {name}", heard=True)
        return super().child(name, **options)  # type: ignore[misc]

    def _note(self, question: str, heard: Any) -> Any:
        self.heard[question] = self.heard.get(question, False) or bool(heard)
        return heard
