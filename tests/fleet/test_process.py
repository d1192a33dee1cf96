"""A child process as a channel: its end is told once, as it was, and never waits for what the child has left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from gpulayer.fleet.process import start_process
from tests.faults.hosts import until


class Listener:
    """Keeps what a channel brings."""

    def __init__(self) -> None:
        self.output = asyncio.StreamReader()
        self.end: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.output.feed_data(data)

    def stderr_received(self, data: bytes) -> None:
        raise AssertionError(data)

    def ended(self, error: Exception | None, status: int | None) -> None:
        assert error is None
        self.end.set_result(status)


async def test_a_channel_that_is_aborted_as_its_child_ends_tells_how_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        listener = Listener()
        channel = await start_process(["/bin/cat"], {}, listener)
        limit = time.monotonic() + 0.02  # the event loop does not turn: asyncio cannot learn the end meanwhile
        while time.monotonic() < limit:
            channel.abort()
        assert await listener.end == -signal.SIGKILL
    assert caplog.messages == []


@pytest.mark.parametrize("ends_first", [False, True])
async def test_an_aborted_channel_ends_though_the_child_s_child_holds_its_pipes(ends_first: bool) -> None:
    listener = Listener()
    then = "exit 7" if ends_first else "read line"
    channel = await start_process(["/bin/sh", "-c", f"sleep 60 & echo $!; {then}"], dict(os.environ), listener)
    left = int(await listener.output.readline())
    try:
        if ends_first:
            await until(lambda: channel._transport.get_returncode() is not None)  # type: ignore[attr-defined]
        channel.abort()
        assert await asyncio.wait_for(listener.end, 10) == (7 if ends_first else -signal.SIGKILL)
    finally:
        os.kill(left, signal.SIGKILL)


async def test_what_a_child_has_left_behind_is_not_waited_for() -> None:
    listener = Listener()
    words = "sleep 60 & echo $!; head -c 60000 /dev/zero; exit 3"
    await start_process(["/bin/sh", "-c", words], dict(os.environ), listener)
    left = int(await listener.output.readline())
    try:
        assert await asyncio.wait_for(listener.end, 10) == 3
        assert await listener.output.readexactly(60_000) == bytes(60_000)
    finally:
        os.kill(left, signal.SIGKILL)
