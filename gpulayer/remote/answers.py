"""How a process of ours that the agent has started, and that may outlive it, answers the controller."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Answer:
    """Where a launch answers: frames, the last of which ends it. The agent may be gone: what has begun goes on."""

    def __init__(self, pipe: int, encode: Callable[[dict[str, Any]], bytes]) -> None:
        """`pipe` is written to, and closed with the last frame."""
        self._pipe = pipe
        self._encode = encode

    def fileno(self) -> int:
        """Return the pipe; poll says of it, whatever it is asked, once nobody reads it any more."""
        return self._pipe

    def send(self, header: dict[str, Any]) -> None:
        """Send one frame."""
        frame = memoryview(self._encode(header))
        with contextlib.suppress(BrokenPipeError):
            while frame:
                frame = frame[os.write(self._pipe, frame) :]

    def end(self, header: dict[str, Any]) -> None:
        """Send the last one."""
        self.send(header)
        os.close(self._pipe)
