"""The one seam between the probe and the machine: files, tools and children go through `System`. SHIPPED."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpulayer.gpu.discovery_process import Outcome, run_bounded

READ_LIMIT = 1 << 20  # bytes
_LINE_LENGTHS = (2, 3)


class Answer(NamedTuple):
    """What a child said: values and exception texts by key, whether every line was well formed, and how it ended.

    Its lines are those of `discovery_child.py`: what it knew before a crash or its time limit is kept.
    """

    values: dict[str, Any]
    errors: dict[str, str]
    valid: bool
    outcome: Outcome

    @property
    def done(self) -> bool:
        """Whether the child came to its end."""
        return self.values.get("done") is True

    @property
    def trouble(self) -> str:
        """How it ended, and the end of what it wrote on stderr: foreign text, for a note's detail."""
        outcome = self.outcome
        if outcome.error:
            return outcome.error
        how = "time limit" if outcome.timed_out else outcome.signal or f"exit code {outcome.code}"
        step = f" during {self.values['step']}" if "step" in self.values else ""
        lines = outcome.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"{how}{step}: {lines[-1]}" if lines else f"{how}{step}"


class System:
    """This machine. Tests answer for another one by replacing these methods; nothing else looks at the machine."""

    def __init__(self, *, deadline: float) -> None:
        """`deadline` is the number of seconds that all tools and children may take together."""
        self._end = time.monotonic() + deadline
        uname = os.uname()
        self.platform = uname.sysname.lower()
        self.machine = uname.machine
        self.kernel = uname.release
        self.hostname = uname.nodename
        self.environ: Mapping[str, str] = os.environ

    def remaining(self, limit: float) -> float:
        """Return `limit` seconds, or what is left of the shared deadline."""
        return max(0.0, min(limit, self._end - time.monotonic()))

    def read(self, path: str) -> str | None:
        """Return the text of a small file without blanks around it, or None where it cannot be read or is empty."""
        try:
            with open(path, "rb") as file:
                data = file.read(READ_LIMIT)
        except OSError:
            return None
        return data.decode("utf-8", "replace").strip("\0 \t\r\n") or None

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; none where it cannot be read."""
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def real_path(self, path: str) -> str:
        """Return the path without symbolic links."""
        return os.path.realpath(path)

    def exists(self, path: str) -> bool:
        """Say whether there is something at `path`."""
        return os.path.exists(path)

    def which(self, tool: str, folders: Sequence[str]) -> str | None:
        """Find an executable on PATH, then in `folders`."""
        path = os.pathsep.join([self.environ.get("PATH", os.defpath), *folders])
        return shutil.which(tool, path=path)

    def cpus(self) -> int | None:
        """Return the number of logical CPUs that a process may use here."""
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count()

    def disk_free(self, folder: str) -> int | None:
        """Return the bytes that an ordinary user may still write where `folder` lies, or will lie."""
        while not os.path.exists(folder) and os.path.dirname(folder) != folder:
            folder = os.path.dirname(folder)
        try:
            answer = os.statvfs(folder)
        except OSError:
            return None
        return answer.f_bavail * answer.f_frsize

    def run(self, command: Sequence[str], *, limit: float) -> Outcome:
        """Run a tool for at most `limit` seconds; its messages are not translated."""
        env = {**self.environ, "LC_ALL": "C"}
        return run_bounded(command, timeout=self.remaining(limit), env=env)

    def child(
        self,
        name: str,
        *,
        limit: float,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> Answer:
        """Run the child module `name` with `arguments` in an interpreter of its own for at most `limit` seconds.

        `python` is the jobs' interpreter, which the child sees as a job would (user site, PYTHONPATH); None is the one
        that runs now, isolated. The sources come from the modules' loader: they may exist in memory only.
        """
        frame, source = (_source("gpulayer.gpu." + module) for module in ("discovery_child", name))
        start = [sys.executable, "-I", "-S"] if python is None else [python]
        command = [*start, "-c", frame, source, *arguments]
        outcome = run_bounded(command, timeout=self.remaining(limit), env=env or self.environ, with_answer=True)
        return parse_answer(outcome)


def parse_answer(outcome: Outcome) -> Answer:
    """Read a child's lines; whatever is no such line makes the answer invalid without losing the others."""
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    *lines, rest = outcome.answer.split(b"\n")
    valid = not rest
    for line in lines:
        try:
            parts = json.loads(line)
        except (ValueError, RecursionError):
            parts = None
        if not (isinstance(parts, list) and len(parts) in _LINE_LENGTHS and isinstance(parts[0], str)):
            valid = False
        elif len(parts) == len(("key", "value")):
            values[parts[0]] = parts[1]
        else:
            errors[parts[0]] = str(parts[2])
    return Answer(values, errors, valid, outcome)


def _source(module: str) -> str:
    """Return a module's text from its loader: on a host it is in memory, not in a file."""
    spec = importlib.util.find_spec(module)
    get_source = getattr(spec.loader if spec else None, "get_source", None)
    source = get_source(module) if get_source else None
    if source is None:
        raise ImportError(f"the source of {module} is not there", name=module)
    return str(source)
