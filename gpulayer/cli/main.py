"""The command line: read what is asked, do it, and turn every end into an exit code and at most one message."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from gpulayer.cli import arguments

# Each command is a function of this name in a module that is imported only when the command runs.
COMMANDS = {
    "init": "beginning",
    "validate": "offline",
    "schema": "offline",
    "matrix": "offline",
    "probe": "planning",
    "plan": "planning",
    "why": "planning",
    "apply": "running",
    "attach": "running",
    "status": "afterwards",
    "logs": "afterwards",
    "cancel": "afterwards",
    "fetch": "afterwards",
    "doctor": "diagnosis",
    "gc": "housekeeping",
}


_ALLOCATIONS = 100_000
"""Objects between two searches for garbage. What a command makes mostly lives to its end: to search as often as is the
default takes a tenth of its start."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (`errors.ExitCode`); wrong usage raises argparse's SystemExit(2)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - to the program's end
    try:
        args = arguments.parse(argv)
        if args.version:
            from gpulayer import __version__

            sys.stdout.write(f"gpulayer {__version__}\n")
            return 0
        if args.command is None:
            args.parser.print_help()
            return 0
        return _run(args.command, args)
    finally:
        _flush()


def _flush() -> None:
    """Send what is buffered; a reader that has gone is no fault, and must not become one at the program's end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(name: str, args: argparse.Namespace) -> int:
    from gpulayer.cli.screen import Screen
    from gpulayer.errors import ExitCode, GpulayerError

    gc.set_threshold(_ALLOCATIONS)
    atexit.register(gc.freeze)  # Python's end would take apart, in 50 ms, what the process's end frees anyway
    screen = Screen(machine=args.json, color=not args.no_color)
    try:
        command: Callable[..., int] = getattr(importlib.import_module(f"gpulayer.cli.{COMMANDS[name]}"), name)
        return int(command(args, screen))
    except GpulayerError as error:
        screen.error(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        screen.note("interrupted")
        return int(ExitCode.INTERRUPTED)
    except Exception as error:
        if os.environ.get("GPULAYER_DEBUG"):
            raise
        screen.note(
            f"gpulayer {name} failed in a way that it should not: {type(error).__name__}: {error}\n"
            "  fix: run it again with GPULAYER_DEBUG=1 in the environment, and report what that shows",
            "bad",
        )
        return int(ExitCode.INTERNAL)
