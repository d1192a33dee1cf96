"""A host that lies hurts its own jobs alone: the others' run, nothing is taken for success, no fault of ours shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulayer.run import api, survey
from gpulayer.run.store import Store
from tests.run.project import Project, summary
from tests.sshd import SshdHost

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def liar(sshd_host: Callable[..., SshdHost]) -> SshdHost:
    """A host whose agent changes what it says; its `python` says how (tests/run/liar.py)."""
    return sshd_host("liar", config=[f"ForceCommand env PYTHONPATH={ROOT} {sys.executable} -m tests.run.liar"])


def job(host: str, name: str) -> dict[str, Any]:
    return {"command": ["echo", name], "where": {"hosts": [host]}}


async def test_an_end_that_does_not_hold_is_no_end(project: Project, liar: SshdHost) -> None:
    said = {
        "other-run": "'run'", "other-job": "'run'", "no-end": "is no end", "left": "'tree'", "left-device": "'devices'",
        "time": "'started_at'", "time-of-nowhere": "'ended_at'", "far-hole": "'hole'",
    }  # fmt: skip
    project.hosts = {"liar": liar, "run-one": project.hosts["run-one"]}
    project.extra = {"liar": {"python": "ends", "max_jobs": 20}}
    project.write({name: job("liar", name) for name in (*said, "half-a-pair")} | {"good": job("run-one", "good")})
    events = await project.apply()
    assert summary(events) == (4, {"unknown": len(said), "succeeded": 2})
    reasons = {event.job: event.detail["reason"] for event in events if event.event == "unknown"}
    assert {name for name, words in said.items() if words not in reasons.get(name, "")} == set()
    with Store.open(project.folder) as store:
        found = {run.job: run for run in store.runs()}
    lied_to = said.keys() - {"far-hole"}  # its end may have been told before its log
    assert {name: found[name].status for name in lied_to} == dict.fromkeys(lied_to, "unknown")
    assert (found["good"].status, found["good"].host) == ("exited", "run-one")
    assert found["half-a-pair"].reason == "\\ud800"  # shown and kept, as far as it is a text


async def test_a_host_under_two_names_counts_once(project: Project) -> None:
    project.hosts["alias"] = project.hosts["run-one"]
    project.write({"good": job("run-one", "good"), "twice": job("alias", "twice")})
    plan = await project.plan()
    views = {view.host.name: view for view in await api.holders(project.inventory, project.name, fleet=project.fleet)}
    assert views["run-one"].reached
    assert "this is the host that the inventory names 'run-one' already" in str(views["alias"].error)
    assert summary(await project.apply(plan, partial=True)) == (4, {"unreachable": 1, "succeeded": 1})


async def test_what_a_host_says_of_itself_and_does_not_hold_keeps_it_out(
    project: Project, liar: SshdHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "nameless": "'host_id'", "endless": "more than 3,000 runs", "report-not-finite": "NaN is not a finite number",
        "report-too-big-a-number": "1e999 is not a finite number", "report-twice": "twice in one object",
        "report-deep": "nested deeper", "report-long": "larger than the protocol allows",
        "report-utf-16": "no valid JSON", "wide-gang": "'gang'",
    }  # fmt: skip
    monkeypatch.setattr(survey, "MOST_RUNS", 3000)
    project.hosts = {**dict.fromkeys(said, liar), "run-one": project.hosts["run-one"]}
    project.extra = {name: {"python": name} for name in said}
    project.write({name: job(name, name) for name in said} | {"good": job("run-one", "good")})
    plan = await project.plan()
    views = await api.holders(project.inventory, project.name, fleet=project.fleet)
    errors = {view.host.name: view.error or "" for view in views if not view.reached}
    assert {name: errors.get(name) for name, words in said.items() if words not in errors.get(name, "")} == {}
    assert summary(await project.apply(plan, partial=True)) == (4, {"unreachable": len(said), "succeeded": 1})
