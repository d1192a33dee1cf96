"""The agent: our program on a host for as long as one connection lasts.

One thread, one loop over the connection, the pipes of its children and the timers of its streams. It never shares its
standard streams with a job, does nothing that takes long itself, and ends at the end of its input or after a minute
without a frame: a half-open connection would otherwise keep it alive for good.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import select
import signal
import time

from gpulayer.remote.host import Host, Request, Stream, Task
from gpulayer.remote.wire import FrameReader, ProtocolError, RequestError, encode, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpulayer.remote.importer import MemoryImporter
    from gpulayer.remote.watch import Watches

SILENCE = 60.0
"""Seconds without any frame after which the connection counts as dead."""

_ALLOCATIONS = 100_000  # objects between two searches for garbage: nearly all that we make lives as long as we
_READ = 256 * 1024
_GATHERING = 0.002  # seconds between what a watch tells and the look, for which no more is heard: lines come in numbers
_BURST = 8  # frames that are sent before the input is looked at again


class Agent:
    """Serves one connection, given as two file descriptors."""

    def __init__(self, nonce: str, source: int, sink: int, importer: MemoryImporter | None) -> None:
        """`nonce` is this connection's; the descriptors become non-blocking. `importer` has our modules, if shipped."""
        self._nonce = nonce
        self._importer = importer
        self._source = source
        self._sink = sink
        self._reader = FrameReader(nonce)
        self._host: Host | None = None
        self._umask = os.umask(0o077)
        self._control: collections.deque[bytes] = collections.deque()
        self._streams: collections.deque[Stream] = collections.deque()
        self._tasks: dict[int, tuple[Task, FrameReader]] = {}
        self._writing = memoryview(b"")
        self._heard = time.monotonic()
        self._watches: Watches | None = None
        self._deaf = 0.0
        self._poll = select.poll()

    def run(self) -> None:
        """Serve until the connection ends."""
        os.set_blocking(self._source, False)
        os.set_blocking(self._sink, False)
        self._poll.register(self._source, select.POLLIN)
        try:
            while time.monotonic() - self._heard < SILENCE:
                blocked = self._write()
                self._poll.register(self._sink, select.POLLOUT if blocked else 0)
                self._listen(blocked)
                ready = [descriptor for descriptor, _ in self._poll.poll(self._patience(blocked))]
                # The input comes last: what it brings may close descriptors, and give their numbers to others.
                for descriptor in sorted(ready, key=lambda descriptor: descriptor == self._source):
                    if descriptor == self._source:
                        if not self._read():
                            return
                    elif descriptor in self._tasks:
                        self._collect(descriptor)
                    elif descriptor != self._sink:
                        self._wake()
                    elif not blocked:
                        return  # nobody reads any more
        except (BrokenPipeError, ConnectionResetError, ProtocolError):
            return  # the controller is gone or talks nonsense: there is nobody to tell
        finally:
            self._end()

    def _patience(self, blocked: bool) -> int:
        """Return how many milliseconds the loop may sleep."""
        now = time.monotonic()
        until = self._heard + SILENCE
        if not blocked:
            if self._control:
                return 0
            until = min([until, *(stream.due for stream in self._streams if stream.open)])
            if self._deaf > now:
                until = min(until, self._deaf)
        return max(0, int((until - now) * 1000) + 1)

    def _read(self) -> bool:
        """Take in what has arrived; say whether there may be more."""
        try:
            data = os.read(self._source, _READ)
        except BlockingIOError:
            return True
        for header, payload in self._reader.feed(data):
            self._heard = time.monotonic()
            self._serve(Request(header, payload))
        return bool(data)

    def _serve(self, request: Request) -> None:
        try:
            if request.op == "ack":
                for stream in self._streams:
                    if stream.request == request.id:
                        stream.acknowledged = request.integer("bytes")
                return
            if request.op == "stop":
                self._stop(request.id)
                return
            self._begin(request)
        except RequestError as error:
            self._answer(request.id, {"error": error.header()})
        except OSError as error:
            self._answer(request.id, {"error": refusal(error).header()})

    def _begin(self, request: Request) -> None:
        if request.op == "hello":
            if self._host is not None:
                raise RequestError("request", "this agent was introduced before")
            self._host = Host(request, self._nonce, self._umask)
            if self._importer is not None:
                self._importer.remember(os.path.join(self._host.folder, "code"))
            self._answer(request.id, {"ok": True, **self._host.introduce()})
            return
        if request.op == "ping":
            self._answer(request.id, {"ok": True, "now": time.time()})
            return
        if self._host is None:
            raise RequestError("request", "the first request must be 'hello'")
        from gpulayer.remote.operations import OPERATIONS

        if request.op not in OPERATIONS:
            raise RequestError("request", f"{request.op!r} is no operation of this agent")
        result = OPERATIONS[request.op](self._host, request)
        if isinstance(result, dict):
            self._answer(request.id, {"ok": True, **result})
        elif isinstance(result, Task):
            self._tasks[result.pipe] = (result, FrameReader(self._nonce))
            self._poll.register(result.pipe, select.POLLIN)
        else:
            self._streams.append(result)
            if result.watch is not None:
                self._watches = result.watch.watches

    def _stop(self, request: int) -> None:
        for stream in [stream for stream in self._streams if stream.request == request]:
            self._drop(stream)
            self._answer(request, {"ok": True, "stopped": True})
        for pipe in [pipe for pipe, (task, _) in self._tasks.items() if task.request == request and not task.bound]:
            self._forget(pipe)  # a launch that is held sees that nobody waits for it; what has begun goes on
            self._answer(request, {"ok": True, "stopped": True})

    def _answer(self, request: int, header: dict[str, Any], payload: bytes = b"") -> None:
        try:
            frame = encode(self._nonce, {"id": request, **header}, payload)
        except ProtocolError as error:
            answer = RequestError("too_large", f"the answer does not fit into a frame: {error}", fix="ask for less")
            frame = encode(self._nonce, {"id": request, "error": answer.header()})
        self._control.append(frame)

    def _write(self) -> bool:
        """Send some frames, until nothing is left to send or the pipe is full; say whether it is full."""
        for _ in range(_BURST):
            if not self._writing and not self._next_frame():
                return False
            while self._writing:
                try:
                    count = os.write(self._sink, self._writing)
                except BlockingIOError:
                    return True
                self._writing = self._writing[count:]
        return False

    def _next_frame(self) -> bool:
        """Choose what is sent next: answers first, then one frame of each stream in turn."""
        if not self._control:
            now = time.monotonic()
            for _ in range(len(self._streams)):
                stream = self._streams[0]
                self._streams.rotate(-1)
                if stream.open and stream.due <= now and self._advance(stream):
                    break
        if not self._control:
            return False
        self._writing = memoryview(self._control.popleft())
        return True

    def _advance(self, stream: Stream) -> bool:
        """Let a stream make its next frame; say whether it made one."""
        try:
            made = next(stream.frames)
        except StopIteration as end:
            self._drop(stream)
            self._answer(stream.request, {"ok": True, **end.value})
            return True
        except (RequestError, OSError) as error:
            self._drop(stream)
            answer = error if isinstance(error, RequestError) else refusal(error)
            self._answer(stream.request, {"error": answer.header()})
            return True
        if isinstance(made, float):
            stream.due = time.monotonic() + made
            return False
        header, payload = made
        stream.sent += len(payload)
        self._answer(stream.request, header, payload)
        return True

    def _listen(self, blocked: bool) -> None:
        """Let poll say what the watches tell, while there is a stream that could send something for it."""
        if self._watches is not None:
            wanted = not blocked and time.monotonic() >= self._deaf and any(stream.open for stream in self._streams)
            self._poll.register(self._watches, select.POLLIN if wanted else 0)

    def _wake(self) -> None:
        """Look soon at the streams whose watches tell of something."""
        told = set() if self._watches is None else self._watches.told()
        self._deaf = time.monotonic() + _GATHERING
        for stream in self._streams:
            if stream.watch in told:
                stream.due = min(stream.due, self._deaf)

    def _drop(self, stream: Stream) -> None:
        self._streams.remove(stream)
        stream.close()

    def _collect(self, pipe: int) -> None:
        """Pass on what a child answers, frame by frame; one that ends before its last frame is answered for."""
        task, reader = self._tasks[pipe]
        data = os.read(pipe, _READ)
        with contextlib.suppress(ProtocolError):
            for header, payload in reader.feed(data):
                self._control.append(encode(self._nonce, header, payload))
                if "ok" in header or "error" in header:
                    self._forget(pipe)
                    return
        if data:
            return
        self._forget(pipe)
        try:
            self._answer(task.request, {"ok": True, **task.otherwise()})
        except RequestError as error:
            self._answer(task.request, {"error": error.header()})

    def _forget(self, pipe: int) -> None:
        task, _ = self._tasks.pop(pipe)
        self._poll.unregister(pipe)
        os.close(pipe)
        task.reap()

    def _end(self) -> None:
        if self._host is not None:
            self._host.close()
            if self._importer is not None:
                self._importer.keep()
        for task, _ in self._tasks.values():
            if task.bound:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(task.pid, signal.SIGTERM)


def main(nonce: str, importer: MemoryImporter | None = None, *, source: int = 0, sink: int = 1) -> None:
    """Serve the connection on the descriptors `source` and `sink` until it ends."""
    gc.set_threshold(_ALLOCATIONS)
    Agent(nonce, source, sink, importer).run()
    gc.freeze()  # Python's end then does not take apart, at some cost, what the process's end frees anyway
