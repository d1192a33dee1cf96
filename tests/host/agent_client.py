"""A small synchronous client of the agent: the agent's process, its pipes, requests and streams."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from gpulayer.remote.states import LIVE
from gpulayer.remote.wire import FrameReader, encode

__all__ = ["LIVE", "AgentClient", "AgentError", "new_spec"]

ROOT = Path(__file__).resolve().parents[2]
NONCE = "0123456789abcdef" * 2
PATH = "import sys; sys.path.insert(0, sys.argv[1]); "
ENTRY = "from gpulayer.remote.agent import main; main(sys.argv[2])"


def new_spec(command: list[str] | str, *, job: str = "job", key: str = "k" * 64, **fields: Any) -> dict[str, Any]:
    """The spec of a CPU job."""
    attempt = fields.get("attempt", 1)
    return {
        "schema": "gpulayer.spec/1",
        "run": f"{job}-{key[:12]}-a{attempt}",
        "project": "tests",
        "job": job,
        "key": key,
        "attempt": attempt,
        "host": "here",
        "accelerator": "cpu",
        "devices": [],
        "share": 1,
        "slots": 64,
        "command": command,
        "env": {},
        "select_env": {},
        "secrets": [],
        "python": None,
        "tree": None,
        "setup": None,
        "outputs": [],
        "timeout": None,
        "grace": 5,
        "memory_bytes": None,
        "disk_bytes": None,
        "gang": None,
        **fields,
    }


class AgentError(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error["code"]
        self.error = error


class AgentClient:
    """One agent; `limit` seconds bound every wait. `prelude` is what its interpreter does first, in Python."""

    def __init__(
        self,
        folder: Path,
        *,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        limit: float = 20,
        prelude: str = "",
    ) -> None:
        self.folder = folder
        self.limit = limit
        self.process = subprocess.Popen(
            [python, "-I", "-S", "-X", "utf8", "-c", PATH + prelude + ENTRY, str(ROOT), NONCE],
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

    def launch(
        self, spec: dict[str, Any], secrets: dict[str, str] | None = None, token: str | None = None
    ) -> dict[str, Any]:
        return self.answer(self.begin(spec, secrets, token))[0]

    def begin(self, spec: dict[str, Any], secrets: dict[str, str] | None = None, token: str | None = None) -> int:
        """Send a launch, whose answer may take its time."""
        return self.send("launch", json.dumps({"secrets": secrets or {}, "token": token}).encode(), spec=spec)

    def follow(self, run: str, offset: int = 0, tail: dict[str, Any] | None = None) -> tuple[dict[str, Any], bytes]:
        """The final state and the whole log."""
        log = b""
        header: dict[str, Any] = {}
        for header, payload in self.frames(self.send("follow", run=run, offset=offset, tail=tail)):
            if "off" in header:
                assert header["off"] == offset + len(log)
            log += payload
        if "error" in header:
            raise AgentError(header["error"])
        return header["state"], log

    def status(self, run: str) -> dict[str, Any] | None:
        states: dict[str, dict[str, Any] | None] = self.ask("status", runs=[run])[0]["states"]
        return states[run]

    def stop(self, request: int) -> None:
        self.write(encode(NONCE, {"id": request, "op": "stop"}))

    def received(self, request: int) -> int:
        """Payload bytes of `request` that have arrived and were not asked for yet."""
        return sum(len(payload) for header, payload in self._frames if header["id"] == request)

    def run_folder(self, run: str) -> Path:
        return next((self.folder / "state").glob("*")) / "runs" / run

    def record(self, run: str) -> dict[str, Any]:
        """What the supervisor keeps on the disk."""
        record: dict[str, Any] = json.loads((self.run_folder(run) / "state.json").read_text())
        return record

    def wait_for(self, run: str, text: bytes, name: str = "output.log") -> None:
        """Wait until the job has written `text`."""
        log = self.run_folder(run) / name
        give_up = time.monotonic() + self.limit
        while not log.exists() or text not in log.read_bytes():
            assert time.monotonic() < give_up, f"{run} never wrote {text!r} to {name}"
            time.sleep(0.01)

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
