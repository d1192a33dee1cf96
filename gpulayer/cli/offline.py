"""Commands that touch no host: validate, schema, matrix."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from gpulayer.cli.screen import Screen
from gpulayer.errors import ExitCode


def matrix(_args: argparse.Namespace, screen: Screen) -> int:
    """Show the support matrix: which jobs may be declared, and what each row stands on."""
    from gpulayer.cli.tables import table
    from gpulayer.spec import support

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
        screen.say(f"no: {why}")
    screen.say("No row claims that an operator works; a demand is what the probe must have seen working on the host.")
    return ExitCode.OK
