"""Which files a command means: the inventory, the jobs, the project's folder and its last plan."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpulayer.cli.screen import Screen
from gpulayer.errors import InvalidDocumentError, Problem, StateError, UsageError
from gpulayer.placement.document import from_json
from gpulayer.placement.plan import Plan
from gpulayer.remote.wire import strict_json
from gpulayer.run import paths
from gpulayer.run.paths import Paths, find_folder
from gpulayer.spec import documents, files
from gpulayer.spec.entries import Fault, located, refuse
from gpulayer.spec.inventory import Inventory, load_inventory, local_inventory
from gpulayer.spec.jobs import JobSet, check_hosts, load_jobs, parse_jobs, slug

JOBS = Path(paths.JOBS)
MAX_JSON = 256 * 2**20
"""Bytes of a saved plan or fleet; 1,000 hosts with all that a probe says are a tenth of it."""
PLAN_ANEW = "the plan cannot be used; make it again with `gpulayer plan`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What was applied in a folder, as its last plan tells it. `jobs` are empty where the jobs file does not hold."""

    folder: Path
    jobs: JobSet
    inventory: Inventory
    plan: Plan | None


def inventory_path(args: argparse.Namespace) -> Path | None:
    """Return the inventory in use (contract: flag, environment, this folder, the user's configuration), or None."""
    if path := _named_inventory(args):
        return path
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser())
    return next(
        (path for path in (Path("inventory.yaml"), config / "gpulayer" / "inventory.yaml") if path.exists()), None
    )


def load_hosts(args: argparse.Namespace, screen: Screen) -> Inventory:
    """Return the inventory in use; where there is none, this machine alone, and a line says so."""
    return _inventory(inventory_path(args), screen)


def jobs_path(named: str | None) -> Path:
    """Return the jobs file that was named, else ./jobs.yaml; UsageError where there is none."""
    if named is None and not JOBS.exists():
        raise UsageError(f"there is no {JOBS} in {Path.cwd()}", fix="name the jobs file")
    return Path(named) if named else JOBS


def read_jobs(path: Path, screen: Screen) -> JobSet:
    """Return the jobs in a file, whose secrets are shown nowhere from now on; InvalidDocumentError."""
    return _hidden(load_jobs(path), screen)


def load_jobs_for(path: Path, inventory: Inventory | None, screen: Screen) -> JobSet:
    """Return the jobs in a file alike, with folders that are there and hosts of this inventory, where one is given."""
    document = documents.load(path)
    jobs = _hidden(parse_jobs(document), screen)
    if problems := missing(jobs, inventory, document):
        raise refuse(problems)
    return jobs


def missing(jobs: JobSet, inventory: Inventory | None, document: documents.Document) -> list[Problem]:
    """Return a problem for each host (held against `inventory`) and folder that jobs name and that is not there."""
    problems = check_hosts(jobs, inventory, document) if inventory else []
    gone = {folder for folder in {job.workdir for job in jobs.jobs.values()} if folder and not folder.is_dir()}
    for name, job in jobs.jobs.items():
        if job.workdir in gone:
            problems += located(document, "jobs", name, [Fault(("workdir",), f"there is no folder {job.workdir}")])
    return problems


def read_json(path: Path) -> object:
    """Return the JSON document in a file; UsageError where there is none."""
    try:
        return strict_json(files.read(path, MAX_JSON))
    except files.UnusableFileError as error:
        raise UsageError(f"{path}: {error}", fix="name a file that can be read") from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON document: {error}", fix="save it anew") from error


def is_plan(path: Path) -> bool:
    """Tell whether a file holds a saved plan: those are JSON objects with a schema; else it is taken for jobs."""
    try:
        if not files.read(path, MAX_JSON).lstrip().startswith(b"{"):
            return False
        document = read_json(path)
    except (files.UnusableFileError, UsageError):
        return False
    return isinstance(document, dict) and "schema" in document


def last_plan() -> Path:
    """Return where the last plan of the project here is; UsageError where there is none."""
    path = Paths(find_folder(Path())).plan
    if not path.exists():
        raise UsageError(f"there is no plan in {path.parent}", fix="make one (gpulayer plan), or name the jobs file")
    return path


def load_plan(path: Path) -> Plan:
    """Return a saved plan; StateError where it does not hold."""
    try:
        return from_json(read_json(path))
    except (UsageError, StateError) as error:
        where = "" if str(path) in error.message else f"{path}: "
        raise StateError(f"{where}{error.message}", fix=PLAN_ANEW) from error


def load_project(args: argparse.Namespace, screen: Screen) -> Project:
    """Return the project of the nearest folder upward: that of its last plan, else of its jobs file."""
    folder = find_folder(Path())
    path = Paths(folder).plan
    if not path.exists():
        file = folder / JOBS
        project = read_jobs(file, screen) if file.exists() else JobSet(project=slug(folder.name), jobs={}, path=file)
        return Project(folder=folder, jobs=project, inventory=load_hosts(args, screen), plan=None)
    plan = load_plan(path)
    try:
        jobs = replace(read_jobs(_documents(plan)[0], screen), project=plan.project)
    except InvalidDocumentError as error:
        # What runs can be followed and cancelled while its document is being edited.
        screen.note("warning: the jobs file does not hold, so that nothing new can be started:", "warn")
        screen.error(error)
        jobs = JobSet(project=plan.project, jobs={}, path=folder / JOBS)
    return Project(folder=folder, jobs=jobs, inventory=_hosts_of(plan, args, screen), plan=plan)


def hosts_in_use(args: argparse.Namespace, screen: Screen) -> Inventory:
    """Return the hosts of the last plan of the project here, else those of the inventory in use."""
    with suppress(UsageError):
        path = Paths(find_folder(Path())).plan
        if path.exists():
            return _hosts_of(load_plan(path), args, screen)
    return load_hosts(args, screen)


def documents_of(plan: Plan, args: argparse.Namespace, screen: Screen) -> tuple[JobSet, Inventory]:
    """Return the jobs and hosts that a plan was made of; --inventory and $GPULAYER_INVENTORY come before its own."""
    return read_jobs(_documents(plan)[0], screen), _hosts_of(plan, args, screen)


def _documents(plan: Plan) -> list[Path]:
    """Return the paths of a plan's documents: the jobs, then the inventory where there was one."""
    if not plan.documents:
        raise StateError("the plan names no documents", fix="plan anew: gpulayer plan")
    return [Path(path) for path, _ in plan.documents]


def _hosts_of(plan: Plan, args: argparse.Namespace, screen: Screen) -> Inventory:
    own = _documents(plan)[1:]
    return _inventory(_named_inventory(args) or (own[0] if own else None), screen)


def _hidden(jobs: JobSet, screen: Screen) -> JobSet:
    """Return jobs as they are, and have their secrets, as the environment has them, hidden."""
    names = {name for job in jobs.jobs.values() for name in job.secrets}
    screen.hide(os.environ[name] for name in sorted(names) if name in os.environ)
    return jobs


def _named_inventory(args: argparse.Namespace) -> Path | None:
    named = args.inventory or os.environ.get("GPULAYER_INVENTORY")
    return Path(named) if named else None


def _inventory(path: Path | None, screen: Screen) -> Inventory:
    if path is not None:
        return load_inventory(path)
    screen.note("no inventory: this machine alone, as host `local`", "faint")
    return local_inventory()
