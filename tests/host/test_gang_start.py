"""How a gang comes together: all nodes or none, at most once, whatever dies; a wrong network is told soon."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote.network import Link, LinkLostError, Proof
from tests.host.agent_client import AgentError, new_spec
from tests.host.gangs import TOKEN, Gang, Gangs, ends, gangs
from tests.host.test_crashes import wait_until

__all__ = ["gangs"]

BEFORE_INTENT = ["gang-held", "gang-assembled", "spec-written"]
BETWEEN = [(0, "intent-written"), (1, "intent-written"), (0, "gang-commit-sent"), (1, "gang-committed")]
AFTER_GO = [(0, "gang-go-sent")] + [
    (node, point) for point in ("leader-forked", "running-written", "gate-opened") for node in (0, 1)
]


def journaled(tmp_path: Path) -> list[str]:
    """Ranks that write down each of their starts, and stay."""
    return ["sh", "-c", f"echo $RANK >> {tmp_path}/journal; exec sleep 1000"]


def journal(tmp_path: Path) -> list[str]:
    path = tmp_path / "journal"
    return sorted(path.read_text().split()) if path.exists() else []


def leaves_nothing(gang: Gang, node: int) -> None:
    """No run is known there and its one CPU slot is free: another job starts."""
    agent = gang.start(node)
    assert agent.status(gang.run(node)) is None
    assert agent.launch(new_spec("true", job="other", slots=1, host=gang.names[node]))["new"] is True
    assert agent.follow(new_spec("true", job="other")["run"])[0]["code"] == 0


@pytest.mark.parametrize("how", ["stop", "agent"])
def test_a_held_launch_that_nobody_waits_for_any_more_leaves_nothing(gangs: Gangs, how: str) -> None:
    """As where another node is busy, or the controller dies between two launches."""
    gang = gangs(3)
    for node in range(2):
        gang.hold(node, gang.start(node), ["true"], slots=1)
    if how == "stop":
        gang.agents[1].stop(gang.launches[1])
        assert gang.agents[1].answer(gang.launches[1])[0]["stopped"] is True
    else:
        gang.agents[1].process.kill()
    # The other one sees that it left, and need not be told.
    with pytest.raises(AgentError, match="beta left before the gang came together"):
        gang.agents[0].answer(gang.launches[0])
    for node in range(2):
        leaves_nothing(gang, node)
        assert not (gang.agents[-1].run_folder(gang.run(node)) / "spec.json").exists()


def test_a_gang_that_is_complete_goes_on_where_a_node_loses_its_controller_first(gangs: Gangs) -> None:
    gang = gangs(2)
    hub = gang.start(0, GL_FAIL="gang-assembled:delay:1")
    gang.hold(0, hub, ["true"])
    gang.hold(1, gang.start(1), ["true"])
    gang.agents[1].process.kill()
    assert gang.started(0)
    assert [state["code"] for state in gang.follow([hub, gang.start(1)])] == [0, 0]


def test_a_hub_that_is_released_releases_all(gangs: Gangs) -> None:
    gang = gangs(3)
    for node in range(2):
        gang.hold(node, gang.start(node), ["true"], slots=1)
    gang.agents[0].stop(gang.launches[0])
    with pytest.raises(AgentError, match="alpha left before the gang came together"):
        gang.agents[1].answer(gang.launches[1])
    leaves_nothing(gang, 0)


def test_a_node_that_is_busy_is_told_before_anything_is_held(gangs: Gangs) -> None:
    gang = gangs(2)
    agents = [gang.start(node) for node in range(2)]
    agents[1].launch(new_spec("sleep 1000", job="other", slots=1))
    gang.hold(0, agents[0], ["true"])
    with pytest.raises(AgentError) as caught:
        gang.hold(1, agents[1], ["true"], slots=1)
    assert caught.value.code == "busy"
    agents[1].ask("cancel", run=new_spec("", job="other")["run"], grace=0, by="me")


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes a connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_hub_that_cannot_be_reached_is_told_in_seconds_with_both_ends_and_why(gangs: Gangs, silent: int) -> None:
    gang = gangs(2)
    gang.hold(0, gang.start(0), ["true"], slots=1)
    assert gang.endpoint is not None
    agent = gang.start(1)
    begun = time.monotonic()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        gang.endpoint.update(port=port, addresses=["127.0.0.1", "::1"])
        with pytest.raises(AgentError) as caught:
            gang.hold(1, agent, ["true"], slots=1)
    assert caught.value.code == "peer"
    assert str(caught.value).startswith("beta cannot reach alpha at ")
    assert f"127.0.0.1:{port} (refused)" in str(caught.value)
    assert f"[::1]:{port} (refused)" in str(caught.value)
    assert (caught.value.error["host"], caught.value.error["peer"]) == ("beta", "alpha")
    assert "firewall" in caught.value.error["fix"]
    gang.endpoint.update(port=silent)
    with pytest.raises(AgentError, match=rf"127\.0\.0\.1:{silent} \(timed out\)"):
        gang.hold(1, agent, ["true"], slots=1)
    assert time.monotonic() - begun < 10
    leaves_nothing(gang, 1)


def test_the_port_of_torchs_store_is_tried_too(gangs: Gangs) -> None:
    gang = gangs(2)
    gang.hold(0, gang.start(0), ["true"])
    assert gang.endpoint is not None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gang.endpoint["store_port"] = closed.getsockname()[1]
        with pytest.raises(AgentError, match=rf"127\.0\.0\.1:{closed.getsockname()[1]} \(refused\)"):
            gang.hold(1, gang.start(1), ["true"])


def test_who_does_not_know_the_token_joins_nothing_and_learns_nothing(gangs: Gangs) -> None:
    gang = gangs(2)
    agents = [gang.start(node) for node in range(2)]
    gang.hold(0, agents[0], ["true"])
    assert gang.endpoint is not None
    for proof in (Proof("00" * 32, gang.spec(0, "")["gang"]["run"]), Proof(TOKEN, "another-gang")):
        link = Link(socket.create_connection(("127.0.0.1", gang.endpoint["port"])))
        select.select([link], [], [], 20)
        (challenge,) = link.receive()
        link.send({"node": 1, "nonce": "0", "mac": proof.mac("node", 1, challenge["nonce"], "0")})
        select.select([link], [], [], 20)
        with pytest.raises(LinkLostError):
            link.receive()
        link.close()
    for garbage in (b"x" * 100_000, b"\n\n", b"[]\n", b'{"node": true}\n', b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", gang.endpoint["port"])) as stranger:
            stranger.sendall(garbage)
    gang.hold(1, agents[1], ["true"])
    gang.await_start(agents)
    assert [ends(state)[:2] for state in gang.follow(agents)] == [("exited", 0)] * 2


def test_of_all_ways_that_a_node_tries_both_ends_keep_the_same(gangs: Gangs) -> None:
    gang = gangs(3)
    gang.hold(0, gang.start(0), ["true"])
    assert gang.endpoint is not None
    proof = Proof(TOKEN, gang.spec(0, "")["gang"]["run"])
    ways = [Link(socket.create_connection(("127.0.0.1", gang.endpoint["port"]))) for _ in range(2)]
    for link in ways:
        (challenge,) = await_messages(link)
        link.send({"node": 1, "nonce": "0", "mac": proof.mac("node", 1, challenge["nonce"], "0")})
    answers = [await_messages(link) for link in ways]
    assert sorted(map(len, answers)) == [0, 1]
    kept = ways[0 if answers[0] else 1]
    gang.hold(2, gang.start(2), ["true"])
    assert await_messages(kept) == [{"commit": True}]
    for link in ways:
        link.close()


def await_messages(link: Link) -> list[dict[str, Any]]:
    """Wait for what the other end says, nothing where it has hung up."""
    assert select.select([link], [], [], 20)[0]
    try:
        return link.receive()
    except LinkLostError:
        return []


def test_a_node_that_another_program_poses_as_does_not_fool_the_others(gangs: Gangs) -> None:
    """The proof is mutual: what listens at an address of the hub, as a bridge's that many machines have, is not it."""
    gang = gangs(2)
    gang.hold(0, gang.start(0), ["true"])
    assert gang.endpoint is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        gang.endpoint["port"] = server.getsockname()[1]
        gang.endpoint["addresses"] = ["127.0.0.1"]
        agent = gang.start(1)
        request = agent.begin(gang.spec(1, ["true"]), token=TOKEN)
        with server.accept()[0] as peer:
            peer.sendall(b'{"nonce": "00"}\n{"mac": "00"}\n')
            with pytest.raises(AgentError, match="somebody else answers there"):
                agent.answer(request)


def launch_with_failure(gang: Gang, tmp_path: Path, node: int, point: str) -> list[dict[str, Any] | str]:
    """Launch both nodes, of which one is killed at a point; return their answers: a state, or an error's code."""
    answers: list[dict[str, Any] | str] = []
    for one in range(2):
        agent = gang.start(one, **({"GL_FAIL": f"{point}:kill:1"} if one == node else {}))
        try:
            gang.hold(one, agent, journaled(tmp_path))
        except AgentError as error:
            answers.append(error.code)
    for one in range(2 - len(answers)):
        try:
            answers.insert(one, gang.agents[one].answer(gang.launches[one])[0]["state"])
        except AgentError as error:
            answers.insert(one, error.code)
    return answers


def never(gang: Gang, node: int) -> Any:
    why = f"the gang never came together: {gang.names[node]} did not answer"
    return "failed_to_start", None, None, why


def stopped(gang: Gang, node: int) -> Any:
    return "cancelled", None, None, f"stopped because {gang.names[node]} was lost"


@pytest.mark.parametrize("point", BEFORE_INTENT)
@pytest.mark.parametrize("node", [0, 1])
def test_a_crash_before_the_intent_leaves_nothing_there(gangs: Gangs, tmp_path: Path, node: int, point: str) -> None:
    gang = gangs(2)
    answers = launch_with_failure(gang, tmp_path, node, point)
    other = answers[1 - node]
    assert answers[node] == "died"
    # The hub has written its intent once all have joined; every other node once it was told to.
    if isinstance(other, dict):
        assert (node, ends(other)) == (1, never(gang, 1))
    else:
        assert other == "peer"
        assert gang.agents[1 - node].status(gang.run(1 - node)) is None
    assert gang.agents[node].status(gang.run(node)) is None
    assert journal(tmp_path) == []


@pytest.mark.parametrize(("node", "point"), BETWEEN)
def test_a_crash_between_the_intents_and_the_start_starts_nothing_ever(
    gangs: Gangs, tmp_path: Path, node: int, point: str
) -> None:
    gang = gangs(2)
    answers = launch_with_failure(gang, tmp_path, node, point)
    fallen = gang.agents[node].follow(gang.run(node))[0]
    assert (fallen["status"], fallen["reason"]) == ("lost", "never_started")
    if (node, point) == (0, "intent-written"):
        assert answers[1] == "peer"
    else:
        other = gang.agents[1 - node].follow(gang.run(1 - node))[0]
        # Whoever had told that its intent is written may have been counted on for a moment.
        expected = [never(gang, node)] + ([stopped(gang, node)] if point == "gang-committed" else [])
        assert ends(other) in expected
    again = gang.start(node).launch(gang.spec(node, journaled(tmp_path)), token=TOKEN)
    assert (again["new"], again["state"]["status"]) == (False, "lost")
    assert journal(tmp_path) == []


@pytest.mark.parametrize(("node", "point"), AFTER_GO)
def test_a_crash_after_the_start_ends_the_gang_and_starts_no_rank_twice(
    gangs: Gangs, tmp_path: Path, node: int, point: str
) -> None:
    gang = gangs(2)
    launch_with_failure(gang, tmp_path, node, point)
    states = [agent.follow(gang.run(one))[0] for one, agent in enumerate(gang.agents)]
    assert states[node]["status"] == "lost"
    assert ends(states[1 - node]) == stopped(gang, node)
    for one in range(2):
        assert gang.start(one).launch(gang.spec(one, journaled(tmp_path)), token=TOKEN)["new"] is False
    assert len(journal(tmp_path)) == len(set(journal(tmp_path)))


@pytest.mark.parametrize("node", [0, 1])
def test_who_dies_once_the_fate_is_told_takes_nothing_back(gangs: Gangs, node: int) -> None:
    """The first failure is on node 1: it tells the hub, and the hub tells all."""
    gang = gangs(2)
    command = ["sh", "-c", "test $RANK = 0 && exec sleep 1000; exit 7"]
    for one in range(2):
        agent = gang.start(one, **({"GL_FAIL": "gang-fate-told:kill:1"} if one == node else {}))
        gang.hold(one, agent, command)
    states = [agent.follow(gang.run(one))[0] for one, agent in enumerate(gang.agents) if gang.started(one)]
    assert ends(states[node]) == ("lost", None, None, "supervisor_died")
    other = states[1 - node]
    assert other["first_failure"] == {"rank": 1, "host": "beta", "code": 7, "signal": None}
    expected = [("cancelled", None, None, "stopped because rank 1 on beta failed"), ("exited", 7, None, None)]
    assert ends(other) == expected[1 - node]


def test_a_launch_that_is_sent_again_while_the_gang_runs_tells_its_state(gangs: Gangs, tmp_path: Path) -> None:
    gang = gangs(2)
    agents = gang.launch(journaled(tmp_path))
    gang.endpoint = None
    for node, agent in enumerate(agents):
        again = agent.launch(gang.spec(node, journaled(tmp_path)), token=TOKEN)
        assert (again["new"], again["state"]["status"]) == (False, "running")
    wait_until(lambda: journal(tmp_path) == ["0", "1"])


def test_a_node_that_is_launched_without_an_endpoint_joins_nothing(gangs: Gangs) -> None:
    gang = gangs(2)
    with pytest.raises(AgentError) as caught:
        gang.start(1).launch(gang.spec(1, ["true"]), token=TOKEN)
    assert caught.value.code == "gang"
