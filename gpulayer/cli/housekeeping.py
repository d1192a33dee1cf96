"""The command that removes what old runs have left on the hosts."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from gpulayer.cli.places import load_hosts
from gpulayer.cli.planning import connect_options
from gpulayer.cli.screen import Screen
from gpulayer.cli.tables import many, size, table
from gpulayer.errors import ExitCode
from gpulayer.run import api
from gpulayer.run.garbage import Garbage, gc_document

SHOWN = 20  # old runs of a host that people see


def gc(args: argparse.Namespace, screen: Screen) -> int:
    """Show what would be removed, and remove it where that is wanted; 4 where a host was not reached."""
    inventory, options = load_hosts(args, screen), connect_options(args, screen)

    def collect(*, dry: bool) -> list[Garbage]:
        return asyncio.run(
            api.gc(inventory, args.hosts or None, older_than=args.older_than, dry=dry, options=options)
        )  # fmt: skip

    answers = collect(dry=not args.yes)
    removed = args.yes
    if not args.yes and not screen.machine:
        _show(screen, answers, removed=False)
        if any(answer.count or answer.code_count for answer in answers):
            if screen.terminal:
                screen.ask("Remove this?", flag="--yes")
                answers, removed = collect(dry=False), True
            else:
                screen.note("nothing was removed; --yes removes it")
    if screen.machine:
        screen.data(gc_document(answers, removed=removed))
    elif removed:
        _show(screen, answers, removed=True)
    return ExitCode.UNREACHABLE if any(answer.error for answer in answers) else ExitCode.OK


def _show(screen: Screen, answers: Sequence[Garbage], *, removed: bool) -> None:
    rows = [
        (answer.host, run.project, run.job, run.status, (run.ended_at or "-")[:16].replace("T", " "), size(run.bytes))
        for answer in answers
        for run in answer.runs[:SHOWN]
    ]
    if rows and not removed:
        screen.show(table(("HOST", "PROJECT", "JOB", "STATUS", "ENDED (UTC)", "ON DISK"), rows, numbers=("ON DISK",)))
    for answer in answers:
        if answer.error:
            screen.say(answer.error, "bad")
            continue
        screen.say(f"{answer.host}: {_summary(answer, 'removed' if removed else 'to be removed')}")
        if answer.code_busy:
            screen.note(f"{answer.host}: code was left alone: a job is being launched there", "warn")


def _summary(answer: Garbage, verb: str) -> str:
    """Return what goes from a host and what stays there, without what there is none of."""
    goes = [f"{many(answer.count, 'run')} ({size(answer.bytes)})"] if answer.count else []
    if answer.code_count:
        goes.append(f"{many(answer.code_count, 'file')} of code that no run needs ({size(answer.code_bytes)})")
    kept = ((answer.live, "live"), (answer.young, "too young"))
    stays = [f"{many(count, 'run')} {why}" for count, why in kept if count]
    return f"{verb}: {', '.join(goes) or 'nothing'}" + (f"; stays: {', '.join(stays)}" if stays else "")
