"""Commands that make it so and follow: apply, attach."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from gpulayer.cli.live import HINTS, Live, follow
from gpulayer.cli.places import documents_of, is_plan, last_plan, load_hosts, load_jobs_for, load_plan, load_project
from gpulayer.cli.planning import connect_options, save_plan
from gpulayer.cli.screen import Screen
from gpulayer.cli.show_plan import RETRY, show_plan
from gpulayer.errors import ExitCode, UsageError
from gpulayer.fleet.session import Fleet
from gpulayer.placement.plan import Action, Plan
from gpulayer.run import api
from gpulayer.run.apply import STARTS
from gpulayer.run.launch import check_secrets
from gpulayer.run.work import exit_code_of_plan
from gpulayer.spec.inventory import Inventory
from gpulayer.spec.jobs import JobSet


def apply(args: argparse.Namespace, screen: Screen) -> int:
    """Carry out a plan: the last one, the named one, or a new one for named jobs, which is shown and asked about."""
    anew = args.fresh or args.retry_failed
    path = Path(args.plan) if args.plan else last_plan()
    if args.plan and not is_plan(path):
        inventory = load_hosts(args, screen)
        return _plan_and_apply(args, screen, load_jobs_for(path, inventory, screen), inventory)
    plan = load_plan(path)
    jobs, inventory = documents_of(plan, args, screen)
    if not anew:
        code = asyncio.run(_apply(args, screen, plan, jobs, inventory))
        if any(job.action is Action.FAILED for job in plan.jobs):
            screen.note(RETRY)
        return code
    if args.plan:
        raise UsageError(
            f"{path} is a plan, and --fresh and --retry-failed make a new one", fix="name the jobs file instead"
        )
    return _plan_and_apply(args, screen, jobs, inventory)


def attach(args: argparse.Namespace, screen: Screen) -> int:
    """Follow what runs of this project, and go on with its queue."""
    project = load_project(args, screen)
    stream = api.attach(project.jobs, project.inventory, project.plan, options=connect_options(args, screen))
    return asyncio.run(follow(stream, Live(screen), screen))


def _plan_and_apply(args: argparse.Namespace, screen: Screen, jobs: JobSet, inventory: Inventory) -> int:
    check_secrets(jobs.jobs.values())  # before anything connects
    result = asyncio.run(_plan_first(args, screen, jobs, inventory))
    if isinstance(result, int):
        return result
    screen.ask("Carry this out?", flag="--yes")
    return asyncio.run(_apply(args, screen, result, jobs, inventory))


async def _plan_first(args: argparse.Namespace, screen: Screen, jobs: JobSet, inventory: Inventory) -> int | Plan:
    """Plan, show, and carry out over the same connections; return the plan where a person must agree first.

    Hosts are not kept waiting for that answer: it may take longer than their patience.
    """
    async with Fleet(inventory, connect_options(args, screen)) as fleet:
        plan = await api.plan(jobs, inventory, fresh=args.fresh, retry_failed=args.retry_failed, fleet=fleet)
        save_plan(plan, jobs)
        show_plan(screen, plan)
        code = exit_code_of_plan(plan)
        if code != ExitCode.OK and not args.partial:
            screen.note("nothing was started; --partial runs what can be placed", "warn")
            return code
        if not args.yes and any(job.action in STARTS for job in plan.jobs):
            return plan
        return await _apply(args, screen, plan, jobs, inventory, fleet=fleet)


async def _apply(
    args: argparse.Namespace,
    screen: Screen,
    plan: Plan,
    jobs: JobSet,
    inventory: Inventory,
    *,
    fleet: Fleet | None = None,
) -> int:
    stream = api.apply(
        plan,
        jobs,
        inventory,
        partial=args.partial,
        detach=args.detach,
        options=connect_options(args, screen),
        fleet=fleet,
    )
    code = await follow(stream, Live(screen), screen)
    if args.detach and code == ExitCode.OK:
        screen.note(HINTS)
    return code
