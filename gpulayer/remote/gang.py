"""A gang as one of its nodes sees it: how the nodes come together, and the one fate that they share.

Node 0 is the hub: every other node keeps one link to it for the gang's life. No controller is needed for any of this.
What ends the gang (a rank that fails, a cancel, a deadline, a node that is lost) is told to the hub, which takes the
first of these as the gang's fate and tells it to all.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import time

from gpulayer.remote import rank, states
from gpulayer.remote.failpoints import failpoint
from gpulayer.remote.fate import Fate
from gpulayer.remote.network import (
    Claim,
    Link,
    LinkLostError,
    Ports,
    Proof,
    UnreachableError,
    check_port,
    interfaces,
    reach,
)
from gpulayer.remote.wire import RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Iterator
    from typing import Any, Union

    from gpulayer.remote.answers import Answer

    Source = Union[Link, socket.socket, Answer]

_HOLD = 60.0  # seconds that a launch is held for the others
_UNWATCHED = 3.0  # seconds that a node which nobody waits for any more waits for the hub's word
_REACH, _REACH_STORE = 5.0, 1.0  # seconds until the hub's two ports must have answered
_PROVE = 5.0  # seconds in which who has connected must prove to be a node
_STRANGERS = 64  # connections that have proven nothing yet
_COMMIT = 30.0  # seconds in which all must have written their intents
_DECIDE = 2.0  # seconds in which the hub answers what a node proposes as the fate
_PINGS = 12  # in the time of a silence that counts as a loss
_PATIENCE = 24 * 3600  # seconds that torchrun waits for the other nodes, whose setup may take long; ours ends it before
_LEAST_SHUTDOWN = 30  # seconds, torch's own default


class Gang:
    """What hub and other nodes have in common. `spec` is a checked spec of a gang's node."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """Do nothing yet that others could see."""
        gang = spec["gang"]
        self.id: str = gang["run"]
        self.node: int = gang["node"]
        self.nodes: int = gang["nodes"]
        self.processes: int = gang["processes"]
        self.peers: list[str] = gang["peers"]
        self.fate: Fate | None = None
        self._grace: float = spec["grace"]
        self._silence: float = gang["silence"]
        self._pinged = time.monotonic()
        self._links: dict[int, Link] = {}
        self._here = self._master = "127.0.0.1"
        self.store_port = 0

    @property
    def host(self) -> str:
        """This node's name."""
        return self.peers[self.node]

    @property
    def sources(self) -> list[Source]:
        """What is worth waking up for."""
        return list(self._links.values())

    def assemble(self, answer: Answer) -> None:
        """Hold this launch until all nodes have joined. Raises RequestError: then nothing has been begun."""
        raise NotImplementedError

    def commit(self) -> None:
        """Return once every node has written its intent, as we have. Raises RequestError: one has not."""
        try:
            self._commit()
        except RequestError:
            self.close()
            raise

    def _commit(self) -> None:
        raise NotImplementedError

    def propose(self, fate: Fate) -> None:
        """Tell what is to end the gang. `fate` is known at once or within seconds, and may be another one."""
        raise NotImplementedError

    def may_end(self) -> bool:
        """Tell that all that ran on this node has succeeded; say whether the others need this node no more."""
        raise NotImplementedError

    def step(self) -> None:
        """Take in what the others say, and keep the links alive."""
        now = time.monotonic()
        ping = now - self._pinged > self._silence / _PINGS
        if ping:
            self._pinged = now
        for node, link in list(self._links.items()):
            try:
                link.flush()
                for message in link.receive():
                    self._take(node, message)
                if ping:
                    link.send({"ping": True})
                if time.monotonic() - link.heard > self._silence:
                    raise LinkLostError("nothing was heard of it")  # noqa: TRY301  # as whatever else ends a link
            except LinkLostError:
                self._lose(node)

    def close(self) -> None:
        """Leave the gang, once its end is written here."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def environment(self) -> dict[str, str]:
        """Return what torch must know of this host; the user's own values go before."""
        made = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(_LEAST_SHUTDOWN, math.ceil(self._grace) + 5))}
        interface = interfaces().get(self._here)
        if interface is not None:
            made["GLOO_SOCKET_IFNAME"] = interface
            made["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without the sign it is the beginning of a name
        return made

    def words(self, interpreter: str, wrapper: str, command: Iterable[str]) -> list[str]:
        """Return torchrun's command line. The rendezvous is static: membership and ranks are the plan's."""
        master = f"[{self._master}]" if ":" in self._master else self._master
        options = {
            "nnodes": self.nodes,
            "node-rank": self.node,
            "nproc-per-node": self.processes,
            "master-addr": master,
            "master-port": self.store_port,
            "rdzv-backend": "static",
            "rdzv-id": self.id,
            "rdzv-conf": f"timeout={_PATIENCE}",
            "max-restarts": 0,
        }
        torchrun = [interpreter, "-m", "torch.distributed.run"]
        torchrun += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [*torchrun, "--no-python", sys.executable, "-I", "-S", wrapper, *command]

    def write_wrapper(self, folder: str) -> str:
        """Write the program that is each rank's parent into a run's folder; return its path."""
        path = os.path.join(folder, "rank.py")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(rank.__spec__.loader.get_source(rank.__name__))  # type: ignore[union-attr]  # in memory on a host
        return path

    @property
    def port_taken(self) -> bool:
        """Whether somebody else listens where torch's store would; known where the store is."""
        return False

    def lost(self, node: int) -> Fate:
        """Return the fate of a gang that has lost a node."""
        host = self.peers[node]
        failure = {"rank": None, "host": host, "code": None, "signal": None}
        return Fate(node, states.CANCELLED, f"stopped because {host} was lost", first_failure=failure)

    def _take(self, node: int, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _lose(self, node: int) -> None:
        self._links.pop(node).close()

    def _await(self, sources: Iterable[Source], until: float) -> list[Source]:
        """Return those of `sources` on which something has come, or which have ended; none after `until`."""
        by_descriptor = {source.fileno(): source for source in sources}
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        patience = max(0.0, until - time.monotonic())
        return [by_descriptor[descriptor] for descriptor, _ in poll.poll(patience * 1000)]

    def _names(self, nodes: Iterable[int]) -> str:
        return ", ".join(self.peers[node] for node in sorted(nodes))


class Hub(Gang):
    """Node 0."""

    def __init__(self, spec: dict[str, Any], token: str) -> None:
        """Take the ports. Raises OSError."""
        super().__init__(spec)
        self._proof = Proof(token, self.id)
        self._ports = Ports(self.nodes)
        self.store_port = self._ports.store_port
        self._claims: list[Claim] = []
        self._ended: set[int] = set()
        address = spec["gang"]["address"]
        self._addresses = list(dict.fromkeys([*([address] if address else []), *interfaces()]))

    def assemble(self, answer: Answer) -> None:
        """Tell where we are, and wait for all others."""
        if self.nodes == 1:
            return
        held = {"port": self._ports.port, "store_port": self.store_port, "addresses": self._addresses}
        answer.send({"held": held})
        failpoint("gang-held")
        give_up = time.monotonic() + _HOLD
        while len(self._links) < self.nodes - 1:
            if time.monotonic() >= give_up:
                missing = self._names(set(range(1, self.nodes)) - set(self._links))
                raise _late(f"{missing} did not join")
            links = (*(claim.link for claim in self._claims), *self._links.values())
            sources: list[Source] = [answer, self._ports.control, *links]
            self._welcome(self._await(sources, min(give_up, time.monotonic() + 1)), answer)
        self._drop(self._claims)
        first = self._links[min(self._links)]
        self._here = self._master = first.here

    def _welcome(self, ready: list[Source], answer: Answer) -> None:
        if answer in ready:
            raise _released()
        for joined, link in self._links.items():
            if link in ready:
                _refuse_talk(link, self.peers[joined])
        for claim in list(self._claims):
            try:
                node = claim.step() if claim.link in ready else None
                if node is not None and node not in self._links:
                    self._links[node] = claim.take()
                    self._claims.remove(claim)
                elif node is not None or time.monotonic() - claim.since > _PROVE:
                    self._drop([claim])
            except LinkLostError:
                self._drop([claim])
        if self._ports.control in ready:
            with contextlib.suppress(OSError, LinkLostError):
                connection, _ = self._ports.control.accept()
                if len(self._claims) < _STRANGERS:
                    self._claims.append(Claim(Link(connection), self._proof, self.nodes))
                else:
                    connection.close()

    def _drop(self, claims: list[Claim]) -> None:
        for claim in list(claims):
            claim.link.close()
            self._claims.remove(claim)

    def _commit(self) -> None:
        """Have all others write their intents; then let all go."""
        waiting = set(self._links)
        try:
            self._tell({"commit": True}, waiting)
            failpoint("gang-commit-sent")
            give_up = time.monotonic() + _COMMIT
            while waiting and time.monotonic() < give_up:
                ready = self._await([self._links[node] for node in waiting], give_up)
                for node in [node for node in waiting if self._links[node] in ready]:
                    with _names_the_lost(self.peers[node]):
                        if any("committed" in message for message in self._links[node].receive()):
                            waiting.discard(node)
            if waiting:
                raise _never(f"{self._names(waiting)} did not answer")  # as a link that is lost
        except RequestError as error:
            for link in self._links.values():
                with contextlib.suppress(LinkLostError):
                    link.send({"never": error.message})
            raise
        self._ports.shut()
        for node in list(self._links):
            try:
                self._links[node].send({"go": True})
            except LinkLostError:
                self._lose(node)
        failpoint("gang-go-sent")

    def _tell(self, message: dict[str, Any], nodes: Iterable[int]) -> None:
        for node in nodes:
            with _names_the_lost(self.peers[node]):
                self._links[node].send(message)

    def propose(self, fate: Fate) -> None:
        """Take it as the gang's fate, if it is the first, and tell all."""
        if self.fate is not None:
            return
        self.fate = fate
        for node in list(self._links):
            try:
                self._links[node].send({"fate": fate.message()})
            except LinkLostError:
                self._lose(node)
        failpoint("gang-fate-told")

    def may_end(self) -> bool:
        """Say whether all others have ended, or the gang has: until then they need the hub."""
        return self.fate is not None or len(self._ended) == self.nodes - 1

    def close(self) -> None:
        """Besides: give the ports back."""
        super().close()
        self._ports.close()

    @property
    def port_taken(self) -> bool:
        """Whether somebody else listens where torch's store would."""
        return self._ports.taken()

    def _take(self, node: int, message: dict[str, Any]) -> None:
        if "ended" in message:
            self._ended.add(node)
        elif "fate" in message:
            fate = Fate.read(message["fate"], self.nodes)
            if fate.node != node:
                raise LinkLostError("it speaks for another node")
            self.propose(fate)
        elif "ping" not in message:
            raise LinkLostError("it says what no node says now")

    def _lose(self, node: int) -> None:
        super()._lose(node)
        if node not in self._ended:
            self.propose(self.lost(node))


class Spoke(Gang):
    """Any other node."""

    def __init__(self, spec: dict[str, Any], token: str) -> None:
        """Nothing is connected yet."""
        super().__init__(spec)
        self._proof = Proof(token, self.id)
        self._endpoint: dict[str, Any] | None = spec["gang"]["endpoint"]
        self._proposed: Fate | None = None
        self._since = 0.0

    def assemble(self, answer: Answer) -> None:
        """Join the hub, and wait until it says that all are there."""
        if self._endpoint is None:
            raise RequestError("gang", f"the gang {self.id} is under way without {self.host}", fix="see how it ends")
        link, address = self._join(self._endpoint)
        self._links[0] = link
        self._here, self._master, self.store_port = link.here, address, self._endpoint["store_port"]
        failpoint("gang-joined")
        answer.send({"held": {"address": address}})
        failpoint("gang-held")
        give_up = time.monotonic() + _HOLD
        awaited: tuple[Source, ...] = (link, answer)
        while time.monotonic() < give_up:
            ready = self._await(awaited, give_up)
            try:
                if link in ready and any("commit" in message for message in link.receive()):
                    return
            except LinkLostError:
                raise _left(self.peers[0]) from None
            if answer in ready:
                # Whoever held us is gone. The hub, which may have let go of all by then, is the one to decide.
                awaited, give_up = (link,), min(give_up, time.monotonic() + _UNWATCHED)
        if answer not in awaited:
            raise _released()
        raise _late("not all of the others joined")

    def _join(self, endpoint: dict[str, Any]) -> tuple[Link, str]:
        try:
            link, address = reach(endpoint["addresses"], endpoint["port"], self._proof, self.node, _REACH)
            try:
                check_port(address, endpoint["store_port"], _REACH_STORE)
            except UnreachableError:
                link.close()
                raise
        except UnreachableError as error:
            hub = self.peers[0]
            raise RequestError(
                "peer",
                f"{self.host} cannot reach {hub} at {error}",
                fix=f"let the firewall of {hub} take connections from {self.host} on any port; on a Mac that is the "
                f"application firewall of {hub} and, under Privacy & Security, Local Network; or set private_address",
                host=self.host,
                peer=hub,
            ) from None
        return link, address

    def _commit(self) -> None:
        """Tell that our intent is written, and wait until all have written theirs."""
        hub = self.peers[0]
        link = self._links[0]
        with _names_the_lost(hub):
            link.send({"committed": True})
            failpoint("gang-committed")
            give_up = time.monotonic() + _COMMIT + _REACH
            while self._await([link], give_up):
                for message in link.receive():
                    if "go" in message:
                        return
                    if "never" in message:
                        raise RequestError("gang", str(message["never"]))
        raise _never(f"{hub} did not answer")

    def propose(self, fate: Fate) -> None:
        """Tell the hub, once."""
        if self.fate is None and self._proposed is None:
            self._proposed, self._since = fate, time.monotonic()
            self._say({"fate": fate.message()})
            failpoint("gang-fate-told")

    def may_end(self) -> bool:
        """Tell the hub; nobody else needs this node."""
        self._say({"ended": True})
        return True

    def step(self) -> None:
        """Besides: go by what was proposed where the hub does not answer."""
        super().step()
        if self.fate is None and self._proposed is not None and time.monotonic() - self._since > _DECIDE:
            self.fate = self._proposed
        if self.fate is not None:
            self.close()

    def _say(self, message: dict[str, Any]) -> None:
        for link in list(self._links.values()):
            try:
                link.send(message)
            except LinkLostError:
                self._lose(0)

    def _take(self, node: int, message: dict[str, Any]) -> None:
        del node
        if "fate" in message:
            self.fate = self.fate or Fate.read(message["fate"], self.nodes)
        elif "ping" not in message:
            raise LinkLostError("it says what no hub says now")

    def _lose(self, node: int) -> None:
        super()._lose(node)
        self.fate = self.fate or self.lost(node)


def gang_of(spec: dict[str, Any], token: str) -> Gang:
    """Return a node's gang. `spec` was checked. Raises OSError where no port is to be had."""
    return Hub(spec, token) if spec["gang"]["node"] == 0 else Spoke(spec, token)


def _refuse_talk(link: Link, peer: str) -> None:
    """Take note of the end of one who has joined; it has nothing to say yet."""
    try:
        if link.receive():
            raise LinkLostError("it speaks out of turn")  # noqa: TRY301  # either way it is no node of ours any more
    except LinkLostError:
        raise _left(peer) from None


@contextlib.contextmanager
def _names_the_lost(peer: str) -> Iterator[None]:
    """Raise what a lost link means before the gang has come together."""
    try:
        yield
    except LinkLostError:
        raise _never(f"{peer} did not answer") from None


def _never(why: str) -> RequestError:
    return RequestError("gang", f"the gang never came together: {why}")


def _left(peer: str) -> RequestError:
    return RequestError("peer", f"{peer} left before the gang came together", fix="see why there", peer=peer)


def _late(why: str) -> RequestError:
    return RequestError("gang", f"the gang did not come together within {_HOLD:g} s: {why}", fix="try again")


def _released() -> RequestError:
    return RequestError("gang", "nobody waits for this launch any more", fix="launch it again")
