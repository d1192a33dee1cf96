"""What is removed is old and dead; no run is forgotten, and none is started again because its folder is gone."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote import processes
from tests.host.agent_client import AgentClient, AgentError, new_spec
from tests.host.test_crashes import wait_until

Agents = Callable[..., AgentClient]


def collect(agent: AgentClient, older_than: int = 0, *, dry: bool = False) -> dict[str, Any]:
    return agent.ask("gc", older_than=older_than, dry=dry)[0]


def finished(agent: AgentClient, **fields: Any) -> dict[str, Any]:
    """A run that has ended, and whose supervisor is gone."""
    spec = new_spec(fields.pop("command", "echo out"), **fields)
    agent.launch(spec)
    agent.follow(spec["run"])
    pid, start = agent.record(spec["run"])["supervisor"]
    wait_until(lambda: processes.start_of(pid) != start)
    return spec


def names(answer: dict[str, Any]) -> list[str]:
    return [entry["run"] for entry in answer["runs"]]


def test_a_dry_run_tells_what_a_real_one_removes_and_touches_nothing(agent: AgentClient) -> None:
    spec = finished(agent, job="old", command="head -c 1000000 /dev/zero > file; chmod 000 file; mkdir -m 0 dir")
    before = sorted(agent.folder.rglob("*"))
    told = collect(agent, dry=True)
    assert sorted(agent.folder.rglob("*")) == before
    assert names(told) == [spec["run"]]
    assert told["runs"][0]["bytes"] > 1_000_000
    done = collect(agent)
    assert (done["count"], names(done)) == (1, [spec["run"]])
    assert not agent.run_folder(spec["run"]).exists()
    assert not list(agent.run_folder("x").parent.glob(".trash-*"))
    assert collect(agent)["count"] == 0


def test_what_is_removed_is_not_run_again_and_is_still_known(agent: AgentClient, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    spec = finished(agent, command=f"echo start >> {journal}; exit 3")
    state = agent.status(spec["run"])
    collect(agent)
    assert agent.status(spec["run"]) == state
    assert [known["run"] for known in agent.ask("survey", project="tests", after=None)[0]["runs"]] == [spec["run"]]
    again = agent.launch(spec)
    assert (again["new"], again["state"]) == (False, state)
    assert journal.read_text() == "start\n"
    collect(agent)  # the empty folder that the launch has made goes too
    assert agent.status(spec["run"]) == state
    with pytest.raises(AgentError) as caught:
        agent.launch({**spec, "key": "other" + spec["key"]})
    assert caught.value.code == "conflict"


def test_who_was_told_that_a_run_has_ended_holds_nothing_of_it_any_more(agent: AgentClient) -> None:
    spec = finished(agent)
    with (agent.run_folder(spec["run"]) / "lock").open() as lock:
        for _ in range(50):  # the process that answers may live on for a moment
            assert agent.launch(spec)["new"] is False
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_UN)
    assert collect(agent, 3600)["young"] == 1


def test_a_damaged_tombstone_is_a_lost_run_and_never_an_absent_one(agent: AgentClient, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    spec = finished(agent, command=f"echo start >> {journal}")
    collect(agent)
    tombstone = agent.run_folder(spec["run"]).parent.parent / "done" / f"{spec['run']}.json"
    tombstone.write_bytes(b"\0")
    assert agent.launch(spec)["new"] is False
    assert (agent.status(spec["run"]) or {})["status"] == "lost"
    assert journal.read_text() == "start\n"


def test_logs_and_outputs_that_were_removed_are_said_to_be(agent: AgentClient) -> None:
    spec = finished(agent, command="printf 12345")
    collect(agent)
    with pytest.raises(AgentError) as caught:
        agent.follow(spec["run"])
    assert caught.value.code == "removed"
    with pytest.raises(AgentError) as caught:
        agent.ask("fetch", run=spec["run"], patterns=["**"])
    assert caught.value.code == "removed"
    # Who has the whole log already is told the end.
    tail = {"bytes": 5, "sha256": hashlib.sha256(b"12345").hexdigest()}
    assert agent.follow(spec["run"], 5, tail)[0]["status"] == "exited"


def test_what_lives_stays_also_where_its_supervisor_has_died(agents: Agents) -> None:
    agent = agents()
    running, orphan = (new_spec("echo begun; sleep 1000", job=job) for job in ("running", "orphan"))
    for spec in (running, orphan):
        agent.launch(spec)
        agent.wait_for(spec["run"], b"begun")
    pid, start = agent.record(orphan["run"])["supervisor"]
    processes.send(pid, start, signal.SIGKILL)
    wait_until(lambda: processes.start_of(pid) != start)
    answer = collect(agent)
    assert (answer["count"], answer["live"]) == (0, 2)
    assert (agent.status(running["run"]) or {})["status"] == "running"
    wait_until(lambda: (agent.status(orphan["run"]) or {})["status"] == "orphaned")  # its caretaker says so


def test_age_is_told_by_the_boot_clock_and_no_set_clock_changes_it(agent: AgentClient) -> None:
    spec = finished(agent)
    exit_record = agent.run_folder(spec["run"]) / "exit.json"
    os.utime(exit_record, (0, 0))  # as if the wall clock had been set forward by decades since
    assert collect(agent, 3600, dry=True)["young"] == 1
    record = json.loads(exit_record.read_text())
    record["ended"]["boot_time"] -= 7200
    exit_record.write_text(json.dumps(record))
    os.utime(exit_record, (2**32, 2**32))  # and back
    assert names(collect(agent, 3600, dry=True)) == [spec["run"]]
    record["ended"]["session"] = "an earlier boot"  # only the wall clock is left
    exit_record.write_text(json.dumps(record))
    assert collect(agent, 3600, dry=True)["young"] == 1
    os.utime(exit_record, (time.time() - 7200,) * 2)
    assert names(collect(agent, 3600, dry=True)) == [spec["run"]]


def ship(agent: AgentClient, files: dict[str, bytes]) -> str:
    """Send a tree and return its name."""
    entries = [[name, "file", len(data), hashlib.sha256(data).hexdigest()] for name, data in sorted(files.items())]
    manifest = json.dumps(entries, separators=(",", ":"), sort_keys=True).encode()
    blobs = [*files.values(), manifest]
    pairs = [[hashlib.sha256(blob).hexdigest(), len(blob)] for blob in blobs]
    agent.ask("put", b"".join(blobs), blobs=pairs)
    return str(pairs[-1][0])


def test_code_goes_with_the_last_run_that_was_made_of_it(agent: AgentClient) -> None:
    shared, own = b"shared", b"own"
    old = ship(agent, {"a": shared, "b": own})
    new = ship(agent, {"a": shared})
    first = finished(agent, job="first", tree=old, setup="echo made > c")
    second = new_spec("echo begun; sleep 1000", job="second", tree=new, setup="echo made > c")
    agent.launch(second)
    agent.wait_for(second["run"], b"begun")
    answer = collect(agent)
    assert names(answer) == [first["run"]]
    assert answer["code"]["count"] == 3  # the old manifest, what it had alone, and its setup
    missing = agent.ask("have", blobs=[old, new, *(hashlib.sha256(data).hexdigest() for data in (shared, own))])[0]
    assert missing["missing"] == [old, hashlib.sha256(own).hexdigest()]
    with pytest.raises(AgentError) as caught:
        agent.launch(new_spec("true", job="third", tree=old))
    assert caught.value.code == "tree"
    agent.ask("cancel", run=second["run"], grace=0, by="me")
    assert agent.follow(second["run"])[0]["status"] == "cancelled"


def test_no_code_is_removed_while_a_job_is_made_of_it(agents: Agents) -> None:
    agent = agents()
    tree = ship(agent, {"a": b"content"})
    spec = new_spec("cat a", tree=tree, setup="echo begun; until test -e go; do sleep 0.02; done")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    assert collect(agent)["code"] == {"count": 0, "bytes": 0, "busy": True}
    (folder,) = agent.run_folder("x").parent.parent.glob("prepared/*/tree")
    (folder / "go").touch()
    assert agent.follow(spec["run"])[1] == b"begun\ncontent"
