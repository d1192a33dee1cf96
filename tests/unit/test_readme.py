"""What README claims is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from gpulayer.errors import ExitCode

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_exit_codes_are_all_of_them() -> None:
    table = README.partition("| exit code |")[2].partition("\n\n")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == set(ExitCode)
