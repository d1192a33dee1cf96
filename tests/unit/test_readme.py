"""What README claims is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from gpulayer.errors import ExitCode

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_exit_codes_are_all_of_them() -> None:
    table = README.partition("| exit code |")[2].partition("\n\n")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == set(ExitCode)


def test_each_promise_names_the_tests_that_hold_it() -> None:
    section = README.partition("## What is promised\n")[2].partition("\n## ")[0].partition("Not promised:")[0]
    promises = re.split(r"^(?:\d\. |Of a )", section, flags=re.MULTILINE)[1:]
    assert len(promises) == 6
    for promise in promises:
        named = re.findall(r"\]\((tests/[a-z_/]+\.py)\)", promise)
        assert named
        assert all((ROOT / path).is_file() for path in named)


def test_each_step_of_a_jobs_path_names_the_tests_that_hold_it() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    steps = re.split(r"^## \d+\. ", page, flags=re.MULTILINE)[1:]
    assert len(steps) == 17
    for step in steps:
        named = re.findall(r"\]\(\.\./(tests/[a-z_/]+\.py)\)", step.partition("Held by")[2])
        assert named, step.splitlines()[0]
        assert all((ROOT / path).is_file() for path in named), named
