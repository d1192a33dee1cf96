"""A TCP proxy that does to a connection what networks do: delay, rate, cut, half-close, black hole."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Self

from tests.sshd import ADDRESS

_CHUNK = 64 * 1024
_BEAT = 0.05  # seconds between the parts that a rate lets through
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time to linger: closing sends RST


@dataclass(eq=False)
class _Way:
    """One direction of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    up: bool


@dataclass(kw_only=True)
class Proxy:
    """Stands before a port of loopback; `up` is the way to the server. Figures may change while connections are open.

    `delay` is seconds that each chunk is under way, `rate` is bytes a second for each direction (None: no limit).
    """

    target: int
    delay: float = 0.0
    rate: float | None = None
    port: int = 0
    connections: int = 0
    moved: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _cut_at: dict[bool, int] = field(default_factory=dict)
    _open: set[_Way] = field(default_factory=set)
    _through: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._through.set()
        self._server = await asyncio.start_server(self._accept, ADDRESS, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every open connection, both ways."""
        for way in list(self._open):
            _reset(way.writer)

    def cut_after(self, *, up: bool, count: int) -> None:
        """Reset everything once `count` more bytes have gone one way; not one byte more goes through."""
        self._cut_at = {up: self.moved[up] + count}

    def half_close(self, *, up: bool) -> None:
        """End one direction of every open connection (FIN)."""
        for way in [way for way in self._open if way.up is up]:
            with contextlib.suppress(OSError):
                way.writer.write_eof()

    def black_hole(self) -> None:
        """Let nothing through from now on, and say nothing of it."""
        self._through.clear()

    def recover(self) -> None:
        """Let everything through again."""
        self._through.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        writers = [writer]
        try:
            await self._through.wait()
            there, back = await asyncio.open_connection(ADDRESS, self.target)
            writers.append(back)
            await asyncio.gather(self._carry(_Way(reader, back, up=True)), self._carry(_Way(there, writer, up=False)))
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone: so is the other, at once
        finally:
            self._tasks.discard(task)
            for one in writers:
                _reset(one)

    async def _carry(self, way: _Way) -> None:
        self._open.add(way)
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        pump = asyncio.create_task(self._deliver(way, under_way))
        try:
            while data := await way.reader.read(_CHUNK if self.rate is None else int(self.rate * _BEAT) + 1):
                await under_way.put((time.monotonic() + self.delay, data))
            await under_way.put((time.monotonic() + self.delay, b""))
            await pump
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            self._open.discard(way)

    async def _deliver(self, way: _Way, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._through.wait()
            if not data:
                with contextlib.suppress(OSError):
                    way.writer.write_eof()
                return
            limit = self._cut_at.get(way.up)
            part = data if limit is None else data[: max(0, limit - self.moved[way.up])]
            way.writer.write(part)
            self.moved[way.up] += len(part)
            await way.writer.drain()
            if len(part) < len(data) or self.moved[way.up] == limit:
                self._cut_at = {}
                self.cut()
                return
            if self.rate is not None:
                await asyncio.sleep(len(part) / self.rate)


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
