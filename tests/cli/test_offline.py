"""Commands that touch no host."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from gpulayer.spec import support
from tests.cli.command import Commander


def test_matrix_shows_every_row_in_80_columns_without_colour(gpulayer: Commander) -> None:
    result = gpulayer("matrix")
    assert result.code == 0
    shown = [line for line in result.out.splitlines() if re.match(r"(cuda|mps|rocm|cpu) +\S.* (yes|no) ", line)]
    assert len(shown) == len(support.matrix())
    assert "\x1b" not in result.out
    assert max(len(line) for line in result.out.splitlines() if not line.startswith(("no: ", "No row"))) <= 80


def test_matrix_json_is_one_document(gpulayer: Commander) -> None:
    result = gpulayer("matrix", "--json")
    rows = result.json()["rows"]
    assert [(row["accelerator"], row["kind"], row["framework"], row["allowed"]) for row in rows] == [
        (row.accelerator, row.kind, row.framework, row.allowed) for row in support.matrix()
    ]
    assert result.err == ""


def test_a_reader_that_closes_stdout_gets_no_trace(gpulayer: Commander) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "gpulayer", "matrix"],
        cwd=gpulayer.folder,
        env=gpulayer.environment,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 0
    assert done.stderr == b""


def test_a_full_disk_is_said(gpulayer: Commander) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            [sys.executable, "-m", "gpulayer", "matrix", "--json"],
            cwd=gpulayer.folder,
            env=gpulayer.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 2
    assert b"cannot be written: No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr
