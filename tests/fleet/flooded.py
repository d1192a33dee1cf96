"""A controller that floods are let loose on, as a process of its own: it tells what each cost, as JSON.

`flooded.py KNOWN_HOSTS FLOODING HONEST`: the two are hosts of an inventory, as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from gpulayer.errors import GpulayerError
from gpulayer.fleet.session import Session
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.spec.inventory import Host, Inventory, TransportKind

START_LIMIT = 2.0
SSH, OPENSSH = TransportKind.SSH, TransportKind.OPENSSH
FLOODS = (
    *((SSH, flood) for flood in ("flood-before", "flood-beside", "flood-after", "flood-in-a-frame")),
    *((SSH, flood) for flood in ("flood-of-answers", "flood-of-pongs", "bomb")),
    *((SSH, flood) for flood in ("flood-stream", "flood-stream-of-nothing", "flood-stream-of-headers")),
    # What differs between the transports is how bytes are read.
    *((OPENSSH, flood) for flood in ("flood-before", "flood-beside", "flood-stream")),
)


def memory(line: str) -> int:
    """VmRSS (now) or VmHWM (the most since `forget_peak`) of this process, in KiB."""
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def suffer(host: Host, options: ConnectOptions, *, stream: bool) -> str:
    """Connect, and ask a few times, or leave a stream unread; return why the link has ended, if it has."""
    try:
        async with await Session.open(host, Inventory(hosts={}), options) as session:
            if stream:
                await session.stream("follow", run="x")
                return str(await session.closed)
            for _ in range(3):
                await session.request("ping", timeout=START_LIMIT)
    except GpulayerError as error:
        return str(error)
    return ": protocol: kept to"


async def answers(session: Session, waits: list[float]) -> None:
    """Note how long each answer of the other host takes, until cancelled."""
    while True:
        begun = time.monotonic()
        await session.request("ping")
        waits.append(time.monotonic() - begun)
        await asyncio.sleep(0.02)


async def main(known_hosts: Path, flooding: Host, honest: Host) -> None:
    options = ConnectOptions(
        known_hosts=(known_hosts,), ssh_config=known_hosts.with_name("none"), agent_socket=None, local_python=None,
        connect_timeout=2.0, login_timeout=2.0, start_timeout=START_LIMIT,
    )  # fmt: skip
    told: dict[str, Any] = {}
    async with await Session.open(honest, Inventory(hosts={}), options) as other:
        for transport, flood in FLOODS:
            host = dataclasses.replace(flooding, python=flood, transport=transport)
            waits: list[float] = []
            asking = asyncio.create_task(answers(other, waits))
            forget_peak()
            before, begun = memory("VmRSS"), time.monotonic()
            error = await suffer(host, options, stream="stream" in flood)
            seconds = time.monotonic() - begun
            grown = memory("VmHWM") - before
            asking.cancel()
            told[f"{transport.value} {flood}"] = {
                "error": error, "seconds": seconds, "grown": grown, "answers": len(waits), "slowest": max(waits),
            }  # fmt: skip
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    one, two = (Host(**json.loads(word)) for word in sys.argv[2:4])
    asyncio.run(main(Path(sys.argv[1]), one, two))
