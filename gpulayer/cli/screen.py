"""Where a command's words go: data to stdout, everything else to stderr, all of it through the sink of `terminal`."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from gpulayer.cli.masks import Masks
from gpulayer.cli.terminal import escape
from gpulayer.errors import DeclinedError, GpulayerError, InvalidDocumentError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

_BREAK = re.compile(r"\n(?! {2})")
STYLES = {"bad": "31", "good": "32", "warn": "33", "name": "36", "faint": "2", "strong": "1"}


class Screen:
    """Stdout and stderr of one command. `machine` means that stdout holds JSON alone.

    A reader that closes stdout (`| head`) has seen enough: what follows is dropped, and `closed` says so.
    """

    def __init__(self, *, machine: bool, color: bool) -> None:
        """`color` False turns colour off; it is off too where NO_COLOR is set or stdout is no terminal."""
        self.machine = machine
        self.closed = False
        self.terminal = sys.stdout.isatty()
        wanted = color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._colored = {stream: wanted and stream.isatty() for stream in (sys.stdout, sys.stderr)}
        for stream in self._colored:
            # What the terminal's encoding lacks is shown as an escape instead of failing.
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        self._bytes: BinaryIO = sys.stdout.buffer
        self.masks = Masks()
        self._passing = False  # a passing line stands on the terminal

    def hide(self, values: Iterable[str]) -> None:
        """Show these values, of secrets, nowhere from now on."""
        self.masks = Masks(values)

    def say(self, text: str = "", style: str | None = None) -> None:
        """Print lines for people; with --json there are none."""
        if not self.machine:
            self._write(sys.stdout, text, style)

    def note(self, text: str, style: str | None = None) -> None:
        """Print what is no data: warnings, progress, hints."""
        self._write(sys.stderr, text, style)

    def passing(self, text: str) -> None:
        """Show progress on one line that the next words replace; without a terminal there is none."""
        if sys.stderr.isatty():
            self._wipe()
            self._write(sys.stderr, text[: shutil.get_terminal_size().columns - 1], "faint", end="")
            self._passing = True

    def error(self, error: GpulayerError) -> None:
        """Print an error once: what and where, then the fix; each problem of a document by itself."""
        for text in error.problems if isinstance(error, InvalidDocumentError) else (error,):
            self.note(str(text), "bad")

    def data(self, value: Any) -> None:  # noqa: ANN401 - any JSON value
        """Print one JSON value on one line of stdout; all but printable ASCII is escaped in it."""
        self.lines(
            json.dumps(self.masks.value(value) if self.masks else value, allow_nan=False)
            .replace("\x7f", "\\u007f")
            .encode()
            + b"\n"
        )

    def lines(self, data: bytes) -> None:
        """Print bytes that the sink has made harmless already (`terminal.JobOutput`)."""
        if data and not self.closed:
            self._wipe()
            try:
                sys.stdout.flush()
                self._bytes.write(data)
                self._bytes.flush()
            except OSError as error:
                self._lost(error)

    def show(self, table: Table) -> None:
        """Print a table whose cells went through `terminal.escape_line`; in a pipe no line of it is broken."""
        from rich.console import Console

        if self.machine:
            return
        console = Console(
            width=shutil.get_terminal_size().columns if self.terminal else 2**16,
            force_terminal=self._colored[sys.stdout],
            no_color=not self._colored[sys.stdout],
            highlight=False,
        )
        with console.capture() as captured:
            console.print(table)
        shown = self.masks.text(captured.get())
        self.lines("".join(f"{line.rstrip()}\n" for line in shown.splitlines()).encode())

    def wrapped(self, text: str, indent: str) -> str:
        """Return a line broken to fit the terminal, all but its first part indented; as it is in a pipe."""
        width = shutil.get_terminal_size().columns
        if not self.terminal or len(text) < width:
            return text
        return "\n".join(
            textwrap.wrap(text, width - 1, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        )

    def paint(self, text: str, style: str) -> str:
        """Return our own text in a style where stdout shows colours."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self._colored[sys.stdout] else text

    def ask(self, question: str, *, flag: str) -> None:
        """Return when the answer is yes; DeclinedError when it is no; UsageError, naming `flag`, without a terminal."""
        if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(f"{question} There is no terminal to ask at", fix=f"answer yes with {flag}")
        self._write(sys.stderr, f"{question} [y/N] ", "strong", end="")
        if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
            raise DeclinedError("nothing was done: the answer was no", fix=f"{flag} asks nothing")

    def _write(self, stream: TextIO, text: str, style: str | None, *, end: str = "\n") -> None:
        self._wipe()
        # Our own further lines are indented; what others wrote (a file's name, an error) begins no line.
        text = _BREAK.sub(r"\\n", escape(self.masks.text(text)))
        if style and self._colored[stream]:
            text = f"\x1b[{STYLES[style]}m{text}\x1b[0m"
        try:
            stream.write(text + end)
            stream.flush()
        except OSError as error:
            self._lost(error)

    def _wipe(self) -> None:
        if self._passing:
            self._passing = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _lost(self, error: OSError) -> None:
        """Go on without a stream whose reader has gone (or whose terminal hung up), other than by filling a disk."""
        if not isinstance(error, BrokenPipeError) and error.errno != 5:  # noqa: PLR2004 - EIO: the terminal is gone
            raise GpulayerError(f"the output cannot be written: {error.strerror}", fix="free space, or redirect it")
        self.closed = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
