"""Commands that touch no host."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from gpulayer.spec import support
from tests.cli.command import Commander

ROW = re.compile(r"(cuda|mps|rocm|cpu) +\S.* (yes|no) ")


def test_matrix_shows_every_row_without_colour(gpulayer: Commander) -> None:
    result = gpulayer("matrix")
    assert result.code == 0
    assert len([line for line in result.out.splitlines() if ROW.match(line)]) == len(support.matrix())
    assert "\x1b" not in result.out


def test_matrix_fits_in_80_columns_of_a_terminal(gpulayer: Commander) -> None:
    result = gpulayer.on_terminal("matrix")
    assert "\x1b[1m" in result.out
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in result.out.splitlines()]
    assert len([line for line in lines if ROW.match(line)]) == len(support.matrix())
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("words", "extra"), [(("--no-color",), {}), ((), {"NO_COLOR": "1"}), ((), {"TERM": "dumb"})])
def test_no_colour_where_none_is_wanted(gpulayer: Commander, words: tuple[str, ...], extra: dict[str, str]) -> None:
    gpulayer.extra.update(extra)
    assert "\x1b" not in gpulayer.on_terminal("matrix", *words).out


def test_matrix_json_is_one_document(gpulayer: Commander) -> None:
    result = gpulayer("matrix", "--json")
    rows = result.json()["rows"]
    assert [(row["accelerator"], row["kind"], row["framework"], row["allowed"]) for row in rows] == [
        (row.accelerator, row.kind, row.framework, row.allowed) for row in support.matrix()
    ]
    assert result.err == ""


@pytest.mark.parametrize("words", [("matrix",), ("matrix", "--json"), ("--help",), ("--version",)])
def test_a_reader_that_closes_stdout_gets_no_trace(gpulayer: Commander, words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "gpulayer", *words],
        cwd=gpulayer.folder,
        env=gpulayer.environment,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 0
    assert done.stderr == b""


def test_closed_streams_are_no_fault(gpulayer: Commander) -> None:
    command = ["sh", "-c", 'exec "$0" -m gpulayer matrix >&- 2>&- <&-', sys.executable]
    assert subprocess.run(command, cwd=gpulayer.folder, env=gpulayer.environment, check=False).returncode == 0


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


def test_a_deep_probe_shows_what_was_tried_and_a_later_plan_goes_by_it(gpulayer: Commander) -> None:
    gpulayer.extra["VIRTUAL_ENV"] = sys.prefix
    result = gpulayer("probe", "--framework", "mlx", "--deep")
    assert (result.code, "mlx on cpu:0" in result.out) == (0, True)
    assert re.search(r"DID NOT", result.out)
    assert "complex128 (unsupported)" in " ".join(result.out.split())
    gpulayer.write(
        "jobs.yaml",
        "version: 1\njobs:\n  it:\n    accelerator: cpu\n    framework: mlx\n"
        "    resources: {dtypes: [complex128]}\n    command: [python, -V]\n",
    )
    plan = gpulayer("plan", "jobs.yaml", "--json")
    (refusal,) = next(iter(plan.json()["shapes"].values()))["refusals"]
    assert (plan.code, refusal["code"], refusal["found"]) == (3, "dtype", "complex128 unsupported")
