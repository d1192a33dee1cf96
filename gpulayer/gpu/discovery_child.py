"""The frame of every child of the probe: it gives one child a way to answer, and bounds it. SHIPPED.

Runs as `python -c FRAME CHILD [WORD...] FD`: this source, then that of the child, whose `main(report, *words)` is
called. What was written before a crash or the time limit stays, so a child says each thing as soon as it knows it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

TYPE_CHECKING = False  # typing is slow to import, and every probe pays for it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ORPHAN_LIMIT_S = 400  # the end of a child that hangs after its own parent was killed


class Report:
    """Writes JSON lines: `[key, value]` or `[key, null, "Class: text"]` for each thing, and `["done", true]` last."""

    def __init__(self, descriptor: int) -> None:
        """Write to `descriptor`, which nothing else writes to: a framework may print what it likes."""
        self._descriptor = descriptor

    def say(self, key: str, *value: object) -> None:
        """Write one line."""
        os.write(self._descriptor, json.dumps([key, *value]).encode() + b"\n")

    def ask(self, key: str, question: Callable[[], Any]) -> Any:
        """Say the answer and return it; an exception of whatever kind is a line of its own, and None."""
        try:
            value = question()
        except BaseException as error:  # noqa: BLE001  # a framework may well raise SystemExit
            self.say(key, None, _text(error))
            return None
        self.say(key, value)
        return value

    def load(self, package: str, question: Callable[[], Any]) -> Any:
        """Return the answer to a question that imports `package`, which may be missing, crash, hang or exit.

        Where it fails, None after a line `missing` (the package itself is not there) or `import`.
        """
        try:
            return question()
        except BaseException as error:  # noqa: BLE001
            missing = isinstance(error, ModuleNotFoundError) and error.name == package
            self.say("missing" if missing else "import", None, _text(error))
            return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def main(source: str, words: list[str], descriptor: int) -> None:
    """Run a child's source and end this process without what frameworks do at their end: it may hang."""
    signal.alarm(_ORPHAN_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here leaves a note, no gigabytes
    child: dict[str, Any] = {"__name__": "child"}
    exec(compile(source, "<child>", "exec", dont_inherit=True), child)  # noqa: S102  # a module that was sent along
    report = Report(descriptor)
    child["main"](report, *words)
    report.say("done", True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:-1], int(sys.argv[-1]))
