"""What torchrun (2.13) does to the processes of a node, without torch: a store's port, sessions, signals and ends.

Importing torch takes two seconds of CPU a node. Tests of what surrounds torchrun use this; one of `test_gangs.py`, and
those of `tests/gangs`, run the real one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

SHUTDOWN = 30


class StoppedError(Exception):
    pass


def raise_stopped(number: int, frame: FrameType | None) -> None:
    del frame
    raise StoppedError(number)


def options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options and the program with its arguments."""
    end = words.index("--no-python")
    names = [word.removeprefix("--") for word in words[:end:2]]
    return dict(zip(names, words[1:end:2], strict=True)), words[end + 1 :]


def store(option: dict[str, str]) -> socket.socket:
    """Node 0 listens; the others come, and learn with the end of the connection that node 0 has ended."""
    address, port = option["master-addr"].strip("[]"), int(option["master-port"])
    if option["node-rank"] == "0":
        listener = socket.create_server(("", port))  # with SO_REUSEADDR, as libuv
        for _ in range(int(option["nnodes"]) - 1):
            listener.accept()[0].detach()
        return listener
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            time.sleep(0.02)


def end(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, number)
    give_up = time.monotonic() + SHUTDOWN
    for rank in ranks:
        try:
            rank.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def main() -> int:
    option, program = options(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, raise_stopped)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        kept = store(option)
        node, count = int(option["node-rank"]), int(option["nproc-per-node"])
        world = int(option["nnodes"]) * count
        for local in range(count):
            environment = {
                "RANK": str(node * count + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": option["master-addr"],
                "MASTER_PORT": option["master-port"],
            }
            ranks.append(subprocess.Popen(program, env={**os.environ, **environment}, start_new_session=True))
        while True:
            time.sleep(0.05)
            codes = [rank.poll() for rank in ranks]
            if any(codes):
                end(ranks, signal.SIGTERM)
                return 1
            if codes == [0] * count:
                kept.close()
                return 0
    except StoppedError as stop:
        end(ranks, stop.args[0])
        raise


if __name__ == "__main__":
    sys.exit(main())
