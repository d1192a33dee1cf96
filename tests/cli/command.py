"""The command line as a person runs it, in a folder and a home of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from gpulayer.cli.main import main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Stdout as one document; anything else on it is an error."""
        return json.loads(self.out)

    def events(self) -> list[dict[str, Any]]:
        """Stdout as one object a line."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass
class Commander:
    """Runs `gpulayer` in `folder`, with `home` as HOME and nothing of the tester's own settings.

    A call stays within this process; `start` and `on_terminal` are for what only a process of its own can show.
    """

    folder: Path
    home: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            # As on the other hosts: a version manager's `python3` is a script, and each agent would pay for it.
            "PATH": f"/usr/local/bin:/usr/bin:/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            **self.extra,
        }

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "gpulayer", *words], cwd=self.folder, env=self.environment, **options
        )

    def __call__(self, *words: str) -> Result:
        """Run a command to its end within this process: most take less than an interpreter needs to start."""
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as out,
            tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as err,
            open(os.devnull, encoding="utf-8") as nothing,  # noqa: PTH123 - a device
        ):
            with (
                contextlib.chdir(self.folder),
                mock.patch.dict(os.environ, self.environment, clear=True),
                mock.patch.multiple(sys, stdin=nothing, stdout=out, stderr=err),
            ):
                try:
                    code = main(words)
                except SystemExit as end:  # argparse's, of wrong usage and of --help
                    code = int(end.code or 0)
            for stream in (out, err):
                stream.seek(0)
            return Result(code, out.read(), err.read())

    def on_terminal(self, *words: str, typed: str = "", columns: int = 80) -> Result:
        """Run a command on a terminal of its own; all that it shows is `out`."""
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = self.start(*words, stdin=its, stdout=its, stderr=its, start_new_session=True)
        os.close(its)
        os.write(ours, typed.encode())
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the command has ended
            while data := os.read(ours, 65536):
                shown += data
        os.close(ours)
        return Result(process.wait(timeout=60), shown.decode().replace("\r\n", "\n"), "")

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path
