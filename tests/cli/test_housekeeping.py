"""`gpulayer gc`: shows first, removes what was agreed to, and forgets no run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Commander, Result

JOBS = """\
version: 1
name: tidy
jobs:
  good: {accelerator: cpu, command: "echo one"}
  bad: {accelerator: cpu, command: "exit 3"}
"""


@pytest.fixture
def ended(gpulayer: Commander) -> Commander:
    """A project of two runs that have ended, on this machine."""
    leases, state = gpulayer.home / "leases", gpulayer.home / "state"
    gpulayer.write(
        "inventory.yaml",
        f"version: 1\nhosts:\n  here: {{transport: local, max_jobs: 4, lease_dir: {leases}, state_dir: {state}}}\n",
    )
    gpulayer.write("jobs.yaml", JOBS)
    assert gpulayer("apply", "jobs.yaml", "--yes").code == 1
    return gpulayer


def folders(ended: Commander) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in (ended.home / "state").glob("*/runs/*"))


def old(ended: Commander, *words: str) -> dict[str, Any]:
    """What `gc --json` tells of the host, once the supervisors of both runs are gone."""
    give_up = time.monotonic() + 30
    while True:
        result = ended("gc", "--json", "--older-than", "0s", *words)
        document = result.json()
        (host,) = document["hosts"]
        if host["live"] == 0:
            assert (result.code, document["schema"]) == (0, "gpulayer.gc/1")
            return {**host, "removed": document["removed"]}
        assert time.monotonic() < give_up


def test_it_shows_first_and_removes_what_was_agreed_to(ended: Commander) -> None:
    host = old(ended)
    assert (host["removed"], host["count"], host["error"]) == (False, 2, None)
    assert sorted(run["job"] for run in host["runs"]) == ["bad", "good"]
    assert ended("gc").out == "here: to be removed: nothing; stays: 2 runs too young\n"
    piped = ended("gc", "--older-than", "0s")
    assert (piped.code, "to be removed: 2 runs" in piped.out) == (0, True)
    assert "--yes" in piped.err
    refused = ended.on_terminal("gc", "--older-than", "0s", typed="n\n")
    assert refused.code == 6
    assert folders(ended) == ["bad", "good"]
    agreed = ended.on_terminal("gc", "--older-than", "0s", typed="y\n")
    assert agreed.code == 0
    assert "removed: 2 runs" in agreed.out
    assert folders(ended) == []


def test_a_removed_run_is_up_to_date_or_failed_as_before_and_what_was_fetched_is_kept(ended: Commander) -> None:
    assert old(ended, "--yes")["removed"] is True
    again = ended("apply", "jobs.yaml", "--yes", "--json")
    assert again.code == 1
    assert [event for event in again.events() if event["event"] == "launched"] == []
    assert again.events()[-1]["counts"] == {"up_to_date": 1, "failed": 1}
    assert "one" in ended("logs", "good").out
    _forget(ended.folder)
    asked_anew = ended("apply", "jobs.yaml", "--yes", "--json")
    assert [event for event in asked_anew.events() if event["event"] == "launched"] == []


def _forget(folder: Path) -> None:
    """Lose the local history: only the host knows."""
    (folder / ".gpulayer").rename(folder / "elsewhere")


def test_what_is_young_stays_and_an_age_must_be_one(ended: Commander) -> None:
    young: Result = ended("gc", "--json", "--yes")
    assert young.json()["hosts"][0]["count"] == 0
    assert folders(ended) == ["bad", "good"]
    assert ended("gc", "--older-than", "soon").code == 2


def test_a_host_that_is_not_reached_is_told(gpulayer: Commander) -> None:
    gpulayer.write("inventory.yaml", "version: 1\nhosts:\n  gone: {address: 127.0.0.1, port: 1}\n")
    result = gpulayer("gc")
    assert result.code == 4
    assert "gone" in result.out
