"""Records of other versions: older ones are read, newer ones are left as they are, and neither starts a run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote import processes
from tests.host.agent_client import AgentClient, AgentError, new_spec
from tests.host.test_crashes import wait_until

ADDED = ("foreign_process", "left", "log_hole")  # fields of a state that the first version did not write


def change(path: Path, **fields: Any) -> bytes:
    """Rewrite a record as another version would have; a field that is None goes."""
    record = json.loads(path.read_text())
    for name, value in fields.items():
        record[name] = value
        if value is None:
            del record[name]
    for name in ADDED:
        record["state"].pop(name, None)
    path.write_text(json.dumps(record))
    return path.read_bytes()


def test_a_run_of_an_older_version_that_goes_on_is_followed_cancelled_and_recorded(agent: AgentClient) -> None:
    spec = new_spec("echo begun; sleep 1000")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    pid, start = agent.record(spec["run"])["supervisor"]
    processes.send(pid, start, 9)
    wait_until(lambda: processes.start_of(pid) != start)
    change(agent.run_folder(spec["run"]) / "state.json", sight=None, log_limit=None)
    wait_until(lambda: (agent.status(spec["run"]) or {})["status"] == "orphaned")
    agent.ask("cancel", run=spec["run"], grace=0, by="me")
    assert agent.follow(spec["run"])[0]["status"] == "cancelled"


def test_a_run_of_an_older_version_that_has_ended_is_read_and_collected(agent: AgentClient) -> None:
    spec = new_spec("echo out")
    agent.launch(spec)
    agent.follow(spec["run"])
    pid, start = agent.record(spec["run"])["supervisor"]
    wait_until(lambda: processes.start_of(pid) != start)
    change(agent.run_folder(spec["run"]) / "exit.json", ended=None)
    state, log = agent.follow(spec["run"])
    assert (state["code"], log) == (0, b"out\n")
    assert agent.launch(spec)["new"] is False
    assert agent.ask("gc", older_than=3600, dry=False)[0]["young"] == 1
    assert agent.ask("gc", older_than=0, dry=False)[0]["count"] == 1
    assert (agent.status(spec["run"]) or {})["code"] == 0


@pytest.mark.parametrize("name", ["state.json", "exit.json"])
def test_a_record_of_a_newer_form_is_refused_and_stays_as_it_is(agent: AgentClient, tmp_path: Path, name: str) -> None:
    spec = new_spec(f"echo start >> {tmp_path}/journal")
    agent.launch(spec)
    agent.follow(spec["run"])
    pid, start = agent.record(spec["run"])["supervisor"]
    wait_until(lambda: processes.start_of(pid) != start)
    folder = agent.run_folder(spec["run"])
    if name == "state.json":
        (folder / "exit.json").unlink()
    path = folder / name
    content = change(path, schema=json.loads(path.read_text())["schema"].replace("/1", "/2"))
    for op, fields in (
        ("status", {"runs": [spec["run"]]}),
        ("survey", {"project": "tests", "after": None}),
        ("cancel", {"run": spec["run"], "grace": None, "by": "me"}),
        ("follow", {"run": spec["run"], "offset": 0, "tail": None}),
        ("launch", {"spec": spec}),
    ):
        with pytest.raises(AgentError) as caught:
            agent.ask(op, b"{}" if op == "launch" else b"", **fields)
        assert caught.value.code == "newer"
        assert "newer version" in str(caught.value)
    agent.ask("gc", older_than=0, dry=False)
    assert path.read_bytes() == content
    assert (tmp_path / "journal").read_text() == "start\n"
    path.write_bytes(content.replace(b"/2", b"/1"))


def test_a_cancel_of_a_newer_form_is_a_cancel(agent: AgentClient) -> None:
    spec = new_spec("echo begun; sleep 1000", grace=0)
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    marker = {"schema": "gpulayer.cancel/2", "why": "who knows"}
    (agent.run_folder(spec["run"]) / "cancel.json").write_text(json.dumps(marker))
    assert agent.follow(spec["run"])[0]["status"] == "cancelled"


def test_another_protocol_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with AgentClient(tmp_path) as agent:
        with pytest.raises(AgentError) as caught:
            agent.hello(protocol=2)
        assert caught.value.code == "protocol"
        assert "protocol 1" in str(caught.value)
        assert "the controller 2" in str(caught.value)
