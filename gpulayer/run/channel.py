"""The stream of events from the tasks that make them to the one reader that shows them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from gpulayer.run.events import Event

WINDOW: Final = 8 * 2**20  # bytes of output that may wait for the reader


class Channel:
    """Events in order. Output waits for a slow reader; nothing else does, so that no job waits for a terminal."""

    def __init__(self) -> None:
        """Start empty and open."""
        self._events: deque[Event] = deque()
        self._waiting_bytes = 0
        self._closed = False
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def put(self, event: Event) -> None:
        """Add an event at once."""
        self._events.append(event)
        self._filled.set()

    async def put_output(self, event: Event) -> None:
        """Add bytes of output as soon as the reader has room for them."""
        await self._room.wait()
        self._waiting_bytes += len(event.data)
        if self._waiting_bytes >= WINDOW:
            self._room.clear()
        self.put(event)

    def close(self) -> None:
        """End the stream after what is in it."""
        self._closed = True
        self._filled.set()

    async def read(self) -> AsyncIterator[Event]:
        """Yield the events until the stream is closed."""
        while True:
            while self._events:
                event = self._events.popleft()
                self._waiting_bytes -= len(event.data)
                if self._waiting_bytes < WINDOW:
                    self._room.set()
                yield event
            if self._closed:
                return
            self._filled.clear()
            await self._filled.wait()
