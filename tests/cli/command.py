"""The command line as a person runs it: a real process, in a folder and a home of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """Runs `python -m gpulayer` in `folder`, with `home` as HOME and nothing of the tester's own settings."""

    folder: Path
    home: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            **self.extra,
        }

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "gpulayer", *words], cwd=self.folder, env=self.environment, **options
        )

    def __call__(self, *words: str, stdin: int = subprocess.DEVNULL) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "gpulayer", *words],
            cwd=self.folder,
            env=self.environment,
            stdin=stdin,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return Result(done.returncode, done.stdout.decode(), done.stderr.decode())

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
