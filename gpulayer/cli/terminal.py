r"""The one sink for text that others wrote: hosts, jobs, file names. What it lets through can move no terminal.

Control characters, bidirectional and invisible characters are shown as escapes (`\x1b`, `\u202e`), never obeyed, and
no line of a job can pass for one of ours or for a command to a CI system.
"""

from __future__ import annotations

import re

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
_MARKER = re.compile(r"##(?=[A-Za-z]*\[)|^(?=[ \t]*::)", re.MULTILINE)
# What loses nothing by this deletion needs no closer look; a search by a character class takes seven times as long.
_SUSPECT = bytes({*range(256)} - {*range(0x20, 0x7F)} - {*b"\n\t"})

# Numbers with their units are what changes between two states of one progress bar; its words stay.
_NUMBER = re.compile(
    r"[\d?][\d.,:?]*\s?(?:[kKMGTPE]i?)?(?:bytes|[bB]|it|ns|us|ms|s|sec|m|min|h|d|x)?(?:/(?:s|sec|it|min|h))?(?![^\W\d_])|\W|_"
)


def escape(text: str) -> str:
    """Return `text` with everything visible that a terminal or a CI system would obey; newlines and tabs stay."""
    return _MARKER.sub(_defused, _UNSEEN.sub(_visible, text))


def escape_line(text: str) -> str:
    """Return `text` as `escape` does, and on one line: for names, cells of tables and messages of others."""
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as surrogateescape keeps it  # noqa: PLR2004
        return f"\\x{code - 0xDC00:02x}"
    if match[0] == "\r":
        return "\\r"
    if code <= 0xFF:  # noqa: PLR2004
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004


def _defused(match: re.Match[str]) -> str:
    return "#\\x23" if match[0] else "\\"


class JobOutput:
    r"""Turns the byte stream of one job into prefixed, harmless, whole lines.

    Lines that are plain text take a path without a Python step per line. A carriage return ends a state of its line: a
    state is replaced by the next where only numbers and punctuation differ (a progress bar); else both are
    shown, the first one with a visible `\r`, so that nothing that a job printed is hidden by what it printed later.
    """

    def __init__(self, prefix: str, masks: Masks) -> None:
        """`prefix` is our own text; what `masks` hide is not shown."""
        self._prefix = prefix.encode()
        self._masks = masks
        self._rest = b""  # the line that has not ended
        self._cut = 0  # bytes of it that are left out
        self._seen = b""  # what `latest` returned last

    def feed(self, chunk: bytes) -> bytes:
        """Take any piece of the stream; return the lines that it ended, prefixed."""
        shown = b""
        if self._cut:
            end = chunk.find(b"\n")
            if end < 0:
                self._cut += len(chunk)
                return b""
            shown = self._show(self._rest + _cut_note(self._cut + end))
            self._rest, self._cut, chunk = b"", 0, chunk[end + 1 :]
        end = chunk.rfind(b"\n")
        if end >= 0:
            shown += self._show(_shorten(self._rest + chunk[:end]))
            self._rest = chunk[end + 1 :]
        else:
            self._rest += chunk
        if len(self._rest) > LINE_LIMIT:
            shown += self._bound()
        return shown

    def latest(self) -> bytes:
        """Return the latest state of the line that has not ended, if it is new: for a look at progress bars."""
        if self._rest in (b"", self._seen):
            return b""
        self._seen = self._rest
        state = next((part for part in reversed(self._rest.split(b"\r")) if part.strip()), b"")
        return self._show(state) if state else b""

    def end(self) -> bytes:
        """Return what is left of a last line without a newline."""
        rest = self._rest + (_cut_note(self._cut) if self._cut else b"")
        self._rest, self._cut = b"", 0
        return self._show(rest) if rest else b""

    def _show(self, body: bytes) -> bytes:
        """Prefix every line of `body`, which does not end with a newline."""
        body = self._masks.data(body)
        if len(body.translate(None, _SUSPECT)) != len(body) or b"##" in body:
            body = escape(_fold(body).decode(errors="backslashreplace")).encode()
        return b"%b%b\n" % (self._prefix, body.replace(b"\n", b"\n" + self._prefix))

    def _bound(self) -> bytes:
        """Keep an endless line small: its past states are shown or replaced, and an over-long one is cut."""
        begun = self._rest.rpartition(b"\r")[2]
        *past, self._rest = _states(self._rest)
        if not begun.strip():  # the last state has ended, and the next one has not begun
            self._rest += b"\r" + begun
        if len(self._rest) > LINE_LIMIT:
            kept = _whole(self._rest)
            self._rest, self._cut = kept, len(self._rest) - len(kept)
        return self._show(b"\n".join(_shorten(state) + b"\\r" for state in past)) if past else b""


def _shorten(body: bytes) -> bytes:
    """Cut lines that are too long to display; a stride of half the limit finds out quickly that there is none."""
    half = LINE_LIMIT // 2
    if all(body.find(b"\n", at, at + half) >= 0 for at in range(0, len(body) - half, half)):
        return body
    return b"\n".join(
        line if len(line) <= LINE_LIMIT else (kept := _whole(line)) + _cut_note(len(line) - len(kept))
        for line in body.split(b"\n")
    )


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
    """Return the states of a line that are to be seen, at least one; blank ones only wipe a bar away."""
    states: list[bytes] = []
    before = None
    for state in line.split(b"\r"):
        if not state.strip():
            continue
        words = _NUMBER.sub("", state[:LINE_LIMIT].decode(errors="backslashreplace"))
        if words == before:
            states.pop()
        states.append(state)
        before = words
    return states or [b""]
