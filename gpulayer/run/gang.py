"""Launch a run on all of its hosts, or on none: held in host order until all are there, then let go together."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulayer.errors import GpulayerError, HostError, Stage
from gpulayer.fleet.session import AgentError, Session, Stream
from gpulayer.run.replies import Reader, RunState, run_state
from gpulayer.spec.inventory import TransportKind

ANSWER_LIMIT: Final = 60.0  # seconds until a host has its part, or says why not
GO_LIMIT: Final = 120.0  # seconds until it tells its state then: it waits 60 for the others, and 30 for their words
MOST_ADDRESSES: Final = 32  # that a node tries, as docs/protocol.md says

New = tuple[bool, RunState]
Begin = Callable[[Session, Mapping[str, Any]], Awaitable["Pending"]]


@dataclass(slots=True)
class Pending:
    """A launch that a host has taken: `held` until the other nodes are there, else it has told `told` at once."""

    session: Session
    run: str
    stream: Stream
    held: Mapping[str, Any] | None = None
    told: New | None = None

    async def answer(self) -> None:
        """Wait until the host holds the launch, or has begun it. AgentError where it refuses; HostError."""
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                frame = await anext(aiter(self.stream))
        except TimeoutError:
            raise self._no_answer(ANSWER_LIMIT) from None
        except StopAsyncIteration:
            self.told = self._told()
        else:
            self.held = Reader(self.session.name, frame.header).get("held")

    async def end(self) -> New | None:
        """Return whether the run is new there and its state; None where the launch was taken back. Errors alike."""
        if self.told is None:
            try:
                async with asyncio.timeout(GO_LIMIT):
                    async for _ in self.stream:
                        pass
            except TimeoutError:
                raise self._no_answer(GO_LIMIT) from None
            self.told = self._told()
        return self.told

    def _told(self) -> New | None:
        reader = Reader(self.session.name, self.stream.last)
        if reader.get("stopped") is True:
            return None
        state = run_state(self.session.name, reader.get("state"))
        if state.run.run != self.run:
            raise reader.bad("state")
        return reader.get("new") is True, state

    def _no_answer(self, limit: float) -> HostError:
        return HostError(
            self.session.name, Stage.PROTOCOL, f"no answer to `launch` within {limit:.0f} s",
            fix="the host may be overloaded or its disk may hang; try again",
        )  # fmt: skip


async def launch_all(sessions: Sequence[Session], specs: Sequence[Mapping[str, Any]], begin: Begin) -> list[New]:
    """Launch a run's parts, and return those that have begun, each new or not; at least one.

    The whole may be done again: what has begun says so. HostError where a link is lost. AgentError where a host refuses
    its part: then none has begun. Where one refuses while others had begun before, it is left out: the gang has ended
    without it, or will.
    """
    pending: list[Pending] = []
    refusals: list[GpulayerError] = []
    try:
        await _hold(sessions, specs, begin, pending, refusals)
    except HostError as error:
        refusals.append(error)
    finally:
        if len(pending) < len(specs):  # also where we are cancelled
            for one in pending:
                await one.stream.stop()
    ends = await asyncio.gather(*(_settled(one) for one in pending))
    refusals += [end for end in ends if isinstance(end, GpulayerError)]
    begun = [end for end in ends if isinstance(end, tuple)]
    for refusal in refusals:
        if isinstance(refusal, HostError) or not begun:
            raise refusal
    return begun


async def _hold(
    sessions: Sequence[Session],
    specs: Sequence[Mapping[str, Any]],
    begin: Begin,
    pending: list[Pending],
    refusals: list[GpulayerError],
) -> None:
    """Send the parts one after the other: whoever comes second to a host of another gang finds its lease taken."""
    for session, spec in zip(sessions, specs, strict=True):
        try:
            pending.append(await begin(session, await _aimed(spec, sessions, pending)))
        except AgentError as error:
            refusals.append(error)
            if not any(one.told for one in pending):
                return


async def _settled(pending: Pending) -> New | AgentError | HostError | None:
    try:
        return await pending.end()
    except (AgentError, HostError) as error:
        return error


async def _aimed(
    spec: Mapping[str, Any], sessions: Sequence[Session], pending: Sequence[Pending]
) -> Mapping[str, Any]:  # fmt: skip
    """Return the spec of a gang's later node with what is known of the way to its first one."""
    if not pending:
        return spec
    endpoint = None
    if pending[0].held is not None:
        held = Reader(sessions[0].name, pending[0].held)
        endpoint = {
            "addresses": await addresses(sessions, held.words("addresses")),
            "port": held.number("port"),
            "store_port": held.number("store_port"),
        }
    return {**spec, "gang": {**spec["gang"], "endpoint": endpoint}}


async def addresses(sessions: Sequence[Session], named: Sequence[str]) -> list[str]:
    """Return the addresses at which a gang's other nodes may reach its first one, the likeliest first.

    Its `private_address` alone where the inventory has one; else where our own connection leads, what the inventory's
    address means here (a `.local` name means nothing to hosts without mDNS), and what the host calls its own (`named`).
    A loopback address is another machine everywhere else: it counts where all nodes are on this one, or nothing else
    is known.
    """
    first, host = sessions[0], sessions[0].host
    if host.private_address is not None:
        found = await _resolved(host.private_address)
        if not found:
            message = f"the private_address of {host.name}, {host.private_address}, is not known here"
            fix = "correct it in the inventory, or write the IP address"
            raise AgentError(host.name, {"error": {"code": "peer", "message": message, "fix": fix}})
        return found[:MOST_ADDRESSES]
    reached = [] if host.transport is TransportKind.LOCAL else await _resolved(host.target)
    every = list(dict.fromkeys(word for word in (first.peer or "", *reached, *named) if is_address(word)))
    near = [word for word in every if ipaddress.ip_address(word).is_loopback]
    far = [word for word in every if word not in near]
    return ([*near, *far] if all(map(_is_here, sessions)) else far or near)[:MOST_ADDRESSES]


async def _resolved(name: str) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found if is_address(str(address[0]))))


def is_address(word: str) -> bool:
    """Whether a word is an address that other machines can be given: a link-local one means nothing there."""
    try:
        address = ipaddress.ip_address(word)
    except ValueError:
        return False
    return not (address.is_link_local or address.is_unspecified or address.is_multicast)


def _is_here(session: Session) -> bool:
    if session.host.transport is TransportKind.LOCAL:
        return True
    return session.peer is not None and is_address(session.peer) and ipaddress.ip_address(session.peer).is_loopback
