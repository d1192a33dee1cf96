"""A small synchronous client of the agent: the agent's process, its pipes, requests and streams."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from gpulayer.remote.wire import FrameReader, encode

ROOT = Path(__file__).resolve().parents[2]
NONCE = "0123456789abcdef" * 2
ENTRY = "import sys; sys.path.insert(0, sys.argv[1]); from gpulayer.remote.agent import main; main(sys.argv[2])"


class AgentError(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error["code"]
        self.error = error


class AgentClient:
    """One agent; `limit` seconds bound every wait."""

    def __init__(
        self, folder: Path, *, python: str = sys.executable, env: dict[str, str] | None = None, limit: float = 20
    ) -> None:
        self.folder = folder
        self.limit = limit
        self.process = subprocess.Popen(
            [python, "-I", "-S", "-X", "utf8", "-c", ENTRY, str(ROOT), NONCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            bufsize=0,
        )
        self._reader = FrameReader(NONCE)
        self._frames: list[tuple[dict[str, Any], bytes]] = []
        self._next = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hello(self, **fields: Any) -> dict[str, Any]:
        wanted = {"state_dir": str(self.folder / "state"), "lease_dir": str(self.folder / "leases")}
        return self.ask("hello", **{"protocol": 1, "host": "here", **wanted, **fields})[0]

    def send(self, op: str, payload: bytes = b"", **fields: Any) -> int:
        self._next += 1
        self.write(encode(NONCE, {"id": self._next, "op": op, **fields}, payload))
        return self._next

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[os.write(self.process.stdin.fileno(), view) :]

    def frames(self, request: int) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames that answer `request`, up to the last one. Acknowledges as a controller does."""
        received = 0
        give_up = time.monotonic() + self.limit
        while True:
            found = next((frame for frame in self._frames if frame[0]["id"] == request), None)
            if found is None:
                self._receive(give_up - time.monotonic())
                continue
            self._frames.remove(found)
            yield found
            header, payload = found
            if "ok" in header or "error" in header:
                return
            received += len(payload)
            if payload:
                self.write(encode(NONCE, {"id": request, "op": "ack", "bytes": received}))

    def answer(self, request: int) -> tuple[dict[str, Any], bytes]:
        *_, (header, payload) = self.frames(request)
        if "error" in header:
            raise AgentError(header["error"])
        return header, payload

    def ask(self, op: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        return self.answer(self.send(op, payload, **fields))

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait(self.limit)

    def _receive(self, patience: float) -> None:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0, patience))[0]:
            raise TimeoutError("the agent does not answer")
        data = os.read(self.process.stdout.fileno(), 1 << 20)
        if not data:
            raise EOFError(f"the agent ended: {self.process.wait(5)}")
        self._frames += self._reader.feed(data)
