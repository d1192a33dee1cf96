"""A gang on its hosts: it comes together or leaves nothing, and it has one fate, with no controller in between."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote import processes
from gpulayer.spec.jobs import RESERVED_IN_GANGS
from tests.host.agent_client import AgentError, new_spec
from tests.host.gangs import TOKEN, Gangs, ends, gangs, supervisor_stopped
from tests.host.test_crashes import kill, wait_until

__all__ = ["gangs"]

STAYS = ["sh", "-c", "echo begun; exec sleep 1000"]


def ranks(state: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(one["rank"], one["status"], one["code"], one["signal"], one["reason"]) for one in state["ranks"]]


def one_fails(rank: int, how: str) -> list[str]:
    """Ranks of which one ends like that once all have begun; the others would stay."""
    return ["sh", "-c", f"echo begun; test $RANK = {rank} || exec sleep 1000; {how}"]


def test_real_torchrun_numbers_the_ranks_as_the_plan_does_and_each_has_a_log_of_its_own(gangs: Gangs) -> None:
    gang = gangs(2, processes=2)
    gang.env = {}
    names = " ".join(f"${{{name}:?}}" for name in sorted(RESERVED_IN_GANGS))  # sh ends with 2 where one lacks
    agents = gang.launch(["sh", "-c", f": {names}; echo $RANK $LOCAL_RANK $WORLD_SIZE $TORCHELASTIC_RUN_ID"])
    states = gang.follow(agents)
    assert [ends(state) for state in states] == [("exited", 0, None, None)] * 2
    assert [ranks(state) for state in states] == [
        [(first + local, "exited", 0, None, None) for local in range(2)] for first in (0, 2)
    ]
    for rank in range(4):
        log = gang.log(agents[rank // 2], rank)
        assert log == f"{rank} {rank % 2} 4 {gang.run(0)[:-3]}\n".encode()
        assert states[rank // 2]["ranks"][rank % 2]["log_size"] == len(log)
    assert [state["gang"] for state in states] == [{"node": node, "nodes": 2, "processes": 2} for node in range(2)]


def test_a_gang_of_one_node_is_held_by_nobody(gangs: Gangs) -> None:
    gang = gangs(1, processes=2)
    agent = gang.start(0)
    show = ["sh", "-c", "echo $MASTER_ADDR $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME $GPULAYER_RUN_ID"]
    answer = agent.launch(gang.spec(0, show), token=TOKEN)
    assert answer["new"] is True
    assert agent.follow(gang.run(0))[0]["code"] == 0
    assert gang.log(agent, 1) == f"127.0.0.1 lo =lo {gang.run(0)}\n".encode()


def test_a_rank_that_fails_ends_all_and_every_record_says_which_it_was(gangs: Gangs) -> None:
    gang = gangs(3)
    agents = gang.launch(one_fails(1, "exit 7"))
    states = gang.follow(agents)
    why = "stopped because rank 1 on beta failed"
    stopped = ("cancelled", None, None, why)
    assert [ends(state) for state in states] == [stopped, ("exited", 7, None, None), stopped]
    assert [ranks(state)[0][1:] for state in states] == [stopped, ("exited", 7, None, None), stopped]
    assert [state["first_failure"] for state in states] == [{"rank": 1, "host": "beta", "code": 7, "signal": None}] * 3


def test_a_rank_that_is_killed_is_a_signal_and_its_neighbour_is_stopped(gangs: Gangs) -> None:
    gang = gangs(2, processes=2)
    agents = gang.launch(one_fails(1, "kill -9 $$"))
    first, second = gang.follow(agents)
    why = "stopped because rank 1 on alpha failed"
    assert ends(first) == ("signaled", None, 9, None)
    assert ranks(first) == [(0, "cancelled", None, None, why), (1, "signaled", None, 9, None)]
    assert ends(second) == ("cancelled", None, None, why)


def test_what_ends_with_the_first_failure_keeps_its_own_end_and_has_the_cause(gangs: Gangs, tmp_path: Path) -> None:
    """As a rank does that sees its peer's end. Where the hub does not answer in time the node goes by its own word."""
    gang = gangs(2, processes=2)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    agents = gang.launch(["sh", "-c", f"echo begun; test $RANK -lt 2 && exec sleep 1000; read x < {gate}; exit $RANK"])
    gang.wait_for(agents, b"begun")
    with supervisor_stopped(agents[0], gang.run(0)), gate.open("w") as opened:
        opened.write("go\ngo\n")
        opened.flush()
        state = agents[1].follow(gang.run(1))[0]
    first = state["first_failure"]["rank"]
    second = 5 - first
    assert ends(state) == ("exited", first, None, None)
    why = f"stopped because rank {first} on beta failed"
    assert sorted(ranks(state)) == sorted([(first, "exited", first, None, None), (second, "exited", second, None, why)])
    gang.follow(agents)


def test_the_neighbour_of_a_failed_rank_is_asked_to_end_and_has_its_grace(gangs: Gangs, tmp_path: Path) -> None:
    """Torchrun ends its children in haste, while the hub is still to say what becomes of the gang."""
    gang = gangs(2, processes=2)
    gate = tmp_path / "gate"
    fails = f"until test -e {gate}; do sleep 0.02; done; exit 7"
    saves = "trap 'sleep 0.3; echo saved; exit 0' TERM; echo begun; while :; do sleep 0.02; done"
    agents = gang.launch(["sh", "-c", f"if test $RANK = 3; then echo begun; {fails}; fi; {saves}"])
    gang.wait_for(agents, b"begun")
    with supervisor_stopped(agents[0], gang.run(0)):
        gate.touch()
        state = agents[1].follow(gang.run(1))[0]
    assert ranks(state) == [(2, "exited", 0, None, None), (3, "exited", 7, None, None)]
    assert gang.log(agents[1], 2).endswith(b"saved\n")
    gang.follow(agents)


def test_the_ranks_of_a_torchrun_that_is_killed_are_asked_to_end(gangs: Gangs) -> None:
    gang = gangs(1)
    agent = gang.start(0)
    saves = "trap 'echo saved; exit 0' TERM; echo begun; while :; do sleep 0.02; done"
    agent.launch(gang.spec(0, ["sh", "-c", saves]), token=TOKEN)
    gang.wait_for([agent], b"begun")
    kill(agent.record(gang.run(0))["leader"])
    assert ends(agent.follow(gang.run(0))[0]) == ("signaled", None, 9, None)
    assert gang.log(agent, 0).endswith(b"saved\n")


def test_a_rank_that_succeeds_early_stops_nobody(gangs: Gangs, tmp_path: Path) -> None:
    gang = gangs(2)
    go = tmp_path / "go"
    agents = gang.launch(["sh", "-c", f"echo begun; test $RANK = 0 || until test -e {go}; do sleep 0.02; done"])
    agents[0].wait_for(gang.run(0), b"begun", "rank-0.log")
    wait_until(lambda: (agents[0].status(gang.run(0)) or {})["ranks"][0]["status"] == "exited")
    pid, start = agents[0].record(gang.run(0))["leader"]
    wait_until(lambda: processes.start_of(pid) != start)
    for number in range(2):  # in which time the hub would have ended
        agents[0].launch(new_spec("true", job=f"other-{number}"))
        agents[0].follow(new_spec("", job=f"other-{number}")["run"])
    assert [(agent.status(gang.run(node)) or {})["status"] for node, agent in enumerate(agents)] == ["running"] * 2
    go.touch()
    assert [ends(state) for state in gang.follow(agents)] == [("exited", 0, None, None)] * 2


def test_the_term_of_a_stop_reaches_a_command_once_and_its_grace_holds(gangs: Gangs) -> None:
    gang = gangs(2)
    count = "import signal, time\nsignal.signal(15, lambda *_: print('term', flush=True))\nprint('begun', flush=True)\n"
    agents = gang.launch(["python", "-c", f"{count}while True: time.sleep(0.05)"], grace=1)
    gang.wait_for(agents, b"begun")
    agents[1].ask("cancel", run=gang.run(1), grace=None, by="me")
    assert [ends(state) for state in gang.follow(agents)] == [("cancelled", None, None, "me")] * 2
    assert [gang.log(agent, rank) for rank, agent in enumerate(agents)] == [b"begun\nterm\n"] * 2


def test_a_deadline_of_one_node_is_that_of_all(gangs: Gangs) -> None:
    gang = gangs(2)
    agents = gang.launch(STAYS, timeout=1.5)
    assert [ends(state)[0] for state in gang.follow(agents)] == ["timed_out"] * 2


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_lost_ends_the_gang_and_what_runs_on_it(gangs: Gangs, node: int) -> None:
    gang = gangs(2)
    agents = gang.launch(STAYS)
    gang.wait_for(agents, b"begun")
    kill(agents[node].record(gang.run(node))["supervisor"])
    other = 1 - node
    state = agents[other].follow(gang.run(other))[0]
    assert ends(state) == ("cancelled", None, None, f"stopped because {gang.names[node]} was lost")
    assert state["first_failure"] == {"rank": None, "host": gang.names[node], "code": None, "signal": None}
    # Whoever asks first finds what is left of the other one, which is ended.
    state = agents[node].follow(gang.run(node))[0]
    assert ends(state) == ("lost", None, None, "supervisor_died")
    assert ranks(state) == [(node, "lost", None, None, "supervisor_died")]


def test_a_node_that_is_silent_is_lost(gangs: Gangs) -> None:
    gang = gangs(2)
    agents = gang.launch(STAYS, gang={"silence": 1})
    gang.wait_for(agents, b"begun")
    with supervisor_stopped(agents[1], gang.run(1)):
        assert ends(agents[0].follow(gang.run(0))[0])[3] == "stopped because beta was lost"
    state = agents[1].follow(gang.run(1))[0]
    assert ends(state)[0] == "cancelled"


def test_where_torchrun_itself_fails_nothing_was_started_and_all_say_so(gangs: Gangs, tmp_path: Path) -> None:
    gang = gangs(2)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    gang.env = {"PYTHONPATH": str(tmp_path)}
    states = gang.follow(gang.launch(STAYS))
    speaker = next(state for state in states if state["status"] == "failed_to_start")
    assert "ended with code 1 before any rank began" in speaker["reason"]
    other = states[1 - states.index(speaker)]
    assert other["status"] == "cancelled"
    assert other["reason"].startswith(f"stopped because {speaker['host']} did not start: ")
    assert other["first_failure"] == {"rank": None, "host": speaker["host"], "code": 1, "signal": None}


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-command", "command not found: no-such-command on PATH"),
        ('"nö"\n\\', 'command not found: "nö"\n\\ on PATH'),
        ("\x01" * 200, "command not found: " + "\x01" * 63),
        ("𝄞" * 200, "𝄞" * 99),
        ("", "'' cannot be executed: execv() arg 2 first element cannot be empty"),
    ],
    ids=["plain", "quoted", "escaped", "long", "empty"],
)
def test_a_command_that_cannot_be_started_is_named(gangs: Gangs, command: str, reason: str) -> None:
    gang = gangs(1)
    agent = gang.start(0)
    agent.launch(gang.spec(0, [command]), token=TOKEN)
    state = agent.follow(gang.run(0))[0]
    assert ends(state) == ("failed_to_start", None, None, reason)


def test_a_port_that_somebody_else_takes_meanwhile_is_named(gangs: Gangs, tmp_path: Path) -> None:
    """The port stays bound for us; only who asks for this very number, with SO_REUSEADDR, can still take it."""
    gang = gangs(2)
    gate = tmp_path / "gate"
    setup = f"until test -e {gate}; do sleep 0.02; done"
    agents = gang.launch(STAYS, setup=setup)
    assert gang.endpoint is not None
    port = gang.endpoint["store_port"]
    with socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", port))
        other.listen()
        gate.touch()
        states = gang.follow(agents)
    assert ends(states[0])[0] == "failed_to_start"
    assert states[0]["reason"] == f"port {port} of alpha was taken by another program meanwhile"
    assert ends(states[1])[0] == "cancelled"


def test_the_log_of_a_rank_is_capped_as_any(gangs: Gangs) -> None:
    gang = gangs(1)
    agent = gang.start(0)
    flood = ["sh", "-c", "head -c 4000000 /dev/zero; echo; echo end; exec sleep 1000"]
    agent.launch(gang.spec(0, flood, log_bytes=1 << 20), token=TOKEN)
    wait_until(lambda: (agent.status(gang.run(0)) or {})["ranks"][0]["log_hole"] is not None)
    agent.ask("cancel", run=gang.run(0), grace=0, by="me")
    log = b""
    for header, payload in agent.frames(agent.send("follow", run=gang.run(0), offset=0, tail=None, rank=0)):
        log += b"\1" * header.get("hole", 0) + payload
    assert len(log) == 4000005
    assert b"\1" in log
    assert log.endswith(b"\nend\n")


def test_a_rank_of_another_host_cannot_be_followed_here(gangs: Gangs) -> None:
    gang = gangs(1)
    agent = gang.start(0)
    agent.launch(gang.spec(0, ["true"]), token=TOKEN)
    agent.follow(gang.run(0))
    with pytest.raises(AgentError, match="rank 3 is none of"):
        agent.answer(agent.send("follow", run=gang.run(0), offset=0, tail=None, rank=3))


# What no controller could read again in a record: it would take the host for none that keeps to the protocol.
BEYOND: list[dict[str, Any]] = [
    *({"code": 2**80}, {"code": 256}, {"code": -1}, {"code": None, "signal": 128}, {"code": None, "signal": 0}),
    *({"reason": "x" * 512}, {"reason": "\ud800"}),
]


def test_what_the_job_writes_to_the_fifo_of_its_supervisor_changes_nothing(gangs: Gangs) -> None:
    lies = [
        *("x", "{}", "[]", '{"rank": 0}', '{"rank": 7, "code": 1, "signal": null, "reason": null}', "[" * 9000),
        *('{"rank": 0, "code": 1, "signal": 1, "reason": null}', '{"rank": [], "pid": 1}'),
        '{"rank": 0, "code": true, "signal": null, "reason": 1}',
        *(json.dumps({"rank": 0, "code": 1, "signal": None, "reason": None} | lie) for lie in BEYOND),
    ]
    gang = gangs(1)
    agent = gang.start(0)
    text = "\n".join(lies)
    tell = f"import os; os.write(os.open('../ranks', os.O_WRONLY), {text.encode()!r} + b'\\n' + b'x' * 60000)"
    agent.launch(gang.spec(0, ["python", "-c", tell]), token=TOKEN)
    assert ends(agent.follow(gang.run(0))[0]) == ("exited", 0, None, None)


def test_a_rank_that_claims_its_own_success_has_none(gangs: Gangs) -> None:
    gang = gangs(1)
    agent = gang.start(0)
    claim = 'printf \'{"rank":0,"code":0,"signal":null,"reason":null}\\n\' > ../ranks; exit 7'
    agent.launch(gang.spec(0, ["sh", "-c", claim]), token=TOKEN)
    assert ends(agent.follow(gang.run(0))[0])[:2] == ("exited", 1)  # torchrun's own word


def test_secrets_reach_the_ranks_and_token_and_secrets_are_nowhere_on_a_disk(gangs: Gangs, tmp_path: Path) -> None:
    gang = gangs(1)
    agent = gang.start(0)
    spec = gang.spec(0, "test ${#KEY} = 12", secrets=["KEY"])
    agent.answer(agent.begin(spec, {"KEY": "s3cr3t-value"}, TOKEN))
    assert agent.follow(gang.run(0))[0]["code"] == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 5
    assert [path for path in files if b"s3cr3t" in path.read_bytes() or TOKEN.encode() in path.read_bytes()] == []


def test_a_spec_that_does_not_hold_together_is_refused(gangs: Gangs) -> None:
    gang = gangs(2)
    agent = gang.start(0)
    wrong: list[dict[str, Any]] = [
        {"nodes": 0}, {"nodes": 101}, {"node": 2}, {"node": -1}, {"processes": 0}, {"peers": ["alpha"]},
        {"peers": [1, 2]}, {"silence": 0}, {"endpoint": {"addresses": [], "port": 1, "store_port": 2}},
        {"peers": ["beta", "alpha"]},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(AgentError) as caught:
            agent.answer(agent.begin(gang.spec(0, "true", gang=change), token=TOKEN))
        assert caught.value.code == "request"
    for token in (None, "5e", "5E" * 32):
        with pytest.raises(AgentError, match="64 hex digits"):
            agent.answer(agent.begin(gang.spec(0, "true"), token=token))
    with pytest.raises(AgentError, match="64 hex digits"):
        agent.answer(agent.begin({**gang.spec(0, "true"), "gang": None}, token=TOKEN))
