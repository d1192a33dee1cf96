"""The command that checks the whole way to each host."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from gpulayer.cli.places import load_hosts
from gpulayer.cli.planning import connect_options
from gpulayer.cli.screen import Screen
from gpulayer.errors import ExitCode, Stage
from gpulayer.gpu.facts import Note
from gpulayer.placement.plan import HostView
from gpulayer.run import api

GRAVE = ("error", "warning")  # severities of notes that tell of something to mend


def doctor(args: argparse.Namespace, screen: Screen) -> int:
    """Go the way to each host up to its leases, and show the step that fails; 4 where one does.

    The last step is what a launch needs: the agent answers, its folders can be written, its leases can be locked.
    """
    views = asyncio.run(
        api.holders(
            load_hosts(args, screen), hosts=args.hosts or None, fresh=True, options=connect_options(args, screen)
        )
    )
    if screen.machine:
        screen.data({"schema": "gpulayer.doctor/1", "hosts": [_document(view) for view in views]})
    for view in views:
        _show(screen, view)
    return ExitCode.OK if all(view.reached for view in views) else ExitCode.UNREACHABLE


def _grave(view: HostView) -> list[Note]:
    return [note for note in view.facts.notes if note.severity in GRAVE] if view.facts else []


def _show(screen: Screen, view: HostView) -> None:
    name, facts = view.host.name, view.facts
    if not view.reached:
        screen.say(screen.wrapped(f"{name}: {view.stage or 'answer'}: FAILED: {view.error}", "  "), "bad")
        screen.say(screen.wrapped(f"  fix: {view.fix}", "    "))
        return
    screen.say(f"{name}: ok: {', '.join(Stage)}", "faint")
    for note in _grave(view):
        screen.say(screen.wrapped(f"{name}: {note.severity}: {note.message} [{note.code}]", "  "), "warn")
    python = f" (Python {facts.python_version}, {facts.python})" if facts else ""
    screen.say(f"{name}: takes jobs{' again once it is not drained' if view.host.drain else ''}{python}", "good")


def _document(view: HostView) -> dict[str, Any]:
    return {
        "name": view.host.name,
        "reached": view.reached,
        "stage": view.stage,
        "error": view.error,
        "fix": view.fix,
        "notes": [{"severity": note.severity, "code": note.code, "message": note.message} for note in _grave(view)],
    }
