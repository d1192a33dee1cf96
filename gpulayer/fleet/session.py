"""A session: one connection to a host, one channel, one agent; requests, streams, and the watch over the link.

An exit status is never evidence and a closed channel never an answer: a reply counts only as a complete frame with this
connection's nonce. Everything that the agent sends is bounded and checked.
"""

from __future__ import annotations

import asyncio
import collections
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from gpulayer.errors import GpulayerError, HostError, Stage, told
from gpulayer.fleet.connector import Connector, jittered
from gpulayer.fleet.diagnosis import Evidence, no_agent
from gpulayer.fleet.shipment import preamble
from gpulayer.fleet.transport import Channel, ConnectOptions, DroppedError, Transport
from gpulayer.remote.wire import MAX_PAYLOAD, PROTOCOL, WINDOW, FrameReader, ProtocolError, encode
from gpulayer.spec.inventory import Host, Inventory, TransportKind

PING_INTERVAL = 15.0
SILENCE = 45.0
"""Seconds without a byte after which the link counts as lost."""

REQUEST_TIMEOUT = 60.0
_DROP_RETRIES = 8
_FAREWELL = 5.0
_LAST_WORDS = 1.0
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 15.0
_KEPT = 16 * 1024
_UNREAD = 32 * 1024 * 1024
_FRAME = 400
_NESTED = 16


class AgentError(GpulayerError):
    """The agent answered with an error. `code` is one of the protocol's words; `error` is all that it says of it."""

    def __init__(self, host: str, header: Mapping[str, Any]) -> None:
        """Read the error out of the answer, which is checked: it comes from the host."""
        error = header["error"] if isinstance(header["error"], dict) else {}
        message, fix = error.get("message"), error.get("fix")
        self.reason = told(message) if isinstance(message, str) else "an error without a message"
        super().__init__(f"{host}: {self.reason}", fix=told(fix) if isinstance(fix, str) else None)
        self.host = host
        self.code = str(error.get("code", "unknown"))
        self.error = error
        self.header = header


def unable(error: AgentError) -> HostError:
    """Return an agent's refusal as what it is where nothing can be done without that host."""
    return HostError(error.host, Stage.PROTOCOL, error.reason, fix=error.fix)


@dataclass(frozen=True, slots=True)
class Reply:
    """One frame of the agent: its header, without anything hidden, and its raw payload."""

    header: Mapping[str, Any]
    payload: bytes


def _size(reply: Reply) -> int:
    """Return about how many bytes of memory a frame takes, its payload aside: nested values take the most."""
    nested = any(isinstance(value, dict | list) for value in reply.header.values())
    return _FRAME + len(repr(reply.header)) * (_NESTED if nested else 1)


class Stream:
    """The frames of one request, in order, for one consumer: `async for reply in stream`.

    What is taken is acknowledged when the next frame is asked for, so that the agent never sends much more than the
    consumer can take. `last` is the final header, once the loop has ended by itself. The loop raises AgentError where
    the agent reports an error and HostError where the link is lost.
    """

    def __init__(self, session: Session, number: int) -> None:
        """Begin empty; `Session.stream` sends the request."""
        self._session = session
        self._number = number
        self._frames: collections.deque[Reply] = collections.deque()
        self._unread = 0  # about what their headers take
        self._arrived = asyncio.Event()
        self._received = 0
        self._taken = 0
        self._acknowledged = 0
        self._error: GpulayerError | None = None
        self._done = False
        self.last: Mapping[str, Any] = {}

    def __aiter__(self) -> AsyncIterator[Reply]:
        """Iterate over the frames."""
        return self

    async def __anext__(self) -> Reply:
        """Return the next frame; acknowledge what was taken before, well before the agent must wait for it."""
        if self._taken - self._acknowledged >= WINDOW // 8:
            self._acknowledged = self._taken
            self._session.send({"id": self._number, "op": "ack", "bytes": self._taken})
        while not self._frames:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        reply = self._frames.popleft()
        self._unread -= _size(reply)
        self._taken += len(reply.payload)
        return reply

    async def stop(self) -> None:
        """Ask the agent to end the stream early. What is still under way can be read on, or left."""
        if not self._done and self._error is None:
            self._session.send({"id": self._number, "op": "stop"})

    def take(self, reply: Reply) -> bool:
        """Keep a frame for the consumer. Called by the session; says whether it was the last one."""
        if "error" in reply.header:
            self.fail(AgentError(self._session.host.name, reply.header))
            return True
        self._arrived.set()
        if "ok" in reply.header:
            self.last = reply.header
            self._done = True
            return True
        self._received += len(reply.payload)
        self._unread += _size(reply)
        if self._received - self._acknowledged > WINDOW + MAX_PAYLOAD or self._unread > _UNREAD:
            raise ProtocolError("the agent sends more than it was allowed to")
        self._frames.append(reply)
        return False

    def fail(self, error: GpulayerError) -> None:
        """End the stream with an error, behind the frames that came before it."""
        self._error = error
        self._arrived.set()


class Session:
    """One agent. `hello` is its introduction; `closed` is done, with the reason, when the link has ended."""

    def __init__(self, host: Host, python: str | None, transport: Transport) -> None:
        """Make the session that `open` starts. `python` is the interpreter that is asked for, None for any."""
        self.host = host
        self.python = python
        self.hello: Mapping[str, Any] = {}
        self.shipping = asyncio.Lock()
        """Held while code is sent: two trees may share a file, of which the host takes the parts in one order only."""
        self.closed: asyncio.Future[HostError] = asyncio.get_running_loop().create_future()
        self._transport = transport
        self._channel: Channel | None = None
        self._nonce = secrets.token_hex(16)
        self._reader = FrameReader(self._nonce)
        # Each request waits for one last frame, also where nobody waits for that any more (None): what comes without
        # having been asked for is no answer, and a host could send it without end.
        self._pending: dict[int, asyncio.Future[Reply] | Stream | None] = {}
        self._number = 0
        self._evidence = Evidence()
        self._heard = 0.0
        self._gone = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._own_connector: Connector | None = None

    @property
    def name(self) -> str:
        """The host's name in the inventory."""
        return self.host.name

    @property
    def peer(self) -> str | None:
        """The IP address that the connection leads to, None where the transport does not tell."""
        return self._channel.peer if self._channel is not None else None

    @classmethod
    async def open(
        cls,
        host: Host,
        inventory: Inventory,
        options: ConnectOptions | None = None,
        *,
        connector: Connector | None = None,
    ) -> Self:
        """Reach a host and start its agent. Raises HostError with the stage that failed.

        Where the server hangs up at once, as it does when too many log in, it is tried again a few times; a failed
        login never is: hosts lock out who fails often. A `connector` is shared by the sessions of a fleet.
        """
        shared = connector or Connector(inventory, options or ConnectOptions())
        pause = 0.25
        for attempt in range(_DROP_RETRIES + 1):
            try:
                async with shared.login(host):
                    session = cls(host, shared.python(host), shared.transport(host))
                    await session._start(shared.options)
            except DroppedError:
                if attempt == _DROP_RETRIES:
                    raise
                await asyncio.sleep(jittered(pause))
                pause = min(2 * pause, 4.0)
            except BaseException:
                if connector is None:
                    await shared.close()
                raise
            else:
                session._own_connector = None if connector else shared
                return session
        raise AssertionError  # the last attempt returned or raised

    async def _start(self, options: ConnectOptions) -> None:
        """Start the agent and have it introduce itself. The first request goes out with the payload: one round trip."""
        self._channel = await self._transport.start(self)
        self._heard = asyncio.get_running_loop().time()
        self._channel.write(preamble(self.python, self._nonce))
        patience = options.start_timeout
        if self.host.transport is TransportKind.OPENSSH:
            patience += options.connect_timeout + options.login_timeout  # ssh itself is only started
        try:
            async with asyncio.timeout(patience):
                reply = await self.request(
                    "hello",
                    protocol=PROTOCOL,
                    host=self.host.name,
                    state_dir=self.host.state_dir,
                    lease_dir=self.host.lease_dir,
                    timeout=2 * patience,
                )
        except TimeoutError:
            raise await self._last_words(patience) from None
        except BaseException as error:
            self._channel.abort()
            await self._gone.wait()
            if isinstance(error, AgentError):  # an agent that cannot work there is no host that could be asked
                raise unable(error) from error
            raise
        self.hello = reply.header
        if not self.closed.done():  # what came behind the answer may have ended the link already
            self._watch = asyncio.create_task(self._watch_link())

    async def _last_words(self, patience: float) -> HostError:
        """Give up a start, and say why. A shell that reads its whole input first says what it is at the end of it."""
        if self._channel is not None and not self._gone.is_set():
            self._channel.close()
            await asyncio.wait([self.closed], timeout=_LAST_WORDS)
            self._channel.abort()
            await self._gone.wait()
        if self._evidence.status is not None and self._evidence.status > 0:
            return self.closed.result()
        return no_agent(self.host.name, self._evidence, f"within {patience:.0f} s")

    async def request(
        self,
        op: str,
        payload: bytes = b"",
        *,
        timeout: float = REQUEST_TIMEOUT,  # noqa: ASYNC109  # each kind of request has its own measure
        **fields: object,
    ) -> Reply:
        """Ask the agent for something and return its answer.

        Raises AgentError where the answer is an error, and HostError where the link is lost or the answer does not come
        within `timeout` seconds.
        """
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        number = self._begin(waiter)
        try:
            async with asyncio.timeout(timeout):
                self.send({"id": number, "op": op, **fields}, payload)
                if payload:
                    await self.drain()
                return await waiter
        except TimeoutError:
            raise HostError(
                self.host.name,
                Stage.PROTOCOL,
                f"no answer to `{op}` within {timeout:.0f} s",
                fix="the host may be overloaded or its disk may hang; try again",
            ) from None
        finally:
            if self._pending.get(number) is waiter:
                self._pending[number] = None

    async def stream(self, op: str, payload: bytes = b"", **fields: object) -> Stream:
        """Begin a request that is answered by many frames. Raises HostError where the link is lost already."""
        number = self._number + 1
        stream = Stream(self, number)
        self._begin(stream)
        self.send({"id": number, "op": op, **fields}, payload)
        if payload:
            await self.drain()
        return stream

    def _begin(self, waiter: asyncio.Future[Reply] | Stream | None) -> int:
        if self.closed.done():
            raise self.closed.result()
        self._number += 1
        self._pending[self._number] = waiter
        return self._number

    def send(self, header: dict[str, object], payload: bytes = b"") -> None:
        """Write one frame. What a dead link swallows is reported by `closed` to whoever waits for an answer."""
        if self._channel is not None:
            self._channel.write(encode(self._nonce, header, payload))

    async def drain(self) -> None:
        """Wait until the link can take more."""
        if self._channel is not None:
            await self._channel.drain()

    async def close(self) -> None:
        """End the agent and the connection. What was detached on the host goes on."""
        if self._channel is not None and not self._gone.is_set():
            self._channel.close()
            try:
                async with asyncio.timeout(_FAREWELL):
                    await self._gone.wait()
            except TimeoutError:
                self._channel.abort()
                await self._gone.wait()
        if self._own_connector is not None:
            await self._own_connector.close()

    async def __aenter__(self) -> Self:
        """Use the session in `async with`."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def _watch_link(self) -> None:
        """Ping, so that the agent knows that we live, and end the link where nothing comes any more."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_INTERVAL)
            if loop.time() - self._heard > SILENCE:
                self._end(self._lost(f"nothing came for {SILENCE:.0f} s"))
                return
            self.send({"id": self._begin(None), "op": "ping"})

    def data_received(self, data: bytes) -> None:
        """Take bytes of the agent's output (a transport's receiver)."""
        self._heard = asyncio.get_running_loop().time()
        if not self.hello and len(self._evidence.output) < _KEPT:
            self._evidence.output += data[:_KEPT]
        try:
            for header, payload in self._reader.feed(data):
                self._dispatch(Reply(header, payload))
        except ProtocolError as error:
            if self._nonce.encode() not in self._evidence.output:
                self._end(no_agent(self.host.name, self._evidence, str(error)))
            else:
                broken = f"the agent does not keep to the protocol: {error}"
                self._end(HostError(self.host.name, Stage.PROTOCOL, broken, fix="is that host what it claims to be?"))

    def stderr_received(self, data: bytes) -> None:
        """Keep the end of what is said as diagnostics."""
        self._evidence.stderr = (self._evidence.stderr + data)[-_KEPT:]

    def ended(self, error: Exception | None, status: int | None) -> None:
        """Learn from the transport that nothing more will come."""
        self._evidence.status = status
        own = self._transport.explain(status, self._evidence.stderr)
        if own is not None:
            self._end(own)
        elif self.hello:
            self._end(self._lost(str(error) if error else "the agent has ended"))
        else:
            how = f"it ended with status {status}" if status is not None else "the connection ended"
            self._end(no_agent(self.host.name, self._evidence, how))
        self._gone.set()

    def _dispatch(self, reply: Reply) -> None:
        number = reply.header.get("id")
        if not isinstance(number, int) or number not in self._pending:
            raise ProtocolError(f"an answer to nothing that was asked: {number!r:.40}")
        waiter = self._pending[number]
        if isinstance(waiter, Stream):
            if waiter.take(reply):
                del self._pending[number]
            return
        if not reply.header.keys() & {"ok", "error"}:
            raise ProtocolError("a request was answered by a stream")
        del self._pending[number]
        if waiter is None or waiter.done():
            return  # a ping, or what nobody waits for any more
        if "error" in reply.header:
            waiter.set_exception(AgentError(self.host.name, reply.header))
        else:
            waiter.set_result(reply)

    def _end(self, error: HostError) -> None:
        """End the link for everybody who waits, once."""
        if self.closed.done():
            return
        self.closed.set_result(error)
        if self._watch is not None:
            self._watch.cancel()
        for waiter in self._pending.values():
            if isinstance(waiter, Stream):
                waiter.fail(error)
            elif waiter is not None and not waiter.done():
                waiter.set_exception(error)
        self._pending.clear()
        if self._channel is not None and not self._gone.is_set():
            self._channel.abort()

    def _lost(self, how: str) -> HostError:
        return HostError(
            self.host.name,
            Stage.CONNECT,
            f"the connection is lost ({how})",
            fix="what runs there runs on; `gpulayer attach` follows it again",
        )


class Fleet:
    """The sessions of an inventory: at most one a host, made when asked for and made again when lost."""

    def __init__(self, inventory: Inventory, options: ConnectOptions | None = None) -> None:
        """Nothing is connected yet."""
        self.inventory = inventory
        self._connector = Connector(inventory, options or ConnectOptions())
        self._sessions: dict[str, Session] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    def python(self, name: str) -> str | None:
        """Return the interpreter of a host's probes and jobs, by the inventory (see ConnectOptions.local_python)."""
        return self._connector.python(self.inventory.hosts[name])

    async def connect(self, names: Iterable[str]) -> dict[str, Session | HostError]:
        """Reach all these hosts at once, each tried once, and return for each its session or why there is none."""

        async def one(name: str) -> Session | HostError:
            try:
                return await self.session(name)
            except HostError as error:
                return error

        names = list(names)
        return dict(zip(names, await asyncio.gather(*(one(name) for name in names)), strict=True))

    async def session(self, name: str, *, deadline: float | None = None) -> Session:
        """Return the host's session; connect where there is none, or where it was lost.

        A host that is out of reach is tried again, ever more slowly, for `deadline` seconds (None: one try). What no
        repetition can mend, such as a changed key or a refused login, is raised at once. Raises HostError.
        """
        if name not in self.inventory.hosts:
            raise HostError(name, Stage.RESOLVE, "it is not in the inventory", fix="put it back there")
        loop = asyncio.get_running_loop()
        end = loop.time() + (deadline or 0.0)
        pause = _FIRST_PAUSE
        async with self._turns.setdefault(name, asyncio.Lock()):
            while True:
                session = self._sessions.get(name)
                if session is not None and not session.closed.done():
                    return session
                try:
                    self._sessions[name] = session = await Session.open(
                        self.inventory.hosts[name], self.inventory, connector=self._connector
                    )
                except HostError as error:
                    left = end - loop.time()
                    if left <= 0 or error.stage not in (Stage.RESOLVE, Stage.CONNECT):
                        raise
                    await asyncio.sleep(min(left, jittered(pause)))
                    pause = min(2 * pause, _LONGEST_PAUSE)
                else:
                    return session

    async def close(self) -> None:
        """Close every session. What runs on the hosts runs on."""
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._sessions.clear()
        await self._connector.close()

    async def __aenter__(self) -> Self:
        """Use the fleet in `async with`."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()
