r"""The one sink for text that others wrote: hosts, jobs, file names. What it lets through can move no terminal.

Control characters, bidirectional and invisible characters are shown as escapes (`\x1b`, `\u202e`), never obeyed, and
no line of a job can pass for one of ours or for a command to a CI system.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gpulayer.cli.masks import Masks

LINE_LIMIT = 16 * 1024
"""Bytes of one line that are displayed; the log on disk has them all."""

# C0 without newline and tab, DEL, C1; soft hyphen; Arabic letter mark; Hangul and Mongolian fillers and selectors;
# zero-width, line separators and bidi controls; surrogates (undecodable bytes); variation selectors (without the two
# that choose between text and emoji); BOM; annotations; musical formatting; the plane of tags.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\udfff\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# Azure, TeamCity and GitHub read `##word[` anywhere in a line, GitHub and GitLab `::word` at its start.
_MARKER = re.compile(r"##(?=[A-Za-z]*\[)")
_COMMAND = re.compile(r"^(?=[ \t]*::)", re.MULTILINE)
# What loses nothing by this deletion needs no closer look; a search by a character class takes seven times as long.
_SUSPECT = bytes({*range(256)} - {*range(0x20, 0x7F)} - {*b"\n\t"})

# Numbers with their units are what changes between two states of one progress bar; its words stay.
_NUMBER = re.compile(
    r"[\d?][\d.,:?]*\s?(?:[kKMGTPE]i?)?(?:bytes|[bB]|it|ns|us|ms|s|sec|m|min|h|d|x)?(?:/(?:s|sec|it|min|h))?(?![^\W\d_])|\W|_"
)


def escape(text: str) -> str:
    """Return `text` with everything visible that a terminal or a CI system would obey; newlines and tabs stay."""
    return _COMMAND.sub(r"\\", _seen(text))


def escape_line(text: str) -> str:
    """Return `text` as `escape` does, and on one line: for names, cells of tables and messages of others."""
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")


def _seen(text: str) -> str:
    """Return `text` as `escape` does, for lines that begin with a word of ours: none is a command by its beginning."""
    return _MARKER.sub(r"#\\x23", _UNSEEN.sub(_visible, text))


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as surrogateescape keeps it  # noqa: PLR2004
        return f"\\x{code - 0xDC00:02x}"
    if match[0] == "\r":
        return "\\r"
    if code <= 0xFF:  # noqa: PLR2004
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004


class JobOutput:
    r"""Turns the byte stream of one job into prefixed, harmless, whole lines: the same ones however it is cut.

    Lines that are plain text take a path without a Python step per line. A carriage return ends a state of its line: a
    state is replaced by the next where only numbers and punctuation differ (a progress bar); else both are
    shown, the first one with a visible `\r`, so that nothing that a job printed is hidden by what it printed later.
    """

    def __init__(self, prefix: str, masks: Masks) -> None:
        """`prefix` is our own text; what `masks` hide is not shown."""
        self._prefix = prefix.encode()
        self._masks = masks
        self._rest = b""  # the line that has not ended, as long as it is short
        self._long: _LongLine | None = None  # the line that has not ended and is long
        self._seen = b""  # what `latest` returned last

    def feed(self, chunk: bytes) -> bytes:
        """Take any piece of the stream; return the lines that it ended, prefixed."""
        shown = b""
        if self._long is not None:
            end = chunk.find(b"\n")
            shown = self._settled(self._long.feed(chunk if end < 0 else chunk[:end]))
            if end < 0:
                return shown
            shown += self._show(b"\\r\n".join(self._long.end()))
            self._long, chunk = None, chunk[end + 1 :]
        end = chunk.rfind(b"\n")
        if end >= 0:
            shown += self._show(self._shorten(self._rest + chunk[:end]))
            self._rest = chunk[end + 1 :]
        else:
            self._rest += chunk
        if len(self._rest) > LINE_LIMIT:
            self._long = _LongLine(self._masks.data)
            shown += self._settled(self._long.feed(self._rest))
            self._rest = b""
        return shown

    def latest(self) -> bytes:
        """Return the latest state of the line that has not ended, if it is new: for a look at progress bars."""
        rest = self._rest if self._long is None else self._long.latest()
        if rest in (b"", self._seen):
            return b""
        self._seen = rest
        state = next((part for part in reversed(rest.split(b"\r")) if part.strip()), b"")
        return self._show(state) if state else b""

    def end(self) -> bytes:
        """Return what is left of a last line without a newline."""
        rest = self._rest if self._long is None else b"\\r\n".join(self._long.end())
        self._rest, self._long = b"", None
        return self._show(rest) if rest else b""

    def _settled(self, states: list[bytes]) -> bytes:
        """Show states that no later one replaces."""
        return self._show(b"\n".join(state + b"\\r" for state in states)) if states else b""

    def _show(self, body: bytes) -> bytes:
        """Prefix every line of `body`, which does not end with a newline."""
        body = self._masks.data(body)
        if len(body.translate(None, _SUSPECT)) != len(body) or b"##" in body:
            body = _seen(_fold(body).decode(errors="backslashreplace")).encode()
        return b"%b%b\n" % (self._prefix, body.replace(b"\n", b"\n" + self._prefix))

    def _shorten(self, body: bytes) -> bytes:
        """Cut lines that are too long to display; a stride of half the limit finds out quickly that there is none."""
        half = LINE_LIMIT // 2
        if all(body.find(b"\n", at, at + half) >= 0 for at in range(0, len(body) - half, half)):
            return body
        return b"\n".join(
            line if len(line) <= LINE_LIMIT else b"\\r\n".join(self._states(line)) for line in body.split(b"\n")
        )

    def _states(self, line: bytes) -> list[bytes]:
        states = _LongLine(self._masks.data)
        return [*states.feed(line), *states.end()]


class _LongLine:
    """A line of any length in little memory: the state that the next one may replace, and the one that has begun."""

    def __init__(self, mask: Callable[[bytes], bytes]) -> None:
        self._mask = mask
        self._last: tuple[bytes, str] | None = None  # the last state that ended, as it is shown, and its words
        self._begun = b""  # the current state, and the first byte that is not displayed
        self._size = 0  # bytes that the current state has

    def feed(self, piece: bytes) -> list[bytes]:
        """Take a piece without a newline; return the states that are settled by it."""
        settled = []
        for nth, part in enumerate(piece.split(b"\r")):
            if nth:
                settled += self._end_state()
            self._size += len(part)
            self._begun += part[: LINE_LIMIT + 1 - len(self._begun)]
        return settled

    def latest(self) -> bytes:
        """Return the newest state that is to be seen."""
        return self._begun[:LINE_LIMIT] if self._begun.strip() or self._last is None else self._last[0]

    def end(self) -> list[bytes]:
        """Return the states that are left, at least one."""
        settled = self._end_state()
        return [*settled, self._last[0] if self._last else b""]

    def _end_state(self) -> list[bytes]:
        """End the current state; return the one before it unless this one replaces it."""
        begun, size = self._begun, self._size
        self._begun, self._size = b"", 0
        if not begun.strip():  # a blank one only wipes a bar away
            return []
        whole = begun if size <= LINE_LIMIT else _whole(begun)
        shown = self._mask(whole)
        before, words = self._last, _words(shown)
        self._last = (shown if size <= LINE_LIMIT else shown + _cut_note(size - len(whole)), words)
        return [] if before is None or before[1] == words else [before[0]]


def _whole(line: bytes) -> bytes:
    """Return what is displayed of a line that is too long: whole UTF-8 characters."""
    end = LINE_LIMIT
    while end > LINE_LIMIT - 4 and line[end] & 0xC0 == 0x80:  # noqa: PLR2004 - continuation bytes of UTF-8
        end -= 1
    return line[:end]


def _cut_note(count: int) -> bytes:
    return b" [%d bytes more, in the log]" % count


def _fold(body: bytes) -> bytes:
    """Fold the states of each line; a carriage return before a newline is a line's end."""
    body = body.removesuffix(b"\r").replace(b"\r\n", b"\n")
    if b"\r" not in body:
        return body
    return b"\n".join(b"\\r\n".join(_states(line)) if b"\r" in line else line for line in body.split(b"\n"))


def _states(line: bytes) -> list[bytes]:
    """Return the states of a short line that are to be seen, at least one; blank ones only wipe a bar away."""
    states: list[bytes] = []
    before = None
    for state in line.split(b"\r"):
        if not state.strip():
            continue
        words = _words(state)
        if words == before:
            states.pop()
        states.append(state)
        before = words
    return states or [b""]


def _words(state: bytes) -> str:
    """Return what two states of one progress bar have in common."""
    return _NUMBER.sub("", state.decode(errors="backslashreplace"))
