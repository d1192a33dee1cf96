"""Hosts with addresses of their own: each in a network namespace, all on one switch that the tests reach too.

All of it hangs on processes that end with the tests, and vanishes with them. Nothing is routed anywhere.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Self

from tests.sshd import SshdHost, with_us

NAMESPACES = sys.platform == "linux" and os.geteuid() == 0
_NOWHERE = "02:00:00:00:00:fe"  # a locally administered address that nobody has


def _namespace() -> subprocess.Popen[bytes]:
    """Start what holds a new network namespace open, and return it once that is there."""
    holder = subprocess.Popen(
        [*with_us(), "unshare", "--net", "sh", "-c", "echo up; exec sleep infinity"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert holder.stdout is not None
    with holder.stdout as said:
        assert said.readline() == b"up\n"
    return holder


def inside(pid: int) -> list[str]:
    """Return the words before a command that is to run in a process's network namespace."""
    return ["nsenter", "--target", str(pid), "--net", "--"]


def _run(pid: int | None, *commands: str) -> None:
    for command in commands:
        subprocess.run([*(inside(pid) if pid else []), *command.split()], check=True, capture_output=True)


@dataclass(kw_only=True)
class Switch:
    """A network of the benchmark range (RFC 2544), whose address `.254` the tests have."""

    mark: str = field(default_factory=lambda: secrets.token_hex(3))
    number: int = field(default_factory=lambda: secrets.randbelow(256))
    holder: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.holder is not None
        return self.holder.pid

    def address(self, host: int) -> str:
        """Return the address of a host by its number."""
        return f"198.18.{self.number}.{host}"

    def __enter__(self) -> Self:
        self.holder = _namespace()
        ours = f"gl{self.mark}"
        _run(self.pid, "ip link add br0 type bridge", "ip link set br0 up")
        _run(None, f"ip link add {ours} type veth peer name tests netns {self.pid}")
        _run(self.pid, "ip link set tests master br0 up")
        _run(None, f"ip addr add {self.address(254)}/24 dev {ours}", f"ip link set {ours} up")
        return self

    def __exit__(self, *_: object) -> None:
        assert self.holder is not None
        self.holder.kill()
        self.holder.wait()


SWITCHES: list[Switch] = []  # the one in use: a farm makes hosts of a class, without saying more


@dataclass(kw_only=True)
class NetworkHost(SshdHost):
    """A host on the switch. What it does not reach any more neither answers it nor says so, as behind a firewall."""

    holder: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        assert self.host.address is not None
        return self.host.address

    def start(self) -> None:
        """Start sshd; at first the host is connected to the switch."""
        if self.holder is None:
            switch, name = SWITCHES[-1], f"h{self.address.rpartition('.')[2]}"
            self.holder = _namespace()
            _run(switch.pid, f"ip link add {name} type veth peer name eth0 netns {self.holder.pid}")
            _run(switch.pid, f"ip link set {name} master br0 up")
            _run(self.holder.pid, "ip link set lo up", f"ip addr add {self.address}/24 dev eth0", "ip link set eth0 up")
        super().start()

    def leave(self) -> None:
        """Take the host off the switch for good."""
        self.stop()
        if self.holder is not None:
            self.holder.kill()
            self.holder.wait()

    def command(self, sshd: list[str]) -> list[str]:
        """Return the words that start sshd inside the host."""
        assert self.holder is not None
        return [*inside(self.holder.pid), *sshd]

    def lose(self, other: NetworkHost) -> None:
        """Let nothing arrive at another host from now on."""
        assert self.holder is not None
        _run(self.holder.pid, f"ip neigh replace {other.address} lladdr {_NOWHERE} dev eth0 nud permanent")

    def find(self, other: NetworkHost) -> None:
        """Reach another host again."""
        assert self.holder is not None
        _run(self.holder.pid, f"ip neigh del {other.address} dev eth0")
