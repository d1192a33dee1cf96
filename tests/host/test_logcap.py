"""A log that is too long loses its middle: the disk is bounded, offsets stay, and nobody takes zeros for output."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from gpulayer.remote import processes
from tests.host.agent_client import AgentClient, new_spec
from tests.host.test_crashes import wait_until

LIMIT = 1 << 20
LINES = b"".join(b"%099d\n" % number for number in range(100_000))
COMMAND = (
    "import os, sys, time\n"
    "data = b''.join(b'%099d\\n' % number for number in range(100_000))\n"
    "for at in range(0, len(data), 500_000):\n"
    "    os.write(1, data[at:at + 500_000]); time.sleep(0.15)\n"
)


def spec_of(**fields: Any) -> dict[str, Any]:
    return new_spec(["python3", "-c", COMMAND], log_bytes=LIMIT, **fields)


def follow(agent: AgentClient, run: str, offset: int = 0) -> tuple[dict[str, Any], dict[int, bytes], list[list[int]]]:
    """The final state, the pieces of the log by offset, and its holes."""
    pieces: dict[int, bytes] = {}
    holes = []
    header: dict[str, Any] = {}
    for header, payload in agent.frames(agent.send("follow", run=run, offset=offset, tail=None)):
        if "off" in header:
            assert header["off"] == offset
            if "hole" in header:
                holes.append([offset, offset + header["hole"]])
            else:
                pieces[offset] = payload
            offset += header.get("hole", len(payload))
    assert offset == header["state"]["log_size"]
    return header["state"], pieces, holes


def test_a_log_beyond_its_cap_loses_its_middle(agent: AgentClient) -> None:
    spec = spec_of()
    agent.launch(spec)
    log = agent.run_folder(spec["run"]) / "output.log"
    most = 0

    def ended() -> bool:
        nonlocal most
        most = max(most, log.stat().st_blocks * 512)
        return (agent.run_folder(spec["run"]) / "exit.json").exists()

    wait_until(ended)
    state, pieces, holes = follow(agent, spec["run"])
    assert (state["code"], state["log_size"]) == (0, len(LINES))
    assert holes == [state["log_hole"]]
    assert all(LINES[offset : offset + len(piece)] == piece for offset, piece in pieces.items())
    kept = sum(map(len, pieces.values()))
    assert LIMIT // 2 <= kept <= LIMIT + 500_000
    assert min(pieces) == 0
    assert max(offset + len(piece) for offset, piece in pieces.items()) == len(LINES)
    assert most < LIMIT + 6_000_000  # what is written between two looks comes on top
    assert log.stat().st_blocks * 512 < 2 * LIMIT + 500_000


def test_a_follower_that_keeps_up_gets_every_byte(agent: AgentClient) -> None:
    spec = spec_of(job="followed")
    agent.launch(spec)
    state, pieces, holes = follow(agent, spec["run"])
    assert state["log_hole"] is not None
    dropped = sum(end - start for start, end in holes)
    assert sum(map(len, pieces.values())) + dropped == len(LINES)
    assert all(LINES[offset : offset + len(piece)] == piece for offset, piece in pieces.items())


def test_where_the_middle_cannot_be_dropped_the_run_ends(agents: Callable[..., AgentClient]) -> None:
    agent = agents(env={"GL_FAIL": "log-punched:error:1"})
    spec = spec_of(job="stopped", grace=0)
    agent.launch(spec)
    state, log = agent.follow(spec["run"])
    assert state["status"] == "log_capped"
    assert "cannot be dropped" in state["reason"]
    assert state["log_hole"] is None
    assert log == LINES[: len(log)]
    assert LIMIT < len(log) < len(LINES)
    assert (agent.run_folder(spec["run"]) / "output.log").stat().st_size == len(log)


def test_what_is_dropped_is_told_before_it_is_dropped(agents: Callable[..., AgentClient]) -> None:
    """The supervisor is stopped at that moment: who reads now is told of the hole, and would get zeros otherwise."""
    agent = agents(env={"GL_FAIL": "log-punched:stop:1"})
    spec = spec_of(job="told")
    agent.launch(spec)
    pid, start = agent.record(spec["run"])["supervisor"]

    def stopped() -> bool:
        supervisor = processes.look(pid)
        return supervisor is not None and supervisor.stopped

    wait_until(stopped)
    hole = agent.record(spec["run"])["state"]["log_hole"]
    headers = agent.frames(agent.send("follow", run=spec["run"], offset=hole[0], tail=None))
    assert next(header for header, _ in headers if "off" in header)["hole"] == hole[1] - hole[0]
    processes.send(pid, start, signal.SIGCONT)
    assert [header["state"]["status"] for header, _ in headers if "ok" in header] == ["exited"]
