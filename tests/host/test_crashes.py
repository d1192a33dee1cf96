"""What is promised when a process dies: at most one start, devices held until the last one ends, no false success."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote import processes, records
from gpulayer.remote.runs import Run
from tests.host.agent_client import AgentClient, AgentError, new_spec

Agents = Callable[..., AgentClient]

BEFORE_INTENT = ["claimed", "spec-written"]
BEFORE_GATE = ["intent-written", "leader-forked"]
AT_GATE = ["running-written"]
AFTER_GATE = ["gate-opened", "leader-ended", "exit-due", "exit-written"]


def wait_until(holds: Callable[[], bool], limit: float = 20) -> None:
    give_up = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def kill(process: list[int]) -> None:
    """kill -9 of a (pid, start) as a record names it, and wait until it is gone."""
    pid, start = process
    processes.send(pid, start, signal.SIGKILL)
    wait_until(lambda: processes.start_of(pid) != start)


def supervisor_has_ended(agent: AgentClient, run: str) -> None:
    """Wait until nobody watches a run any more: its end is seen a moment before."""
    pid, start = agent.record(run)["supervisor"]
    wait_until(lambda: processes.start_of(pid) != start)


def journaled(tmp_path: Path, then: str = "") -> tuple[Path, dict[str, Any]]:
    """A job that writes down each of its starts."""
    journal = tmp_path / "journal"
    return journal, new_spec(f"echo $$ >> {journal}; {then}")


def starts(journal: Path) -> int:
    return len(journal.read_text().splitlines()) if journal.exists() else 0


@pytest.mark.parametrize("point", BEFORE_INTENT)
def test_a_crash_before_the_intent_leaves_nothing(agents: Agents, tmp_path: Path, point: str) -> None:
    journal, spec = journaled(tmp_path)
    with pytest.raises(AgentError) as caught:
        agents(env={"GL_FAIL": f"{point}:kill:1"}).launch(spec)
    assert caught.value.code == "died"
    agent = agents()
    assert agent.status(spec["run"]) is None
    assert agent.launch(spec)["new"] is True
    assert agent.follow(spec["run"])[0]["code"] == 0
    assert starts(journal) == 1


@pytest.mark.parametrize("point", BEFORE_GATE)
def test_a_crash_before_the_gate_is_a_run_that_never_started(agents: Agents, tmp_path: Path, point: str) -> None:
    journal, spec = journaled(tmp_path)
    told = agents(env={"GL_FAIL": f"{point}:kill:1"}).launch(spec)
    agent = agents()
    again = agent.launch(spec)
    assert again["new"] is False
    assert (again["state"]["status"], again["state"]["reason"]) == ("lost", "never_started")
    assert told["state"]["status"] in {"launching", "lost"}  # a dying process frees its lock a moment after its pipe
    assert agent.follow(spec["run"])[0]["reason"] == "never_started"
    assert starts(journal) == 0
    assert agent.launch({**spec, "run": spec["run"][:-1] + "2", "attempt": 2})["new"] is True


@pytest.mark.parametrize("point", AT_GATE + AFTER_GATE)
def test_a_crash_after_the_gate_never_starts_it_twice(agents: Agents, tmp_path: Path, point: str) -> None:
    journal, spec = journaled(tmp_path)
    first = agents(env={"GL_FAIL": f"{point}:kill:1"})
    assert first.launch(spec)["state"]["run"] == spec["run"]
    agent = agents()
    state = agent.follow(spec["run"])[0]
    expected = ("exited", 0) if point == "exit-written" else ("lost", None)
    assert (state["status"], state["code"]) == expected
    assert state["reason"] == (None if point == "exit-written" else "supervisor_died")
    assert agent.launch(spec)["new"] is False
    assert starts(journal) == (0 if point in AT_GATE else 1)


def test_a_leader_that_dies_before_it_is_the_command_has_not_started(agents: Agents, tmp_path: Path) -> None:
    journal, spec = journaled(tmp_path)
    agents(env={"GL_FAIL": "work-made:kill:1"}).launch(spec)
    state = agents().follow(spec["run"])[0]
    assert (state["status"], state["signal"]) == ("failed_to_start", None)
    assert state["reason"] == "ended by signal 9 before its command ran"
    assert starts(journal) == 0


def test_an_agent_that_dies_mid_launch_changes_nothing(agents: Agents, tmp_path: Path) -> None:
    journal, spec = journaled(tmp_path, "sleep 0.2")
    first = agents()
    first.send("launch", b"{}", spec=spec)
    first.process.kill()
    agent = agents()
    agent.launch(spec)
    state, _ = agent.follow(spec["run"])
    assert state["code"] == 0
    assert starts(journal) == 1


def test_an_orphan_runs_on_holds_its_device_and_ends_as_lost(agents: Agents, tmp_path: Path) -> None:
    agent = agents()
    go = tmp_path / "go"
    spec = new_spec(f"echo begun; until test -e {go}; do sleep 0.05; done; echo done", devices=["GPU-a"], slots=None)
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    kill(agent.record(spec["run"])["supervisor"])
    state = agent.status(spec["run"])
    assert state is not None
    assert state["status"] == "orphaned"
    with pytest.raises(AgentError) as caught:
        agent.launch(new_spec("true", job="other", devices=["GPU-a"], slots=None))
    assert (caught.value.code, caught.value.error["holder"]) == ("busy", spec["run"])
    go.touch()
    state, log = agent.follow(spec["run"])
    assert (state["status"], state["reason"]) == ("lost", "supervisor_died")
    assert log == b"begun\ndone\n"
    assert agent.launch(new_spec("true", job="other", devices=["GPU-a"], slots=None))["new"] is True


def test_an_orphan_can_be_cancelled_and_its_deadline_holds(agents: Agents) -> None:
    agent = agents()
    cancelled, late = (
        new_spec("echo begun; sleep 1000", job="one"),
        new_spec("echo begun; sleep 1000", job="two", timeout=2),
    )
    for spec in (cancelled, late):
        agent.launch(spec)
        agent.wait_for(spec["run"], b"begun")
        kill(agent.record(spec["run"])["supervisor"])
    agent.ask("cancel", run=cancelled["run"], grace=None, by="me")
    state = agent.follow(cancelled["run"])[0]
    assert (state["status"], state["reason"]) == ("cancelled", "me")
    state = agent.follow(late["run"])[0]
    assert (state["status"], state["reason"]) == ("timed_out", "late")


def test_a_caretaker_that_dies_is_replaced(agents: Agents) -> None:
    agent = agents()
    spec = new_spec("echo begun; sleep 1000")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    seen = []
    for _ in range(2):
        supervisor = agent.record(spec["run"])["supervisor"]
        assert supervisor not in seen
        seen.append(supervisor)
        kill(supervisor)
        wait_until(lambda: (agent.status(spec["run"]) or {})["status"] == "orphaned")
        wait_until(lambda: agent.record(spec["run"])["supervisor"] not in seen)
    agent.ask("cancel", run=spec["run"], grace=0, by="me")
    assert agent.follow(spec["run"])[0]["status"] == "cancelled"


def test_a_killed_leader_is_a_signal_and_its_children_end_too(agents: Agents, tmp_path: Path) -> None:
    agent = agents()
    spec = new_spec(f"sleep 1000 & echo $! > {tmp_path}/child; echo begun; sleep 1000 & wait")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    child = int((tmp_path / "child").read_text())
    kill(agent.record(spec["run"])["leader"])
    agent.ask("cancel", run=spec["run"], grace=None, by="the impatient")  # which ends the drain, not the verdict
    state = agent.follow(spec["run"])[0]
    assert (state["status"], state["signal"]) == ("signaled", 9)
    assert processes.start_of(child) is None


def test_a_reboot_is_lost_and_starts_nothing_again(agents: Agents, tmp_path: Path) -> None:
    agent = agents()
    journal, spec = journaled(tmp_path, "exec sleep 1000")
    agent.launch(spec)
    wait_until(lambda: starts(journal) == 1)
    record = agent.record(spec["run"])
    kill(record["supervisor"])
    kill(record["leader"])
    path = agent.run_folder(spec["run"]) / "state.json"
    path.write_text(json.dumps({**record, "session": "another boot"}))
    again = agent.launch(spec)
    assert (again["new"], again["state"]["status"], again["state"]["reason"]) == (False, "lost", "reboot")
    assert starts(journal) == 1


def test_a_boot_that_cannot_be_told_makes_nothing_lost_that_lives(agents: Agents) -> None:
    agent = agents()
    spec = new_spec("echo begun; exec sleep 1000")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    record = agent.record(spec["run"])
    kill(record["supervisor"])
    path = agent.run_folder(spec["run"]) / "state.json"
    path.write_text(json.dumps({**record, "session": None}))
    assert (agent.status(spec["run"]) or {})["status"] == "orphaned"


def test_the_names_of_a_run_are_durable_before_it_may_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss must not take the folder away in which the intent lies: every folder above it is forced to disk."""
    forced: list[str] = []
    monkeypatch.setattr(records, "durable_folder", forced.append)
    run = Run(str(tmp_path), "a-0123456789ab-a1")
    run.create()
    records.replace(run.record, {"schema": "x"})
    assert forced == [str(tmp_path), f"{tmp_path}/runs", run.folder]
    run.create()
    assert len(forced) == 3


@pytest.mark.parametrize("name", ["state.json", "exit.json", "spec.json"])
@pytest.mark.parametrize(
    "damage", [b"", b"\x00\xff garbage", b"{}", b'{"schema": "gpulayer.run/1", "state": {"run": "x"}}']
)
def test_damaged_records_never_start_a_run_again(agents: Agents, tmp_path: Path, name: str, damage: bytes) -> None:
    agent = agents()
    journal, spec = journaled(tmp_path)
    agent.launch(spec)
    assert agent.follow(spec["run"])[0]["code"] == 0
    supervisor_has_ended(agent, spec["run"])
    (agent.run_folder(spec["run"]) / name).write_bytes(damage)
    again = agent.launch(spec)
    assert again["new"] is False
    if name == "exit.json":
        assert (again["state"]["status"], again["state"]["reason"]) == ("lost", "supervisor_died")
    else:
        assert (again["state"]["status"], again["state"]["code"]) == ("exited", 0)
    assert agent.status(spec["run"]) == again["state"]
    assert starts(journal) == 1


def test_a_record_that_no_controller_could_read_is_damaged(agents: Agents) -> None:
    """Told as it is, it would make every controller take the host for one that does not keep to the protocol."""
    agent = agents()
    spec = new_spec("exit 3")
    agent.launch(spec)
    agent.follow(spec["run"])
    supervisor_has_ended(agent, spec["run"])
    end = agent.run_folder(spec["run"]) / "exit.json"
    told = end.read_bytes()
    assert b'"code":3' in told
    end.write_bytes(told.replace(b'"code":3', b'"code":' + b"9" * 80))
    found = agent.status(spec["run"])
    assert found is not None
    assert (found["status"], found["reason"]) == ("lost", "supervisor_died")


def test_a_run_whose_records_are_all_damaged_is_lost_and_known(agents: Agents, tmp_path: Path) -> None:
    agent = agents()
    journal, spec = journaled(tmp_path)
    agent.launch(spec)
    agent.follow(spec["run"])
    supervisor_has_ended(agent, spec["run"])
    for name in ("state.json", "exit.json", "spec.json"):
        (agent.run_folder(spec["run"]) / name).write_bytes(b"?")
    again = agent.launch(spec)
    assert (again["new"], again["state"]["status"], again["state"]["run"]) == (False, "lost", spec["run"])
    assert starts(journal) == 1


def test_a_stopped_supervisor_is_not_lost(agents: Agents) -> None:
    agent = agents()
    spec = new_spec("echo begun; sleep 1000", timeout=0.5)
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    pid, start = agent.record(spec["run"])["supervisor"]
    processes.send(pid, start, signal.SIGSTOP)
    time.sleep(0.6)  # the deadline passes: there is nothing else to wait for
    assert (agent.status(spec["run"]) or {})["status"] == "running"
    processes.send(pid, start, signal.SIGCONT)
    assert agent.follow(spec["run"])[0]["status"] == "timed_out"


def test_an_intent_that_cannot_be_written_is_refused_and_one_that_was_fails(agents: Agents, tmp_path: Path) -> None:
    journal, spec = journaled(tmp_path)
    with pytest.raises(AgentError) as caught:
        agents(env={"GL_FAIL": "claimed:error:1"}).launch(spec)
    assert caught.value.code == "system"
    state = agents(env={"GL_FAIL": "leader-forked:error:1"}).launch(spec)["state"]
    assert state["status"] == "failed_to_start"
    assert "failpoint leader-forked" in state["reason"]
    assert starts(journal) == 0
