"""Whatever lies where a command expects a document, it ends at once, in words, and starts nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulayer.cli import places
from gpulayer.cli.main import main

JOBS = "version: 1\njobs: {a: {command: touch started}}\n"
HOSTS = "version: 1\nhosts: {here: {transport: local}}\n"

# Every place of a command line, and of a folder, where a document may stand.
COMMANDS = {
    "validate": ("validate", "BAD"),
    "validate-inventory": ("validate", "jobs.yaml", "BAD"),
    "jobs": ("plan", "BAD"),
    "inventory": ("plan", "jobs.yaml", "--inventory", "BAD"),
    "probe": ("probe", "--inventory", "BAD"),
    "facts": ("plan", "jobs.yaml", "--facts", "BAD"),
    "apply": ("apply", "--yes", "BAD"),
    "attach": ("attach", "--inventory", "BAD"),
    "last-plan": ("apply",),
    "last-plan-status": ("status",),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GPULAYER_INVENTORY", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "jobs.yaml").write_text(JOBS)
    (tmp_path / "inventory.yaml").write_text(HOSTS)
    (tmp_path / ".gpulayer").mkdir(mode=0o700)
    return tmp_path


def put(path: Path, what: str) -> Path:
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "device":
        path.symlink_to("/dev/zero")
    return path


@pytest.mark.timeout(20)  # one that waits at a pipe, or reads a device to its end, waits for ever
@pytest.mark.parametrize("what", ["fifo", "folder", "device"])
@pytest.mark.parametrize("place", COMMANDS)
def test_what_is_no_file_is_named_and_never_waited_for(
    folder: Path, capsys: pytest.CaptureFixture[str], place: str, what: str
) -> None:
    bad = put(folder / ".gpulayer" / "plan.json" if place.startswith("last-plan") else folder / "bad", what)
    words = [str(bad) if word == "BAD" else word for word in COMMANDS[place]]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert f"{bad}: this is " in told.replace(".gpulayer/plan.json", str(bad))
    assert not (folder / "started").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": "gpulayer.plan/1", "created_at": NaN}', "NaN is not a finite number"),
        ('{"schema": "gpulayer.plan/1", "a": 1e999}', "1e999 is not a finite number"),
        ('{"schema": "gpulayer.plan/1", "a": ' + "9" * 5_000 + "}", "is not a finite number of 64 bits"),
        ('{"schema": "gpulayer.plan/1", "schema": 2}', "a name stands twice"),
        ('{"schema": ' + "[" * 100_000, "is no JSON document: it is nested too deep"),
        ('{"schema": "gpulayer.plan/1", "jobs": "\\ud800"}', "has no 'created_at'"),
        ('{"schema": "gpulayer.plan/1"', "is no JSON document"),
        ('{"schema": "\ufeff\x00"}', "is no JSON document"),
    ],
    ids=lambda value: value[:24] if value.startswith("{") else "",
)
def test_a_saved_document_means_one_thing_or_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    (folder / ".gpulayer" / "plan.json").write_text(text)
    (folder / "facts.json").write_text(text)
    assert main(["apply"]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "gpulayer plan" in told  # the way out
    assert main(["plan", "jobs.yaml", "--facts", "facts.json"]) == 2
    assert "Traceback" not in told + capsys.readouterr().err


def test_a_saved_document_above_the_limit_is_not_read_to_its_end(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_JSON", 2**20)
    with (folder / "facts.json").open("wb") as file:
        file.truncate(places.MAX_JSON + 1)
    assert main(["plan", "jobs.yaml", "--facts", "facts.json"]) == 2
    assert "larger than 1 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["fifo", "folder", "device"])
@pytest.mark.parametrize("words", [("plan",), ("apply",), ("status",), ("logs", "a"), ("attach",)])
def test_jobs_that_are_no_file_are_told_as_such_by_every_command(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], what: str
) -> None:
    (folder / ".gpulayer").rmdir()
    (folder / "jobs.yaml").unlink()
    put(folder / "jobs.yaml", what)
    assert main(words) == 2
    kind = {"fifo": "a pipe", "folder": "a folder", "device": "not a regular file"}[what]
    assert f"jobs.yaml: this is {kind}; a regular file is needed" in capsys.readouterr().err
