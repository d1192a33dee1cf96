"""What would run where, and why not elsewhere, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpulayer.cli.screen import Screen
from gpulayer.cli.show_hosts import show_unreached
from gpulayer.cli.tables import folded, table
from gpulayer.placement.explain import sentence
from gpulayer.placement.plan import Action, Code, GroupedRefusal, Kind, Plan, PlannedHost, PlannedJob, ShapeVerdict

RETRY = "what failed before runs again only with --retry-failed"
MOST_ROWS = 30
MOST_REASONS = 8
MOST_HOSTS = 3
COUNTED = {
    Action.RUN: "to run",
    Action.QUEUE: "to wait",
    Action.FOLLOW: "running",
    Action.UP_TO_DATE: "up to date",
    Action.RETRY: "to run again",
    Action.FAILED: "failed before",
    Action.REFUSE: "refused",
}
WAYS = {Kind.BUSY: "wait", Kind.HOST: "fix the host", Kind.JOB: "change the job", Kind.NEVER: "never"}
CHANGED = ", changed"
STYLES = {Kind.BUSY: "warn", Kind.HOST: "warn", Kind.JOB: "warn", Kind.NEVER: "faint"}


def show_plan(screen: Screen, plan: Plan, *, everything: bool = False) -> None:
    """Print a plan: each job's action and place, then every refusal, the nearest to yes first.

    Long lists are folded with a count unless `everything` is asked for.
    """
    counts = ", ".join(f"{plan.summary[action]} {words}" for action, words in COUNTED.items() if plan.summary[action])
    screen.say(f"{plan.project}: {counts or 'no jobs'}", "strong")
    placed = [job for job in plan.jobs if job.action is not Action.REFUSE]
    rows = list(_rows(plan, placed, one_each=everything or len(placed) <= MOST_ROWS))
    if rows:
        shown = rows if everything else rows[:MOST_ROWS]
        screen.show(table(("JOB", "ACTION", "WHERE"), shown))
        _say_folded(screen, len(rows) - len(shown), "rows")
    _show_refused(screen, plan, everything=everything)
    for host in plan.hosts:
        for doubt in host.doubts:
            what = f"the health of {doubt.device} is {doubt.health}, and jobs may go there all the same"
            screen.say(f"warning: {host.name}: {what}", "warn")
    _show_silent(screen, [host for host in plan.hosts if not host.reached], everything=everything)
    earlier = [(job.job, run) for job in plan.jobs for run in job.still_running]
    shown_earlier = earlier if everything else earlier[:MOST_REASONS]
    for name, run in shown_earlier:
        screen.say(f"warning: {name} was changed, and its earlier run goes on (gpulayer cancel {run} ends it)", "warn")
    _say_folded(screen, len(earlier) - len(shown_earlier), "earlier runs that go on")
    if any(job.action is Action.FAILED for job in plan.jobs):
        screen.say(RETRY)
    if not plan.applicable:
        screen.say("made from saved facts: it shows what would happen and cannot be applied")


def show_why(screen: Screen, plan: Plan, job: PlannedJob) -> None:
    """Print all that a plan says of one job: where it goes, which hosts it fits, and every reason of every other."""
    verdict = plan.shapes[job.shape]
    screen.say(f"{job.job}: {_action(job)}" + ("" if (place := _where(plan, job)) == "-" else f" {place}"), "strong")
    screen.say(screen.wrapped(f"  fits: {', '.join(verdict.fits) or 'no host'}", " " * 6))
    _show_reasons(screen, verdict, job.nodes, everything=True)
    named = {host for entry in verdict.refusals if entry.refusal.code is Code.UNREACHABLE for host in entry.hosts}
    _show_silent(screen, [host for host in plan.hosts if host.name in named], everything=True)
    screen.say(f"as planned at {plan.created_at}; `gpulayer plan` asks the hosts again", "faint")


def _rows(plan: Plan, jobs: Sequence[PlannedJob], *, one_each: bool) -> Iterator[tuple[str, str, str]]:
    if one_each:
        yield from ((job.job, _action(job), _where(plan, job)) for job in jobs)
        return
    groups: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        place = f"{_hosts(job)} {job.accelerator}" if job.placements else _where(plan, job)
        groups.setdefault((_words(job), place), []).append(job.job)
    for (action, place), names in groups.items():
        yield folded(names, 3), action if len(names) == 1 else f"{action} ({len(names)} jobs)", place


def _action(job: PlannedJob) -> str:
    return f"queue {job.position}{CHANGED if job.changed else ''}" if job.position else _words(job)


def _words(job: PlannedJob) -> str:
    """Return what is done with a job, without its place in the queue; a new declaration of its name says so."""
    return job.action.replace("_", " ") + (CHANGED if job.changed and job.action in {Action.RUN, Action.QUEUE} else "")


def _where(plan: Plan, job: PlannedJob) -> str:
    if len(job.placements) > 1:
        each = len(job.placements[0].devices)
        return f"{_hosts(job)} {job.accelerator}{f' ({each} each)' if each else ''}"
    if job.placements:
        devices = ", ".join(_short(device) for device in job.placements[0].devices)
        return f"{_hosts(job)} {job.accelerator}{f' ({devices})' if devices else ''}"
    if job.action is Action.QUEUE:
        several = f"{job.nodes} of " if job.nodes and job.nodes > 1 else ""
        return f"when free: {several}{folded(plan.shapes[job.shape].fits, 4)} ({job.accelerator})"
    return "-"


def _hosts(job: PlannedJob) -> str:
    """Return where a job runs: a gang's hosts, how many where they are many, in the order of its nodes."""
    names = [placement.host for placement in job.placements]
    return " + ".join(names) if len(names) <= MOST_HOSTS else f"{len(names)} hosts: {folded(names, MOST_HOSTS)}"


def _short(device: str) -> str:
    return device if len(device) <= 16 else f"{device[:12]}…"  # noqa: PLR2004 - UUIDs differ early


def _show_refused(screen: Screen, plan: Plan, *, everything: bool) -> None:
    shapes: dict[str, list[PlannedJob]] = {}
    for job in plan.jobs:
        if job.action is Action.REFUSE:
            shapes.setdefault(job.shape, []).append(job)
    shown = list(shapes.items()) if everything else list(shapes.items())[:MOST_ROWS]
    for shape, jobs in shown:
        screen.say()
        screen.say(f"refused: {folded([job.job for job in jobs])}", "bad")
        _show_reasons(screen, plan.shapes[shape], jobs[0].nodes, everything=everything)
    _say_folded(screen, len(shapes) - len(shown), "kinds of jobs that are refused")


def _show_reasons(screen: Screen, verdict: ShapeVerdict, nodes: int | None, *, everything: bool) -> None:
    """Print why hosts are refused; of a gang of which no host fits, none of the reasons says how many it needs."""
    counted = any(entry.refusal.code is Code.DISTRIBUTED for entry in verdict.refusals)
    if nodes is not None and nodes > 1 and not verdict.fits and not counted:
        screen.say(f"  needs {nodes} hosts at once, and none fits: {nodes} more are needed", "warn")
    reasons = sorted(verdict.refusals, key=lambda entry: (entry.refusal.kind, -len(entry.hosts)))
    few = reasons if everything else reasons[:MOST_REASONS]
    for entry in few:
        for line in _reason(entry):
            screen.say(screen.wrapped(line, " " * 6), STYLES[entry.refusal.kind])
    _say_folded(screen, len(reasons) - len(few), "reasons")


def _show_silent(screen: Screen, silent: Sequence[PlannedHost], *, everything: bool) -> None:
    shown = silent if everything else silent[:MOST_REASONS]
    for host in shown:
        show_unreached(screen, host.name, host.error, host.fix, style="warn")
    _say_folded(screen, len(silent) - len(shown), "hosts that were not reached")


def _reason(entry: GroupedRefusal) -> Iterator[str]:
    refusal = entry.refusal
    where = folded(entry.hosts) + (f", {_short(refusal.device)}" if refusal.device else "")
    unreached = refusal.code is Code.UNREACHABLE  # why, and what to do, is said once a host
    text = "the host cannot be reached, see below" if unreached else sentence(refusal)
    yield f"  {where}: {text} [{refusal.code}: {WAYS[refusal.kind]}]"
    if refusal.fix and not unreached:
        yield f"    fix: {refusal.fix}"


def _say_folded(screen: Screen, count: int, what: str) -> None:
    if count > 0:
        screen.say(f"  and {count} more {what} (--all shows them)", "faint")
