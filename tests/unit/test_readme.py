"""What README claims is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from gpulayer.errors import ExitCode
from gpulayer.spec.support import Accelerator, Framework, JobKind, Row, matrix, row

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
FRAMEWORKS: tuple[Framework | None, ...] = (*Framework, None)


def cell(entry: Row) -> str:
    """What a job demands of a host there, and what evidence there is that it works."""
    if not entry.allowed:
        return "no"
    demand = " or ".join(f"`{capability}`" for capability in entry.capabilities) or "yes"
    return f"{demand} ({entry.evidence})"


def rendered() -> str:
    """The support matrix as README shows it: the table, then why what is not allowed is not."""
    lines = [
        f"| job | accelerator | {' | '.join(framework or 'any other program' for framework in FRAMEWORKS)} |",
        f"| --- | --- |{' --- |' * len(FRAMEWORKS)}",
    ]
    for kind in JobKind:
        for accelerator in Accelerator:
            cells = " | ".join(cell(row(accelerator, kind, framework)) for framework in FRAMEWORKS)
            lines.append(f"| {kind} | `{accelerator}` | {cells} |")
    reasons = dict.fromkeys(entry.why for entry in matrix() if not entry.allowed)
    return "\n".join([*lines, "", "What is not allowed, and why:", "", *(f"- {reason}" for reason in reasons)])


def test_the_support_table_is_the_matrix() -> None:
    found = re.search(r"<!-- matrix -->\n(.*?)\n<!-- /matrix -->", README, re.DOTALL)
    assert found, "README has no <!-- matrix --> block"
    assert found[1] == rendered(), f"put this between the marks:\n{rendered()}"


def test_the_exit_codes_are_all_of_them() -> None:
    table = README.partition("| exit code |")[2].partition("\n\n")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == set(ExitCode)
