"""What the nodes of a gang wait for, and for how long: for who does not join, and who joins and says nothing more."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpulayer.remote import gang
from gpulayer.remote.answers import Answer
from gpulayer.remote.gang import Hub, Spoke, gang_of
from gpulayer.remote.network import Claim, Link, LinkLostError, Proof, UnreachableError, reach
from gpulayer.remote.wire import RequestError

TOKEN = "ab" * 32
NAMES = ["alpha", "beta", "gamma"]


def spec(nodes: int) -> dict[str, Any]:
    own = {"run": "gang-0-a1", "node": 0, "nodes": nodes, "processes": 1, "backend": "gloo"}
    return {"grace": 5, "gang": {**own, "peers": NAMES[:nodes], "address": None, "endpoint": None, "silence": 60}}


class Host:
    """A hub, the pipe on which its launch answers, and a node's link to it."""

    def __init__(self, nodes: int) -> None:
        made = gang_of(spec(nodes), TOKEN)
        assert isinstance(made, Hub)
        self.hub = made
        self.heard, pipe = os.pipe()
        self.answer = Answer(pipe, lambda header: repr(header).encode() + b"\n")
        self.links: list[Link] = []

    def join(self, node: int) -> threading.Thread:
        """Join as that node, while the hub waits for it."""

        def connect() -> None:
            proof = Proof(TOKEN, self.hub.id)
            with contextlib.suppress(UnreachableError):  # who joins for another is turned away, sooner or later
                self.links.append(reach(["127.0.0.1"], self.hub._ports.port, proof, node, 10)[0])

        thread = threading.Thread(target=connect)
        thread.start()
        return thread

    def told(self) -> list[dict[str, Any]]:
        """What the hub has sent on the first link, to its end."""
        messages: list[dict[str, Any]] = []
        while True:
            select.select([self.links[0]], [], [], 10)
            try:
                messages += self.links[0].receive()
            except LinkLostError:
                return messages


@pytest.fixture
def hosts() -> Iterator[Any]:
    made: list[Host] = []

    def make(nodes: int) -> Host:
        made.append(Host(nodes))
        return made[-1]

    yield make
    for host in made:
        host.hub.close()
        for link in host.links:
            link.close()
        os.close(host.heard)
        os.close(host.answer.fileno())


def test_a_hub_waits_for_those_that_do_not_join_and_names_them(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "_HOLD", 0.5)
    host = hosts(3)
    joining = host.join(1)
    with pytest.raises(RequestError, match=r"within 0\.5 s: gamma did not join") as caught:
        host.hub.assemble(host.answer)
    joining.join()
    assert caught.value.code == "gang"
    host.hub.close()
    assert host.told() == []


def test_who_joins_and_never_writes_its_intent_is_named_to_all(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang, "_COMMIT", 0.2)
    host = hosts(2)
    joining = host.join(1)
    host.hub.assemble(host.answer)
    joining.join()
    with pytest.raises(RequestError, match="the gang never came together: beta did not answer"):
        host.hub.commit()
    assert host.told() == [{"commit": True}, {"never": "the gang never came together: beta did not answer"}]


@pytest.fixture
def hub() -> Iterator[tuple[Spoke, Answer, queue.SimpleQueue[Link]]]:
    """Node 1 of 3, where its launch answers, and the link of a hub that welcomes it and says no more by itself."""
    welcomed: queue.SimpleQueue[Link] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        document = spec(3)
        way = {"addresses": ["127.0.0.1"], "port": port, "store_port": port}
        document["gang"].update(node=1, endpoint=way)

        def welcome() -> None:
            claim = Claim(Link(server.accept()[0]), Proof(TOKEN, document["gang"]["run"]), 3)
            select.select([claim.link], [], [], 10)
            assert claim.step() == 1
            welcomed.put(claim.take())

        thread = threading.Thread(target=welcome)
        thread.start()
        spoke = gang_of(document, TOKEN)
        assert isinstance(spoke, Spoke)
        heard, pipe = os.pipe()
        answer = Answer(pipe, lambda header: repr(header).encode() + b"\n")
        yield spoke, answer, welcomed
        thread.join()
    spoke.close()
    welcomed.get().close()
    os.close(heard)
    os.close(pipe)


def test_a_node_whose_gang_never_comes_together_gives_up_and_says_so(
    hub: tuple[Spoke, Answer, queue.SimpleQueue[Link]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "_HOLD", 0.5)
    spoke, answer, _ = hub
    began = time.monotonic()
    with pytest.raises(
        RequestError, match=r"did not come together within 0\.5 s: not all of the others joined"
    ) as caught:
        spoke.assemble(answer)
    assert time.monotonic() - began < 5
    assert (caught.value.code, caught.value.fix) == ("gang", "try again")


def test_a_node_whose_intent_the_hub_does_not_answer_gives_up_and_names_it(
    hub: tuple[Spoke, Answer, queue.SimpleQueue[Link]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoke, answer, welcomed = hub

    def told_to_commit(_: object) -> None:
        link = welcomed.get(timeout=10)
        link.send({"commit": True})
        welcomed.put(link)

    monkeypatch.setattr(answer, "send", told_to_commit)
    spoke.assemble(answer)
    monkeypatch.setattr(gang, "_COMMIT", -gang._REACH + 0.2)
    with pytest.raises(RequestError, match="the gang never came together: alpha did not answer") as caught:
        spoke.commit()
    assert caught.value.code == "gang"
    assert spoke.sources == []


def test_a_node_that_joins_twice_joins_once(hosts: Any) -> None:
    host = hosts(3)
    joining = [host.join(node) for node in (1, 1, 2)]
    host.hub.assemble(host.answer)
    for thread in joining:
        thread.join()
    assert len(host.hub.sources) == 2


def test_a_node_that_says_what_none_would_is_lost_and_that_is_the_fate(hosts: Any) -> None:
    host = hosts(2)
    joining = host.join(1)
    host.hub.assemble(host.answer)
    joining.join()
    host.links[0].send({"committed": True})
    host.hub.commit()
    host.links[0].send({"ping": True})
    host.links[0].send({"hello": "there"})
    while host.hub.fate is None:
        select.select(host.hub.sources, [], [], 10)
        host.hub.step()
    assert (host.hub.fate.status, host.hub.fate.reason) == ("cancelled", "stopped because beta was lost")


def test_no_node_speaks_for_another(hosts: Any) -> None:
    host = hosts(3)
    joining = [host.join(node) for node in (1, 2)]
    host.hub.assemble(host.answer)
    for thread in joining:
        thread.join()
    for link in host.links:
        link.send({"committed": True})
    host.hub.commit()
    lie = {"node": 0, "status": "cancelled", "reason": "alpha wants it", "grace": 0, "first_failure": None}
    host.links[0].send({"fate": lie})
    while host.hub.fate is None:
        select.select(host.hub.sources, [], [], 10)
        host.hub.step()
    assert str(host.hub.fate.reason).endswith(" was lost")


def test_a_gang_of_one_waits_for_nobody_and_torchrun_is_told_so(hosts: Any) -> None:
    host = hosts(1)
    host.hub.assemble(host.answer)
    host.hub.commit()
    words = host.hub.words("/python", "/rank.py", ["a", "-b"])
    assert words[:3] == ["/python", "-m", "torch.distributed.run"]
    options = dict(zip(words[3:-6:2], words[4:-6:2], strict=False))
    assert options["--master-addr"] == "127.0.0.1"
    assert options["--nnodes"] == options["--nproc-per-node"] == "1"
    assert options["--rdzv-backend"] == "static"
    assert options["--max-restarts"] == options["--node-rank"] == "0"
    assert words[-3:] == ["/rank.py", "a", "-b"]
    assert host.hub.environment()["NCCL_SOCKET_IFNAME"] == "=" + host.hub.environment()["GLOO_SOCKET_IFNAME"]
