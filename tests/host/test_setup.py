from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.host.agent_client import AgentClient, AgentError, new_spec


def ship(agent: AgentClient, files: dict[str, bytes]) -> str:
    """Send a tree as a controller does, and return its name."""
    entries = [[name, "file", len(data), hashlib.sha256(data).hexdigest()] for name, data in sorted(files.items())]
    manifest = json.dumps(entries, separators=(",", ":")).encode()
    contents = {hashlib.sha256(data).hexdigest(): data for data in (manifest, *files.values())}
    missing = agent.ask("have", blobs=list(contents))[0]["missing"]
    payload = b"".join(contents[sha] for sha in missing)
    agent.ask("put", payload, blobs=[[sha, len(contents[sha])] for sha in missing])
    return hashlib.sha256(manifest).hexdigest()


def run(agent: AgentClient, command: str, **fields: Any) -> tuple[dict[str, Any], bytes]:
    spec = new_spec(command, **fields)
    agent.launch(spec)
    return agent.follow(spec["run"])


def test_a_job_works_in_its_own_copy_of_what_was_shipped(agent: AgentClient) -> None:
    tree = ship(agent, {"data/text": b"text", "main.sh": b"cat data/text; echo changed > data/text"})
    assert run(agent, "sh main.sh", job="one", tree=tree)[1] == b"text"
    assert run(agent, "sh main.sh; pwd", job="two", tree=tree)[1].startswith(b"text")
    assert run(agent, "ls -A", job="three")[1] == b""


def test_code_that_is_missing_is_refused_before_anything_starts(agent: AgentClient) -> None:
    spec = new_spec("true", tree="0" * 64)
    with pytest.raises(AgentError) as caught:
        agent.launch(spec)
    assert caught.value.code == "tree"
    assert agent.status(spec["run"]) is None


def test_the_setup_runs_once_for_each_tree_and_its_output_is_in_the_log(agent: AgentClient, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    setup = f"echo setting up; cat version > built; echo x >> {journal}"
    first, second = ship(agent, {"version": b"1"}), ship(agent, {"version": b"2"})
    assert run(agent, "cat built; rm built", job="a", tree=first, setup=setup)[1] == b"setting up\n1"
    assert run(agent, "cat built", job="b", tree=first, setup=setup)[1] == b"1"
    assert run(agent, "cat built", job="c", tree=second, setup=setup)[1] == b"setting up\n2"
    assert run(agent, "echo none", job="d", setup="echo alone")[1] == b"alone\nnone\n"
    assert journal.read_text() == "x\nx\n"


def test_jobs_that_start_together_wait_for_one_setup(agent: AgentClient, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    setup = f"echo x >> {journal}; sleep 0.2; echo ready > ready"
    specs = [new_spec("cat ready", job=f"job-{number}", setup=setup) for number in range(4)]
    requests = [agent.send("launch", b"{}", spec=spec) for spec in specs]
    for request in requests:
        agent.answer(request)
    assert {agent.follow(spec["run"])[1] for spec in specs} == {b"ready\n"}
    assert journal.read_text() == "x\n"


def test_a_setup_that_failed_or_was_cut_short_runs_again(agent: AgentClient, tmp_path: Path) -> None:
    setup = f"echo trying; mkdir half; test -e {tmp_path}/go; echo good > result"
    state, log = run(agent, "cat result", job="a", setup=setup)
    assert (state["status"], state["reason"]) == (
        "failed_to_start",
        "setup exited with 1; its output is in the log",
    )
    assert log == b"trying\n"
    (tmp_path / "go").touch()
    assert run(agent, "cat result", job="b", setup=setup)[1] == b"trying\ngood\n"


def test_a_setup_may_make_the_interpreter(agent: AgentClient) -> None:
    setup = "mkdir -p .venv/bin; printf '#!/bin/sh\\necho mine\\n' > .venv/bin/python; chmod +x .venv/bin/python"
    assert run(agent, "python3", setup=setup, python=".venv/bin/python")[1] == b"mine\n"


def test_what_the_host_cannot_give_is_refused_with_numbers(agents: Callable[..., AgentClient]) -> None:
    agent = agents()
    for code in ("disk", "memory"):
        spec = {**new_spec("true"), f"{code}_bytes": 2**60}
        with pytest.raises(AgentError, match=r"1073741824\.0 GiB of") as caught:
            agent.launch(spec)
        assert (caught.value.code, caught.value.error["needed"]) == (code, 2**60)
        assert agent.status(spec["run"]) is None


def test_outputs_come_back_whatever_the_end(agent: AgentClient) -> None:
    state, _ = run(agent, "mkdir out; echo one > out/a; echo two > b; exit 4", outputs=["out/**"])
    assert (state["code"], state["outputs"]) == (4, ["out/**"])
    frames = list(agent.frames(agent.send("fetch", run=state["run"], patterns=state["outputs"])))
    assert [(header.get("file"), payload) for header, payload in frames] == [("out/a", b"one\n"), (None, b"")]
    assert frames[-1][0] == {
        "id": frames[-1][0]["id"],
        "ok": True,
        "files": 1,
        "bytes": 4,
        "skipped": 0,
        "unmatched": [],
    }


def test_a_survey_shows_runs_of_the_project_and_who_holds_what(agent: AgentClient) -> None:
    for number in range(3):
        run(agent, f"exit {number}", job=f"job-{number}")
    run(agent, "true", job="stranger", project="another")
    agent.launch(new_spec("sleep 1000", job="holds", devices=["GPU-a"], slots=None))
    agent.launch(new_spec("sleep 1000", job="slot"))
    answer = agent.ask("survey", project="tests", after=None)[0]
    assert [(state["job"], state["code"]) for state in answer["runs"]] == [
        ("holds", None),
        ("job-0", 0),
        ("job-1", 1),
        ("job-2", 2),
        ("slot", None),
    ]
    assert answer["holders"] == {"GPU-a": "holds-kkkkkkkkkkkk-a1"}
    assert (answer["slots_held"], answer["more"]) == (1, False)
    after = agent.ask("survey", project="tests", after=answer["runs"][2]["run"])[0]
    assert [state["job"] for state in after["runs"]] == ["job-2", "slot"]
