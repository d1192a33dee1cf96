"""Values of secrets, hidden in all that a command shows: the one place that does it.

As far as possible: who encodes, splits or shortens a value gets it past. Files hold what jobs have written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SHORTEST = 4
"""Characters below which hiding a value would garble the rest and hide little."""

HIDDEN = "***"

WORDS = frozenset(
    ("schema", "event", "at", "created_at", "project", "job", "run", "host", "name", "key", "shape", "status", "action")
)
"""Keys of JSON documents whose texts are our own words, or names of documents and numbers made of them.

A secret that is a word, such as `prod`, must not change them."""


class Masks:
    """Hides values, and each line of those that have several."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        """Values that are too short are left out."""
        lines = {line for value in values for line in (value, *value.splitlines()) if len(line) >= SHORTEST}
        # The longest first, so that no value which contains another leaves a rest of itself.
        self._texts = sorted(lines, key=len, reverse=True)
        self._bytes = [line.encode(errors="surrogateescape") for line in self._texts]
        self._lines = [line for line in self._bytes if b"\n" not in line and b"\r" not in line]

    def __bool__(self) -> bool:
        """Whether there is anything to hide."""
        return bool(self._texts)

    def text(self, text: str) -> str:
        """Return a text without the values."""
        for value in self._texts:
            text = text.replace(value, HIDDEN)
        return text

    def data(self, data: bytes) -> bytes:
        """Return whole lines of bytes without the values, whatever other lines are beside them."""
        for value in self._lines:
            data = data.replace(value, HIDDEN.encode())
        return data

    def value(self, value: Any) -> Any:  # noqa: ANN401  # any JSON value
        """Return a JSON value without the values in its texts; words that programs go by stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {
                key: item if key in WORDS and isinstance(item, str) else self.value(item) for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def stream(self) -> MaskedStream:
        """Return what hides the values in a stream of bytes."""
        return MaskedStream(self._bytes)


class MaskedStream:
    """Hides values in bytes that come in pieces. What is shown in their place is as long: offsets stay true."""

    def __init__(self, values: list[bytes]) -> None:
        """`values` are the longest first."""
        self._values = values
        self.held = b""
        """What was fed and may be the beginning of a value."""

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown by now."""
        data = self.held + data
        begun = min((self._begin(data, value) for value in self._values), default=len(data))
        self.held = data[begun:]
        return self._hidden(data)[:begun]

    def end(self) -> bytes:
        """Return the rest: nothing more will come."""
        data, self.held = self.held, b""
        return self._hidden(data)

    def _hidden(self, data: bytes) -> bytes:
        for value in self._values:
            data = data.replace(value, b"*" * len(value))
        return data

    @staticmethod
    def _begin(data: bytes, value: bytes) -> int:
        """Return where a value begins that goes on behind the end of `data`, the length of `data` where none does."""
        at = data.find(value[:1], max(0, len(data) - len(value) + 1))
        while at >= 0 and not value.startswith(data[at:]):
            at = data.find(value[:1], at + 1)
        return at if at >= 0 else len(data)
