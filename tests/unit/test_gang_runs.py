"""The runs of a gang on the controller: launched on all hosts or on none, kept together, told as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest

from gpulayer.errors import HostError, Stage, UsageError
from gpulayer.fleet.connector import jittered
from gpulayer.fleet.session import AgentError, Reply, Session, Stream
from gpulayer.placement.gangs import known_now, together
from gpulayer.placement.plan import HostView, KnownRun, Placement
from gpulayer.placement.queue import Start
from gpulayer.run.afterwards import part_with, status_document
from gpulayer.run.events import status_event
from gpulayer.run.gang import New, Pending, addresses, launch_all
from gpulayer.run.launch import spec_of
from gpulayer.run.store import Intent, Store
from gpulayer.run.work import Step, Work, launching, may_change, queued
from gpulayer.spec.inventory import Host, TransportKind
from gpulayer.spec.jobs import Distributed, DistributedJob
from gpulayer.spec.support import Accelerator

KEY = "0123456789ab" + "0" * 52
HOSTS = ("alpha", "beta", "gamma")
JOB = DistributedJob(name="a", command="true", distributed=Distributed(nodes=3, processes_per_node=2))
START = Start(JOB, Accelerator.CPU, tuple(Placement(host=host, devices=()) for host in HOSTS))
WAITS = queued("a", KEY, 1, 3)
GANG = launching(WAITS, START)


def spec(run: KnownRun) -> dict[str, Any]:
    view = HostView(host=Host(name=run.host), reached=True)
    return spec_of(
        JOB, run, project="p", view=view, accelerator=Accelerator.CPU, peers=HOSTS, tree=None, python=None
    )  # fmt: skip


SPECS = tuple(spec(part) for part in GANG.parts)


def stood(status: str, **fields: Any) -> KnownRun:
    (gang,) = together(replace(part, status=status, **fields) for part in GANG.members)
    return gang


def test_a_gang_has_a_run_on_each_host_and_its_ranks_are_numbered_through() -> None:
    assert [(part.run, part.host, [end.rank for end in part.ranks]) for part in GANG.parts] == [
        (f"a-0123456789ab-a1-n{node}", host, [2 * node, 2 * node + 1]) for node, host in enumerate(HOSTS)
    ]
    assert [entry["gang"]["node"] for entry in SPECS] == [0, 1, 2]
    assert SPECS[0]["gang"] | {"run": WAITS.run, "nodes": 3, "processes": 2, "backend": "gloo"} == SPECS[0]["gang"]
    assert (part_with(GANG, 3).host, GANG.status, GANG.run) == ("beta", "launching", WAITS.run)
    with pytest.raises(UsageError, match="its ranks are 0 to 5"):
        part_with(GANG, 6)


def test_the_documents_of_a_gang_hold() -> None:
    for name, document in (
        *(("event", status_event(run).to_json()) for run in (GANG, *GANG.members, WAITS)),
        ("status", status_document([GANG, WAITS])),
    ):
        text = (Path(__file__).parents[2] / "schemas" / f"{name}.schema.json").read_text()
        jsonschema.Draft202012Validator(json.loads(text)).validate(document)
    (told, _) = status_document([GANG, WAITS])["runs"]
    assert [(node["host"], len(node["ranks"])) for node in told["nodes"]] == [(host, 2) for host in HOSTS]


def test_the_store_has_a_gang_with_its_nodes_from_the_intent_on(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.take("p", [WAITS])
        assert store.intend([Intent(run=GANG, specs=SPECS)]) == {GANG.run}
        assert store.intend([Intent(run=GANG, specs=SPECS)]) == set()
    with Store.open(tmp_path) as store:
        assert store.runs("p") == [GANG] == [store.run(GANG.run)]
        assert store.run(GANG.members[1].run) == GANG.members[1]
        assert store.spec(GANG.members[2].run) == SPECS[2]
        ended = stood("cancelled", reason="asked to")
        store.record([(status_event(one), one) for one in (*ended.members, ended)])
        assert store.runs("p") == [ended]


def test_a_gang_that_is_put_back_has_nodes_no_more(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.take("p", [WAITS])
        store.intend([Intent(run=GANG, specs=SPECS)])
        store.record([(status_event(WAITS), WAITS)])
        assert store.runs("p") == [WAITS]
        store.intend([Intent(run=GANG, specs=SPECS)])
        partly = together(GANG.members[:2])[0]
        store.record([(status_event(partly), partly)])
        (found,) = store.runs("p")
        assert found.members == GANG.members[:2]
        store.take("p", [WAITS])  # as one does who finds that its launch never arrived
        assert store.runs("p") == [WAITS]


def test_a_gangs_cancel_is_kept_for_each_host_and_forgotten_as_one(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.take("p", [WAITS])
        store.intend([Intent(run=GANG, specs=SPECS)])
        for run in (GANG, *GANG.members):
            store.keep_cancel(run.run, grace=None, by="me")
        assert [kept.run.host for kept in store.kept_cancels()] == list(HOSTS)
        assert [kept.run.run for kept in store.kept_cancels("beta")] == [GANG.members[1].run]
        store.forget_cancels([GANG.run])
        assert store.kept_cancels() == []
        assert not store.is_unwanted(GANG.run)


class Line:
    """A host that answers a launch with these frames; a stop is answered where it is held."""

    def __init__(self, name: str, *frames: Mapping[str, Any] | Exception, peer: str | None = None) -> None:
        self.host = Host(name=name, address=name if peer is None else peer)
        self.name, self.peer, self.frames = name, peer, frames
        self.specs: list[Mapping[str, Any]] = []
        self.stopped = False
        self.stream: Stream | None = None

    def send(self, header: Mapping[str, Any]) -> None:
        assert header["op"] == "stop"
        self.stopped = True
        assert self.stream is not None
        self.stream.take(Reply({"ok": True, "stopped": True}, b""))


HELD = {"held": {"port": 41000, "store_port": 41001, "addresses": ["10.9.8.7", "127.0.0.1"]}}


def begun(number: int, *, new: bool = True) -> dict[str, Any]:
    part = GANG.members[number]
    state = {
        "run": part.run, "job": "a", "key": KEY, "attempt": 1, "status": "running",
        "gang": {"node": number, "nodes": 3, "processes": 2},
        "ranks": [{"rank": end.rank, "status": "running"} for end in part.ranks],
    }  # fmt: skip
    return {"ok": True, "new": new, "state": state}


def refusal(host: str, code: str) -> AgentError:
    return AgentError(host, {"error": {"code": code, "message": "m"}})


async def launch(lines: Sequence[Line]) -> list[New]:
    async def begin(session: Session, entry: Mapping[str, Any]) -> Pending:
        line = cast("Line", session)
        line.specs.append(entry)
        line.stream = Stream(session, 1)
        for frame in line.frames:
            if isinstance(frame, AgentError | HostError):
                line.stream.fail(frame)
            else:
                line.stream.take(Reply(cast("Mapping[str, Any]", frame), b""))
        pending = Pending(session, entry["run"], line.stream)
        await pending.answer()
        return pending

    return await launch_all(cast("Sequence[Session]", lines), SPECS, begin)


async def test_nodes_are_held_in_order_and_told_the_way_to_the_first() -> None:
    lines = [Line(host, HELD, begun(number)) for number, host in enumerate(HOSTS)]
    told = await launch(lines)
    assert [state.run.run for _, state in told] == [part.run for part in GANG.members]
    assert not any(line.stopped for line in lines)
    way = {"addresses": ["10.9.8.7"], "port": 41000, "store_port": 41001}
    assert [line.specs[0]["gang"]["endpoint"] for line in lines] == [None, way, way]


@pytest.mark.parametrize("code", ["busy", "peer", "lock"])
async def test_where_one_refuses_what_is_held_is_let_go_and_nobody_else_is_asked(code: str) -> None:
    lines = [Line("alpha", HELD), Line("beta", refusal("beta", code)), Line("gamma", HELD)]
    with pytest.raises(AgentError) as caught:
        await launch(lines)
    assert (caught.value.code, caught.value.host) == (code, "beta")
    assert [line.stopped for line in lines] == [True, False, False]
    assert lines[2].specs == []


async def test_a_link_that_is_lost_lets_the_whole_be_done_again() -> None:
    lost = HostError("beta", Stage.CONNECT, "lost")
    for lines in (
        [Line("alpha", HELD), Line("beta", lost), Line("gamma")],
        [Line("alpha", HELD, begun(0)), Line("beta", HELD, lost), Line("gamma", HELD, begun(2))],
    ):
        with pytest.raises(HostError) as caught:
            await launch(lines)
        assert caught.value is lost


async def test_what_began_before_is_found_again_without_who_never_did() -> None:
    lines = [Line("alpha", begun(0, new=False)), Line("beta", refusal("beta", "gang")), Line("gamma", begun(2))]
    told = await launch(lines)
    assert [state.run.node for _, state in told] == [0, 2]
    assert lines[1].specs[0]["gang"]["endpoint"] is None


async def test_a_host_may_be_private_near_or_named_by_itself() -> None:
    def to(*lines: Line) -> Callable[[Sequence[str]], Any]:
        return lambda named: addresses(cast("Sequence[Session]", lines), named)

    far, other = Line("alpha", peer="192.0.2.7"), Line("beta", peer="192.0.2.8")
    named = ["192.0.2.9", "192.0.2.7", "fe80::1", "127.0.0.1", "no address"]
    assert await to(far, other)(named) == ["192.0.2.7", "192.0.2.9"]
    near, same = Line("alpha", peer="127.0.0.1"), Line("beta", peer="127.0.0.1")
    assert await to(near, same)(named) == ["127.0.0.1", "192.0.2.9", "192.0.2.7"]
    assert await to(near, other)(named) == ["192.0.2.9", "192.0.2.7"]
    assert await to(near, other)([]) == ["127.0.0.1"]
    near.host = replace(near.host, transport=TransportKind.LOCAL)
    assert await to(near, same)(["127.0.0.1"]) == ["127.0.0.1"]
    far.host = replace(far.host, private_address="198.51.100.4")
    assert await to(far, other)(named) == ["198.51.100.4"]
    far.host = replace(far.host, private_address="localhost")
    for named_so in (far, Line("localhost")):  # a name means here what it may not mean there, as one in .local
        found = await to(named_so, other)([])
        assert found
        assert set(found) <= {"127.0.0.1", "::1"}
    far.host = replace(far.host, private_address="no-such-name.invalid")
    with pytest.raises(AgentError, match=r"private_address of alpha, no-such-name\.invalid, is not known here"):
        await to(far, other)(named)


def test_a_node_on_a_silent_host_is_unknown_and_keeps_its_end() -> None:
    there = [replace(part, status="exited", code=0) for part in GANG.members[:2]]
    views = [HostView(host=Host(name=run.host), reached=True, runs=(run,)) for run in there]
    (gang,) = known_now(views, [GANG])
    assert (gang.status, gang.reason) == ("unknown", "gamma does not answer")
    assert not may_change(gang)
    lives = HostView(host=Host(name="alpha"), reached=True, runs=(replace(GANG.members[0], status="running"),))
    (part,) = known_now([lives, *views[1:]], [GANG])
    assert part.status == "unknown"
    assert may_change(part)
    (gang,) = known_now(views, [stood("exited", code=0)])
    assert (gang.status, gang.code) == ("exited", 0)
    answers = HostView(host=Host(name="gamma"), reached=True)
    (gang,) = known_now([*views, answers], [GANG])
    assert (gang.status, gang.reason) == ("lost", "no host knows how node 2 ended")


def test_who_failed_together_does_not_come_back_together() -> None:
    pauses = {jittered(8.0) for _ in range(20)}
    assert len(pauses) > 1
    assert all(4.0 <= pause <= 8.0 for pause in pauses)


def test_a_taken_port_is_tried_again_twice_whatever_retries_say() -> None:
    work = Work(run=WAITS, step=Step.START, job=JOB)
    taken: dict[str, Any] = {"status": "failed_to_start", "reason": "port 41001 of alpha was taken"}
    for attempt in (2, 3):
        work.run = replace(work.run, **taken)
        assert work.may_retry
        work.next_attempt()
        assert (work.run.attempt, work.run.nodes, work.last_attempt) == (attempt, 3, attempt)
    work.run = replace(work.run, **taken)
    assert not work.may_retry
    other = Work(run=replace(WAITS, status="failed_to_start", reason="no torch"), step=Step.START, job=JOB)
    assert not other.may_retry
