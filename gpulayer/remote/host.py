"""What an agent knows of its host and of what it is asked: `Host`, `Request`.

And what it answers that takes longer: a `Task` that a child works on, and a `Stream` of frames.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
import time

from gpulayer.remote import clock, folders
from gpulayer.remote.wire import PROTOCOL, WINDOW, RequestError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, NoReturn, Union

    from gpulayer.remote.files import Blobs
    from gpulayer.remote.watch import Watch, Watches

    # A frame, or for how many seconds there is none; in the end the fields of the answer.
    Frames = Generator[Union[tuple[dict[str, Any], bytes], float], None, dict[str, Any]]


class Request:
    """A frame from the controller, with typed access to its fields. Wrong fields raise RequestError `request`."""

    def __init__(self, header: dict[str, Any], payload: bytes) -> None:
        """`header` is any JSON object; a request without an id or op is answered under id 0."""
        self.header = header
        self.payload = payload
        self.id: int = header["id"] if isinstance(header.get("id"), int) else 0
        self.op: str = header["op"] if isinstance(header.get("op"), str) else ""

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.header.get(name)
        return value if isinstance(value, str) else self._wrong(name, "a text")

    def text_or_none(self, name: str) -> str | None:
        """Return a text, or None where it is null or missing."""
        return None if self.header.get(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        """Return a truth value; one that is missing is false."""
        value = self.header.get(name, False)
        return value if isinstance(value, bool) else self._wrong(name, "true or false")

    def integer(self, name: str) -> int:
        """Return a whole number that is not negative."""
        value = self.header.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        return self._wrong(name, "a whole number")

    def number_or_none(self, name: str) -> float | None:
        """Return a number that is not negative, or None where it is null or missing."""
        value = self.header.get(name)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            return value
        return self._wrong(name, "a number")

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        value = self.header.get(name)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        return self._wrong(name, "a list of texts")

    def sized(self, name: str) -> list[tuple[str, int]]:
        """Return a list of pairs of a text and a size."""
        value = self.header.get(name)
        if isinstance(value, list):
            with contextlib.suppress(TypeError, ValueError):
                pairs = [(text, size) for text, size in value]
                if all(isinstance(text, str) and isinstance(size, int) and size >= 0 for text, size in pairs):
                    return pairs
        return self._wrong(name, "a list of [text, size]")

    def tail(self) -> dict[str, Any] | None:
        """Return what a follower says that it has, or None."""
        value = self.header.get("tail")
        if value is None or (
            isinstance(value, dict) and isinstance(value.get("bytes"), int) and isinstance(value.get("sha256"), str)
        ):
            return value
        return self._wrong("tail", "an object with 'bytes' and 'sha256'")

    def _wrong(self, name: str, wanted: str) -> NoReturn:
        raise RequestError("request", f"{self.op}: '{name}' must be {wanted}, not {self.header.get(name)!r}"[:500])


class Host:
    """This host as it was introduced: its folders and names."""

    def __init__(self, request: Request, nonce: str, umask: int) -> None:
        """Choose the folders. `umask` is what jobs get. Raises RequestError where no folder can be used."""
        if request.integer("protocol") != PROTOCOL:
            raise RequestError(
                "protocol",
                f"this agent speaks protocol {PROTOCOL}, the controller {request.integer('protocol')}",
                fix="use one version of GPUlayer",
            )
        self.name = request.text("host")
        self.nonce = nonce
        self.umask = umask
        self.folder = folders.state_folder(request.text_or_none("state_dir"))
        self._blobs: Blobs | None = None
        self._watches: Watches | None = None
        self.lease_folder = folders.lease_folder(request.text_or_none("lease_dir"))

    @property
    def blobs(self) -> Blobs:
        """The shipped files on this host."""
        if self._blobs is None:
            from gpulayer.remote.files import Blobs

            self._blobs = Blobs(self.folder)
        return self._blobs

    def watch(self, folder: str) -> Watch | None:
        """Return a watch of a folder; None where none is to be had, and who waits has to look for himself."""
        if self._watches is None:
            from gpulayer.remote.watch import Watches

            try:
                self._watches = Watches()
            except (ImportError, AttributeError, OSError):
                return None
        return self._watches.watch(folder)

    def close(self) -> None:
        """Free and remove what is of no use once the connection has ended."""
        if self._blobs is not None:
            self._blobs.drop_parts()
        if self._watches is not None:
            self._watches.close()

    def run_ids(self) -> list[str]:
        """Return the names of all runs that were ever claimed here, of those that were removed too."""
        found: set[str] = set()
        with contextlib.suppress(FileNotFoundError):
            found.update(name for name in os.listdir(os.path.join(self.folder, "runs")) if not name.startswith("."))
        with contextlib.suppress(FileNotFoundError):
            done = os.listdir(os.path.join(self.folder, "done"))
            found.update(name[: -len(".json")] for name in done if name.endswith(".json"))
        return list(found)

    def introduce(self) -> dict[str, Any]:
        """Return the answer to `hello`."""
        user = str(os.geteuid())
        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(os.geteuid()).pw_name
        return {
            "python": sys.executable,
            "python_version": "{}.{}.{}".format(*sys.version_info[:3]),
            "pid": os.getpid(),
            "boot_id": clock.boot_id(),
            "host_id": folders.host_identity(self.folder),
            "user": user,
            "home": os.path.expanduser("~"),
            "state_root": self.folder,
            "lease_dir": self.lease_folder,
            "now": time.time(),
        }


class Task:
    """A child process that works on an answer: it writes whole frames into `pipe`, the last of them an answer's."""

    def __init__(
        self, request: Request, pid: int, pipe: int, *, bound: bool, otherwise: Callable[[], dict[str, Any]]
    ) -> None:
        """`bound`: a child (and its process group) that is of no use once the connection has ended.

        `otherwise` gives the answer of a child that died before it wrote its last frame; it may raise RequestError.
        """
        self.request = request.id
        self.pid = pid
        self.pipe = pipe
        self.bound = bound
        self.otherwise = otherwise

    def reap(self) -> None:
        """Take note of the child's end; it has closed its pipe already."""
        if self.bound:
            os.waitpid(self.pid, 0)


class Stream:
    """An answer of many frames: how much of it was sent and acknowledged, and when there may be more."""

    __slots__ = ("acknowledged", "due", "frames", "request", "sent", "watch")

    def __init__(self, request: Request, frames: Frames, watch: Watch | None = None) -> None:
        """`watch`, which is closed with the stream, tells when a frame may be due at once."""
        self.request = request.id
        self.frames = frames
        self.watch = watch
        self.sent = 0
        self.acknowledged = 0
        self.due = 0.0

    @property
    def open(self) -> bool:
        """Whether the receiver can take more."""
        return self.sent - self.acknowledged < WINDOW

    def close(self) -> None:
        """Free what it holds."""
        self.frames.close()
        if self.watch is not None:
            self.watch.close()
