"""Commands that touch no host: validate, schema, matrix."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpulayer.cli.places import JOBS, inventory_path, missing
from gpulayer.cli.screen import Screen
from gpulayer.cli.tables import many, table
from gpulayer.errors import ExitCode, InvalidDocumentError, Problem, UsageError
from gpulayer.spec import documents, schemas, support
from gpulayer.spec.entries import refuse
from gpulayer.spec.inventory import Inventory, load_inventory, parse_inventory
from gpulayer.spec.jobs import parse_jobs


def validate(args: argparse.Namespace, screen: Screen) -> int:
    """Check documents and show all their problems at once; without names, those that other commands would use."""
    paths = [Path(name) for name in args.files]
    if not paths:
        hosts = inventory_path(args)
        paths = [*([hosts] if hosts else []), *([JOBS] if JOBS.exists() else [])]
    if not paths:
        raise UsageError(f"there is no {JOBS} in {Path.cwd()} and no inventory", fix="name the files to check")
    checked = [_check(path, args) for path in paths]
    if screen.machine:
        screen.data({"schema": "gpulayer.validation/1", "files": checked})
    for document in checked:
        for problem in document["problems"]:
            screen.note(problem["text"], "bad")
        if not document["problems"]:
            screen.say(f"{document['path']}: valid ({document['holds']})", "good")
    return ExitCode.INVALID if any(document["problems"] for document in checked) else ExitCode.OK


def _check(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return one file's verdict as JSON: its problems, or what it holds in words."""
    problems: tuple[Problem, ...] = ()
    holds = None
    try:
        document = documents.load(path)
        if isinstance(document.value, dict) and "hosts" in document.value:
            holds = many(len(parse_inventory(document).hosts), "host")
        else:
            jobs = parse_jobs(document)
            problems = refuse(missing(jobs, _inventory_in_use(args), document)).problems
            holds = many(len(jobs.jobs), "job")
    except InvalidDocumentError as error:
        problems = error.problems
    return {
        "path": str(path),
        "holds": None if problems else holds,
        "problems": [
            {"line": problem.line, "column": problem.column, "field": problem.field, "message": problem.message,
             "text": str(problem)}
            for problem in problems
        ],
    }  # fmt: skip


def _inventory_in_use(args: argparse.Namespace) -> Inventory | None:
    """Return the inventory against which jobs are held; one that is broken itself says so elsewhere."""
    hosts = inventory_path(args)
    try:
        return load_inventory(hosts) if hosts else None
    except InvalidDocumentError:
        return None


def schema(args: argparse.Namespace, screen: Screen) -> int:
    """Print a JSON Schema as it is shipped."""
    text = json.dumps(schemas.schema(args.name), indent=2, ensure_ascii=True)
    screen.lines(text.encode() + b"\n")
    return ExitCode.OK


def matrix(_args: argparse.Namespace, screen: Screen) -> int:
    """Show the support matrix: which jobs may be declared, and what each row stands on."""
    rows = support.matrix()
    if screen.machine:
        screen.data({"schema": "gpulayer.matrix/1", "rows": [asdict(row) for row in rows]})
        return ExitCode.OK
    for kind in support.JobKind:
        screen.say(f"{kind} jobs", "strong")
        screen.show(
            table(
                ("ACCELERATOR", "FRAMEWORK", "SUPPORTED", "DEMANDS", "EVIDENCE"),
                (
                    (
                        row.accelerator,
                        row.framework or "(any program)",
                        "yes" if row.allowed else "no",
                        " or ".join(row.capabilities) or "-",
                        row.evidence,
                    )
                    for row in rows
                    if row.kind is kind
                ),
            )
        )
        screen.say()
    reasons = dict.fromkeys(row.why for row in rows if not row.allowed)
    for why in reasons:
        screen.say(screen.wrapped(f"no: {why}", "    "))
    claim = "No row claims that an operator works; a demand is what the probe must have seen working on the host."
    screen.say(screen.wrapped(claim, "  "))
    return ExitCode.OK
