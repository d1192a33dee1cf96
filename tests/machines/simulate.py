"""Makes the probe answer for another machine from a recording. Standard library only: it runs where an agent runs.

A machine's `python3` runs this before the program of `-c`. The product has no switch for it: the class `System`, which
is all that the probe sees of a machine, is replaced as soon as its module is imported.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from typing import Any

import __main__

SEAM = "gpulayer.gpu.discovery_system"


class Recorded:
    """What is put over a System. Keys of `recording`, all optional:

    - `self`: attributes such as `platform`, `machine`, `kernel`, `hostname`
    - `files`: {path: text}; with `hidden` (a list of path prefixes) all other files are the real machine's
    - `tools`: {name: path}, and `commands`: {"words": stdout, or {"code", "stdout", "stderr", "timed_out"}}; a tool of
      which no command is told runs for real
    - `sysctl`: {name: value}
    - `opened`: {path: the file that the agent opens in its place}
    - `children`: {name: {key: value}}, complete answers, or the lines that a child wrote; other children run for real
    - `endings`: {name: {"code", "signal", "timed_out", "stderr"}} of children that did not just end
    - `cpus` and `disk_free`
    """

    recording: dict[str, Any]
    seam: Any

    def __init__(self, *, deadline: float) -> None:
        super().__init__(deadline=deadline)  # type: ignore[call-arg]  # System's
        for key, value in self.recording.get("self", {}).items():
            setattr(self, key, value)

    def _is_real(self, path: str) -> bool:
        hidden = self.recording.get("hidden")
        return hidden is not None and path not in self._files() and not path.startswith(tuple(hidden))

    def _files(self) -> dict[str, str]:
        files: dict[str, str] = self.recording.get("files", {})
        return files

    def read(self, path: str) -> Any:
        return self.seam.read(self, path) if self._is_real(path) else self._files().get(path)

    def exists(self, path: str) -> Any:
        if self._is_real(path):
            return self.seam.exists(self, path)
        return any(f"{name}/".startswith(f"{path}/") for name in self._files())

    def names(self, folder: str) -> Any:
        if self._is_real(folder):
            return self.seam.names(self, folder)
        below = [name[len(folder) + 1 :] for name in self._files() if name.startswith(f"{folder}/")]
        return sorted({name.partition("/")[0] for name in below})

    def which(self, tool: str, _folders: Any) -> Any:
        return self.recording.get("tools", {}).get(tool)

    def cpus(self) -> Any:
        return self.recording["cpus"] if "cpus" in self.recording else self.seam.cpus(self)

    def disk_free(self, folder: str) -> Any:
        return self.recording["disk_free"] if "disk_free" in self.recording else self.seam.disk_free(self, folder)

    def run(self, command: Any, *, limit: float) -> Any:
        outcome = sys.modules[SEAM].__dict__["Outcome"]
        told = self.recording.get("commands", {})
        is_tool = command[0] in self.recording.get("tools", {}).values()
        if is_tool and not any(words.startswith(f"{command[0]} ") for words in told):
            return self.seam.run(self, command, limit=limit)
        if command[0].endswith("/sysctl") and "sysctl" in self.recording:
            said = self._sysctl(command[1:])
        else:
            said = told.get(" ".join(command))
        if said is None:
            return outcome(error="No such file or directory")
        if isinstance(said, str):
            said = {"code": 0, "stdout": said}
        streams = {name: said.get(name, "").encode() for name in ("stdout", "stderr")}
        return outcome(code=said.get("code"), timed_out=said.get("timed_out", False), **streams)

    def _sysctl(self, names: Any) -> dict[str, Any]:
        known = [name for name in names if name in self.recording["sysctl"]]
        lines = "".join(f"{name}: {self.recording['sysctl'][name]}\n" for name in known)
        return {"code": 0 if len(known) == len(names) else 1, "stdout": lines}

    def child(self, name: str, **options: Any) -> Any:
        values = self.recording.get("children", {}).get(name)
        if values is None:
            return self.seam.child(self, name, **options)
        lines = [*values.items(), ("done", True)] if isinstance(values, dict) else values
        ending = {"code": 0, **self.recording.get("endings", {}).get(name, {})}
        ending["stderr"] = ending.get("stderr", "").encode()
        answer = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        seam = sys.modules[SEAM].__dict__
        return seam["parse_answer"](seam["Outcome"](**ending, answer=answer))


def recorded_system(base: Any, recording: dict[str, Any]) -> Any:
    """Return the class System of the machine that `recording` tells of; `base` is the real one."""
    return type("RecordedSystem", (Recorded, base), {"recording": recording, "seam": base})


def replace_at_import(recording: dict[str, Any]) -> None:
    """Put the recorded System in the place of the real one the moment that anything imports it."""
    real_import = builtins.__import__

    def simulated_import(name: str, *arguments: Any, **options: Any) -> Any:
        module = real_import(name, *arguments, **options)
        seam = sys.modules.get(SEAM)
        whole = seam is not None and hasattr(seam, "parse_answer")
        if whole and builtins.__import__ is simulated_import:  # outer imports end after the one that did it
            builtins.__import__ = real_import
            vars(seam)["System"] = recorded_system(vars(seam)["System"], recording)
        return module

    builtins.__import__ = simulated_import


def open_instead(paths: dict[str, str]) -> None:
    """Let `open` open other files for some paths."""
    real_open = builtins.open

    def simulated_open(file: Any, *arguments: Any, **options: Any) -> Any:
        return real_open(paths.get(file, file), *arguments, **options)

    if paths:
        builtins.open = simulated_open


def run(folder: str) -> None:
    """Be the machine whose recording lies in `folder`, then run the program that `-c` was given."""
    with open(os.path.join(folder, "recording.json"), encoding="utf-8") as file:
        recording = json.load(file)
    sys.executable = os.path.join(folder, "bin", "python3")
    replace_at_import(recording)
    open_instead(recording.get("opened", {}))
    own = recording.get("self", {})
    if "machine" in own and not sys.flags.isolated:
        real = os.uname()
        answer = os.uname_result((own["platform"].title(), own["hostname"], own["kernel"], real[3], own["machine"]))
        os.uname = lambda: answer
    program = sys.argv.pop(1)
    exec(compile(program, "<string>", "exec"), vars(__main__))  # noqa: S102  # what `python -c` does
