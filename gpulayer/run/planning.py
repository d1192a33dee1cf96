"""From documents to a plan: the shipped trees and the hosts' answers are gathered at once, then it is decided."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulayer.errors import UsageError
from gpulayer.fleet.session import Fleet
from gpulayer.fleet.tree import Tree, tree_of
from gpulayer.placement.plan import HostView, KnownRun, Plan
from gpulayer.placement.scheduler import make_plan
from gpulayer.run.events import now
from gpulayer.run.paths import Paths
from gpulayer.run.store import Store
from gpulayer.run.survey import Question, survey
from gpulayer.spec.identity import asked_python, job_key
from gpulayer.spec.inventory import Inventory
from gpulayer.spec.jobs import JobSet, JobSpec

FRAMEWORKS: Final = ("torch", "mlx", "executorch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What the jobs ship, and the keys that follow from it, by job name. `trees` are the distinct trees by hash."""

    hashes: Mapping[str, str | None]
    keys: Mapping[str, str]
    trees: Mapping[str, Tree]


async def code_of(jobs: JobSet, inventory: Inventory) -> Code:
    """Read each distinct workdir once, and compute the jobs' keys. UsageError where one cannot be shipped."""
    paths = Paths(jobs.folder)
    apart = [path.resolve() for path in (jobs.path, inventory.path) if path is not None]
    folders = sorted({job.workdir for job in jobs.jobs.values() if job.workdir is not None})
    if folders:
        paths.create()  # the hashes of shipped files are kept there
    trees = dict(
        zip(
            folders,
            await asyncio.gather(*(asyncio.to_thread(tree_of, folder, apart, paths.hashes) for folder in folders)),
            strict=True,
        )
    )
    hashes = {name: trees[job.workdir].hash if job.workdir else None for name, job in jobs.jobs.items()}
    return Code(
        hashes=hashes,
        keys={name: job_key(job, jobs.project, hashes[name]) for name, job in jobs.jobs.items()},
        trees={tree.hash: tree for tree in trees.values()},
    )


def documents_of(jobs: JobSet, inventory: Inventory) -> tuple[tuple[str, str], ...]:
    """Return (path, sha256) of the documents that a plan stands on, as they are now; what is gone is left out."""
    return tuple(
        (str(path.resolve()), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in (jobs.path, inventory.path)
        if path is not None and path.is_file()
    )


def question_for(jobs: JobSet, *, fresh: bool = False) -> Question:
    """Return what planning these jobs asks of a host: in each interpreter only the frameworks that they demand of it.

    A framework is judged in the interpreter that the job will run on: its own where it names one.
    """
    demanding: dict[str | None, list[JobSpec]] = {None: []}
    for job in jobs.jobs.values():
        demanding.setdefault(asked_python(job), []).append(job)
    return Question(
        project=jobs.project,
        frameworks=frameworks_of(demanding[None]),
        pythons={python: frameworks_of(its) for python, its in demanding.items() if python is not None},
        fresh=fresh,
    )


def frameworks_of(jobs: Iterable[JobSpec]) -> tuple[str, ...]:
    """Return the frameworks that jobs demand, by `framework` or by a capability."""
    words = {job.framework.value for job in jobs if job.framework is not None}
    words |= {capability.partition(".")[0] for job in jobs for capability in job.resources.capabilities}
    return tuple(word for word in FRAMEWORKS if word in words)


async def make(
    jobs: JobSet, inventory: Inventory, fleet: Fleet, *, fresh: bool = False, retry_failed: bool = False
) -> Plan:
    """Plan against what the hosts say now, and what the local history knows of runs that they do not tell of."""
    asking = asyncio.create_task(survey(fleet, inventory.hosts.values(), question_for(jobs, fresh=fresh)))
    try:
        code = await code_of(jobs, inventory)
        views: Sequence[HostView] = [answer.view for answer in await asking]
    finally:
        asking.cancel()
    history: Sequence[KnownRun] = ()
    if Paths(jobs.folder).database.exists():
        with Store.open(jobs.folder) as store:
            history = store.runs(jobs.project)
    return decide(jobs, inventory, views, code, history, retry_failed=retry_failed)


def decide(
    jobs: JobSet,
    inventory: Inventory,
    views: Sequence[HostView],
    code: Code,
    history: Sequence[KnownRun] = (),
    *,
    retry_failed: bool = False,
    applicable: bool = True,
) -> Plan:
    """Return the plan for jobs whose code and hosts are known, and with them the runs that are known here."""
    return make_plan(
        jobs,
        views,
        keys=code.keys,
        trees=code.hashes,
        documents=documents_of(jobs, inventory),
        now=now(),
        history=history,
        retry_failed=retry_failed,
        applicable=applicable,
    )


def changed_code(plan: Plan, jobs: JobSet, code: Code) -> list[str]:
    """Say in words which jobs are no longer what the plan decided about."""
    planned = {job.job: job for job in plan.jobs}
    changes = [f"job {name}: is new" for name in jobs.jobs if name not in planned]
    for name, job in planned.items():
        if name not in jobs.jobs:
            changes.append(f"job {name}: is gone")
        elif job.tree != code.hashes[name]:
            changes.append(f"job {name}: its code was changed")
        elif job.key != code.keys[name] or job.nodes != jobs.jobs[name].nodes:
            changes.append(f"job {name}: was changed")
    return changes


def check_applicable(plan: Plan, jobs: JobSet) -> None:
    """UsageError where a plan may not be carried out, or not with these jobs."""
    if not plan.applicable:
        raise UsageError(
            "this plan was made against a saved fleet and cannot be applied", fix="plan anew without --facts"
        )
    if plan.project != jobs.project:
        raise UsageError(
            f"the plan is of project {plan.project!r}, the jobs are of {jobs.project!r}", fix="plan these jobs anew"
        )
