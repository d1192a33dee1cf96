"""Commands that ask the hosts and start nothing, and what they have answered: probe, plan, why."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from gpulayer.cli.places import (
    inventory_path,
    jobs_path,
    last_plan,
    load_hosts,
    load_jobs_for,
    load_plan,
    read_json,
)
from gpulayer.cli.screen import Screen
from gpulayer.cli.show_hosts import show_hosts
from gpulayer.cli.show_plan import show_plan, show_why
from gpulayer.errors import ExitCode, UsageError
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.placement.document import to_json
from gpulayer.placement.plan import Plan
from gpulayer.run import api
from gpulayer.run.paths import Paths, write_private
from gpulayer.run.planning import FRAMEWORKS
from gpulayer.run.survey import BadFleetError, fleet_document
from gpulayer.run.work import exit_code_of_plan
from gpulayer.spec.inventory import load_inventory
from gpulayer.spec.jobs import JobSet
from gpulayer.spec.schemas import suggestion

WHY_SCHEMA = "gpulayer.why/1"


def connect_options(args: argparse.Namespace, screen: Screen) -> ConnectOptions:
    """Return how connections are made: unknown host keys are refused unless they were asked to be accepted."""

    def accept(host: str, fingerprint: str) -> None:
        screen.note(f"{host}: its host key was not known; accepted and written to known_hosts: {fingerprint}", "warn")

    return ConnectOptions(accept_new=accept if args.accept_new_host_key else None)


def probe(args: argparse.Namespace, screen: Screen) -> int:
    """Ask the hosts what they are; 4 where one of them was not reached."""
    answers = asyncio.run(
        api.probe(
            load_hosts(args, screen),
            args.hosts or None,
            frameworks=args.frameworks or FRAMEWORKS,
            python=args.python,
            fresh=args.fresh,
            deep=args.deep,
            options=connect_options(args, screen),
        )
    )
    if screen.machine:
        screen.data(fleet_document(answers))
    else:
        show_hosts(screen, [answer.view for answer in answers])
    return ExitCode.OK if all(answer.view.reached for answer in answers) else ExitCode.UNREACHABLE


def plan(args: argparse.Namespace, screen: Screen) -> int:
    """Decide what would happen, show it and save it; 3 or 4 where a job cannot be placed."""
    path = jobs_path(args.jobs)
    if args.facts:
        hosts = inventory_path(args)
        jobs = load_jobs_for(path, None, screen)
        known = load_inventory(hosts) if hosts else None
        saved = read_json(Path(args.facts))
        try:
            made = asyncio.run(api.plan_against(jobs, known, saved, retry_failed=args.retry_failed))
        except BadFleetError as error:
            raise UsageError(f"{args.facts}: {error.message}", fix=error.fix) from error
    else:
        inventory = load_hosts(args, screen)
        jobs = load_jobs_for(path, inventory, screen)
        options = connect_options(args, screen)
        made = asyncio.run(api.plan(jobs, inventory, fresh=args.fresh, retry_failed=args.retry_failed, options=options))
    if made.applicable or args.output:
        save_plan(made, jobs, args.output)
    if screen.machine:
        screen.data(to_json(made))
    else:
        show_plan(screen, made, everything=args.all)
    return exit_code_of_plan(made)


def why(args: argparse.Namespace, screen: Screen) -> int:
    """Show of one job of the last plan where it goes, which hosts it fits, and each reason of the others."""
    made = load_plan(last_plan())
    job = next((job for job in made.jobs if job.job == args.job), None)
    if job is None:
        nearest = suggestion(args.job, [job.job for job in made.jobs])
        raise UsageError(
            f"the last plan of {made.project} has no job {args.job!r}{nearest}",
            fix="name a job of that plan, or plan anew (gpulayer plan)",
        )
    if screen.machine:
        document = to_json(made)
        entry = document["jobs"][made.jobs.index(job)]
        screen.data({"schema": WHY_SCHEMA, "created_at": made.created_at, **entry, **document["shapes"][job.shape]})
    else:
        show_why(screen, made, job)
    return ExitCode.OK


def save_plan(made: Plan, jobs: JobSet, output: str | None = None) -> None:
    """Save a plan as a file, by default as the last plan of its project."""
    paths = Paths(jobs.folder)
    if output is None:
        paths.create()
    write_private(Path(output) if output else paths.plan, json.dumps(to_json(made)).encode() + b"\n")
