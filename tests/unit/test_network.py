"""What the nodes of a gang ask of the network: interfaces by address, ports that are kept, messages within bounds."""

from __future__ import annotations

import ctypes
import errno
import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gpulayer.remote import network
from gpulayer.remote.fate import Fate
from gpulayer.remote.network import Link, LinkLostError, Ports


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    pair = tuple(map(Link, connected()))
    yield pair[0], pair[1]
    for link in pair:
        link.close()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def test_each_address_has_its_interface_and_the_loopback_comes_last() -> None:
    found = network.interfaces()
    assert found["127.0.0.1"] in {"lo", "lo0"}
    assert {name for _, name in socket.if_nameindex()} >= set(found.values())
    assert list(found.values()) == sorted(found.values(), key=lambda name: name == found["127.0.0.1"])
    assert not [address for address in found if address.startswith("fe80:")]


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_socket_address_is_read_as_the_system_lays_it_out(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr(sys, "platform", system)

    def read(family: int, rest: bytes) -> str | None:
        head = bytes([16, family]) if system == "darwin" else family.to_bytes(2, sys.byteorder)
        raw = ctypes.create_string_buffer(head + rest)
        return network._address(ctypes.addressof(raw))

    assert read(socket.AF_INET, b"\0\0" + bytes([10, 0, 0, 5]) + bytes(8)) == "10.0.0.5"
    assert read(socket.AF_INET6, bytes(6) + socket.inet_pton(socket.AF_INET6, "fd00::2") + bytes(4)) == "fd00::2"
    assert read(250, bytes(30)) is None


def test_the_stores_port_is_kept_for_torch_alone() -> None:
    ports = Ports(2)
    try:
        for port in (ports.port, ports.store_port):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        ports.shut()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", ports.store_port), timeout=5)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", ports.store_port))
        store = (
            "import sys, torch.distributed as dist\n"
            "for libuv in (True, False):\n"
            "    dist.TCPStore('127.0.0.1', int(sys.argv[1]), 1, True, use_libuv=libuv).set('a', 'b')\n"
        )
        subprocess.run([sys.executable, "-c", store, str(ports.store_port)], check=True)
        assert ports.taken() is False
    finally:
        ports.close()


def test_a_port_that_somebody_took_is_told() -> None:
    ports = Ports(2)
    ports.shut()
    with socket.create_server(("", ports.store_port)):  # it sets SO_REUSEADDR, as servers do
        assert ports.taken() is True


def test_what_came_before_the_end_counts_and_the_end_is_told_after_it(links: tuple[Link, Link]) -> None:
    one, other = links
    one.send({"a": 1})
    one.send({"b": "ü"})
    one.close()
    select.select([other], [], [], 5)
    assert other.receive() == [{"a": 1}, {"b": "ü"}]
    select.select([other], [], [], 5)
    with pytest.raises(LinkLostError, match="ended"):
        other.receive()


@pytest.mark.parametrize("data", [b"{\n", b"[]\n", b"\xff\n", b"1\n", b"[" * 50_000 + b"\n", b"x" * 80_000])
def test_what_is_no_message_loses_the_link(data: bytes) -> None:
    one, other = connected()
    link = Link(other)
    one.sendall(data)
    one.close()
    with pytest.raises(LinkLostError):
        receive_all(link)
    link.close()


def test_who_takes_nothing_is_lost_before_the_memory_is_full(links: tuple[Link, Link]) -> None:
    with pytest.raises(LinkLostError, match="takes nothing"):
        send_all(links[0])


def receive_all(link: Link) -> None:
    for _ in range(100):
        select.select([link], [], [], 5)
        link.receive()


def send_all(link: Link) -> None:
    for _ in range(10_000):
        link.send({"text": "x" * 10_000})


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "refused"),
        (OSError(errno.EHOSTUNREACH, "x"), "no route"),
        (TimeoutError(), "timed out"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (LinkLostError("it ended the connection"), "it ended the connection"),
    ],
)
def test_a_failure_to_connect_is_told_in_a_word(error: Exception, told: str) -> None:
    assert network.words(error) == told


def test_a_fate_comes_through_and_what_is_none_loses_the_link() -> None:
    failure = {"rank": 3, "host": "beta", "code": 7, "signal": None}
    fate = Fate(1, "cancelled", "why", grace=2.5, first_failure=failure)
    message = json.loads(json.dumps(fate.message()))
    assert Fate.read(message, 2).message() == fate.message()
    long = Fate(1, "cancelled", "x" * 60_000)
    assert Fate.read(long.message(), 2).reason == "x" * 2000
    wrong: list[dict[str, Any]] = [
        {"node": 2}, {"node": -1}, {"node": True}, {"node": "1"}, {"status": "exited"}, {"status": None},
        {"status": []}, {"grace": -1}, {"grace": True}, {"grace": "1"}, {"grace": float("inf")},
        {"reason": 1}, {"more": 1}, {"first_failure": {}}, {"first_failure": {**failure, "rank": "3"}},
        {"first_failure": {**failure, "host": None}}, {"first_failure": {**failure, "host": "h" * 64}},
        {"first_failure": {**failure, "code": 2**80}}, {"first_failure": {**failure, "signal": 2**80}},
        {"first_failure": {**failure, "rank": 2**80}}, {"reason": "\ud800"},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(LinkLostError):
            Fate.read({**message, **change}, 2)
    with pytest.raises(LinkLostError):
        Fate.read("fate", 2)
