"""The agent on other Pythons than the controller's."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.host.agent_client import AgentClient, new_spec


@functools.cache
def pythons() -> dict[int, str]:
    """The Pythons that are installed here and new enough for a host (3.9), by minor version."""
    named = [shutil.which(f"python3.{minor}") for minor in range(9, 15)]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, "/usr/bin/python3", *filter(None, named), *map(str, versions.glob("3.*/bin/python3"))]
    found: dict[int, str] = {}
    for python in filter(os.path.exists, candidates):
        ask = [python, "-c", "import sys; print('version %d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)  # a version manager's shim may fail
        version = re.search(r"version 3\.(\d+)", answer.stdout)
        if version and int(version[1]) >= 9:
            found.setdefault(int(version[1]), python)
    return found


@pytest.mark.parametrize("choose", [min, max], ids=["oldest", "newest"])
def test_a_whole_life_on_another_python(
    agents: Callable[..., AgentClient], choose: Callable[[Iterable[int]], int]
) -> None:
    agent = agents(python=pythons()[choose(pythons())])
    assert json.loads(agent.ask("probe", python=None, frameworks=[], fresh=False)[1])["host"]["python"]["version"]
    spec = new_spec("cat made > out; python3 -c 'print(1)'; exit 4", setup="echo \udcff made > made", outputs=["*"])
    agent.launch(spec)
    state, log = agent.follow(spec["run"])
    assert (state["status"], state["code"], log) == ("exited", 4, b"1\n")
    frames = agent.frames(agent.send("fetch", run=spec["run"], patterns=["*"]))
    fetched = {header.get("file"): payload for header, payload in frames}
    assert fetched == {"made": b"\xff made\n", "out": b"\xff made\n", None: b""}
    long = new_spec("trap '' TERM; echo begun; while :; do sleep 0.05; done", job="long", devices=["GPU-a"], slots=None)
    agent.launch(long)
    agent.wait_for(long["run"], b"begun")
    assert agent.ask("survey", project="tests", after=None)[0]["holders"] == {"GPU-a": long["run"]}
    agent.ask("cancel", run=long["run"], grace=0.1, by="me")
    assert agent.follow(long["run"])[0]["status"] == "cancelled"
    orphan = new_spec("echo begun; sleep 1000", job="orphan", timeout=1)
    agent.launch(orphan)
    agent.wait_for(orphan["run"], b"begun")
    os.kill(agent.record(orphan["run"])["supervisor"][0], 9)
    assert agent.follow(orphan["run"])[0]["status"] == "timed_out"
