"""Commands after the fact, from any terminal: status, logs, cancel, fetch."""

from __future__ import annotations

import argparse
import asyncio
from datetime import UTC, datetime
from typing import Any

from gpulayer.cli.endings import run_words
from gpulayer.cli.live import Live, follow
from gpulayer.cli.places import hosts_in_use, load_project
from gpulayer.cli.planning import connect_options
from gpulayer.cli.screen import Screen
from gpulayer.cli.show_hosts import show_holders
from gpulayer.cli.tables import table
from gpulayer.errors import ExitCode, UsageError
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.placement.plan import HostView, KnownRun
from gpulayer.remote import states
from gpulayer.run import api
from gpulayer.run.afterwards import status_document
from gpulayer.spec.inventory import Inventory


def status(args: argparse.Namespace, screen: Screen) -> int:
    """Show the runs of this project; 4 where a host does not say how its run stands."""
    options = connect_options(args, screen)
    if args.hosts:
        return _status_of_hosts(hosts_in_use(args, screen), options, screen)
    project = load_project(args, screen)
    name = project.jobs.project
    runs = asyncio.run(api.status(project.folder, project.inventory, project=name, options=options))
    if screen.machine:
        screen.data(status_document(runs))
    elif runs:
        heads = ("JOB", "STATUS", "HOST", "STARTED (UTC)", "TOOK", "TRY")
        screen.show(table(heads, (_row(run) for run in runs), numbers=("TOOK", "TRY")))
    else:
        screen.say(f"{name}: nothing was applied yet")
    return ExitCode.UNREACHABLE if any(run.status == states.UNKNOWN for run in runs) else ExitCode.OK


def logs(args: argparse.Namespace, screen: Screen) -> int:
    """Print a job's output from its beginning; with --follow until it ends. The job's own end is no exit code here."""
    if args.raw and (screen.machine or screen.terminal):
        raise UsageError(
            "--raw is for a file or a pipe: raw bytes can move a terminal", fix="redirect it, or drop --raw"
        )
    project = load_project(args, screen)
    stream = api.logs(
        project.folder,
        project.inventory,
        args.job,
        follow=args.follow,
        rank=args.rank,
        project=project.jobs.project,
        options=connect_options(args, screen),
    )
    live = Live(screen, raw=args.raw)
    return asyncio.run(follow(stream, live, screen, jobs=args.follow))


def cancel(args: argparse.Namespace, screen: Screen) -> int:
    """Cancel jobs and wait until their ends are verified; 0 where they are, 4 where a host does not answer."""
    if bool(args.jobs) == args.all:
        raise UsageError("either name the jobs to cancel, or cancel all", fix="gpulayer cancel JOB, or --all")
    project = load_project(args, screen)
    stream = api.cancel(
        project.folder,
        project.inventory,
        None if args.all else args.jobs,
        project=project.jobs.project,
        options=connect_options(args, screen),
    )
    return asyncio.run(follow(stream, Live(screen, cancelling=True), screen))


def fetch(args: argparse.Namespace, screen: Screen) -> int:
    """Bring a job's outputs here, as they are now."""
    project = load_project(args, screen)
    stream = api.fetch(
        project.folder,
        project.inventory,
        args.job,
        project=project.jobs.project,
        options=connect_options(args, screen),
    )
    return asyncio.run(follow(stream, Live(screen), screen, jobs=False))


def _status_of_hosts(inventory: Inventory, options: ConnectOptions, screen: Screen) -> int:
    views = asyncio.run(api.holders(inventory, options=options))
    if screen.machine:
        screen.data({"schema": "gpulayer.holders/1", "hosts": [_holders(view) for view in views]})
    else:
        show_holders(screen, views)
    return ExitCode.OK if all(view.reached for view in views) else ExitCode.UNREACHABLE


def _holders(view: HostView) -> dict[str, Any]:
    devices = view.facts.devices if view.facts else ()
    return {
        "name": view.host.name,
        "reached": view.reached,
        "error": view.error,
        "devices": [
            {"id": device.id, "accelerator": device.accelerator, "holder": view.holders.get(device.id)}
            for device in devices
        ],
        "slots_held": view.slots_held if view.reached else None,
    }


def _row(run: KnownRun) -> tuple[str, ...]:
    return (
        run.job,
        run_words(run),
        " + ".join(part.host for part in run.parts if part.host) or "-",
        run.started_at[:19].replace("T", " ") if run.started_at else "-",
        _took(run),
        str(run.attempt),
    )


def _took(run: KnownRun) -> str:
    """Return how long a run took, or has taken so far by this machine's clock."""
    if run.started_at is None:
        return "-"
    over = run.status in states.FINAL
    if over and run.ended_at is None:
        return "unknown"
    end = datetime.fromisoformat(run.ended_at) if over and run.ended_at else datetime.now(UTC)
    seconds = (end - datetime.fromisoformat(run.started_at)).total_seconds()
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{max(seconds, 0):.1f}s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
