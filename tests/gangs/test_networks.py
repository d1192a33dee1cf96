"""Gangs over networks that fail: who cannot reach whom is told at once, who is lost ends the gang."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from gpulayer.run import gang, launch
from gpulayer.run.events import Event
from tests.gangs.network import NetworkHost, inside
from tests.gangs.programs import gated
from tests.gangs.test_gangs import SCHEMAS, end, once_all_run, starts, watched
from tests.run.project import Project, release, summary

pytestmark = [pytest.mark.linux("network namespaces"), pytest.mark.root("hosts with addresses of their own")]


def hosts(project: Project) -> list[NetworkHost]:
    found = [host for host in project.hosts.values() if isinstance(host, NetworkHost)]
    assert len(found) == 4
    return found


def kept(project: Project) -> list[str]:
    """Return what hosts have written of this project's runs."""
    return [str(path) for host in hosts(project) for path in host.home.rglob(f"runs/*{project.name}*/state.json")]


async def test_a_first_host_that_the_second_cannot_reach_is_told_in_seconds(project: Project) -> None:
    alpha, beta, *_ = hosts(project)
    project.write({"g": gated(project.folder)})
    plan = await project.plan()
    beta.lose(alpha)
    try:
        began = time.monotonic()
        events = await project.apply(plan)
        assert time.monotonic() - began < 10
    finally:
        beta.find(alpha)
    assert summary(events) == (1, {"failed": 1})
    last = end(events)
    assert last.event == "failed_to_start"
    assert last.detail["reason"].startswith(f"beta cannot reach alpha at {alpha.address}:")
    for word in ("firewall of alpha", "Local Network", "private_address"):
        assert word in last.detail["fix"]
    SCHEMAS["event"].validate(last.to_json())
    assert starts(project) == {}


async def test_hosts_that_lose_each_other_in_mid_training_end_the_gang_and_it_may_be_tried_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SILENCE", 2.0)
    alpha, beta, *_ = hosts(project)
    project.write({"g": gated(project.folder, real=True, grace="1s", retries={"max": 1, "on": ["lost"]})})

    def cut() -> None:
        alpha.lose(beta)
        beta.lose(alpha)

    cutting = once_all_run(cut, 2)
    mended: list[bool] = []

    def look(events: list[Event]) -> None:
        cutting(events)
        if not mended and events[-1].event == "lost" and events[-1].detail.get("node", 0) is None:
            alpha.find(beta)
            beta.find(alpha)
            release(project)
            mended.append(True)

    events = await watched(project, look)
    assert mended == [True]
    assert summary(events) == (0, {"succeeded": 1})
    lost = next(event for event in events if event.event == "lost" and event.detail.get("node", 0) is None)
    assert lost.detail["reason"] in {"alpha was lost", "beta was lost"}
    assert {entry["status"] for entry in lost.detail["ranks"]} == {"cancelled"}
    assert {run: count for run, count in starts(project).items() if "-a1-" in run}.keys() == {
        run.replace("-a2-", "-a1-") for run in starts(project)
    }


async def test_a_host_that_is_gone_leaves_the_gang_unknown_until_it_is_asked_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host ends its part by itself, and is free for a job that waits."""
    monkeypatch.setattr(launch, "SILENCE", 2.0)
    alpha, beta, *_ = hosts(project)
    project.extra["alpha"] = {"max_jobs": 1}
    only = {"hosts": ["alpha"]}
    project.write({"g": gated(project.folder, grace="1s"), "after": {"command": "echo after", "where": only}})

    def cut() -> None:
        beta.stop()
        alpha.lose(beta)
        beta.lose(alpha)

    events = await watched(project, once_all_run(cut, 2), patience=3.0)
    try:
        assert summary(events) == (4, {"unknown": 1, "succeeded": 1})
        assert end(events).event == "unknown"
        (gone,) = [event for event in events if event.detail.get("node") == 0 and event.event == "cancelled"]
        assert gone.detail["reason"] == "stopped because beta was lost"
    finally:
        alpha.find(beta)
        beta.find(alpha)
        beta.start()
    gang, _ = await project.status()
    assert (gang.status, gang.reason) in {("lost", "alpha was lost"), ("lost", "beta was lost")}


async def test_a_port_that_somebody_takes_meanwhile_is_another_attempt(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node keeps the port from everybody who asks for a free one; torch itself must be able to take it, though."""
    alpha, *_ = hosts(project)
    project.write({"g": gated(project.folder, real=True)})
    release(project)
    ports: list[int] = []
    thieves: list[subprocess.Popen[bytes]] = []
    answer = gang.Pending.answer

    async def overheard(self: gang.Pending) -> None:
        await answer(self)
        if self.held is not None and "store_port" in self.held:
            ports.append(int(self.held["store_port"]))

    def rob(events: list[Event]) -> None:
        if events[-1].event == "launched" and not thieves:  # torchrun is being imported now
            assert alpha.holder is not None
            thieves.append(_thief(alpha.holder.pid, ports[0]))

    monkeypatch.setattr(gang.Pending, "answer", overheard)
    try:
        events = await watched(project, rob)
    finally:
        for thief in thieves:
            thief.kill()
            thief.wait()
    assert summary(events) == (0, {"succeeded": 1})
    whole = [event for event in events if event.detail.get("node", 0) is None]
    (failed,) = [event for event in whole if event.event == "failed_to_start"]
    assert failed.detail["reason"].startswith("port")
    assert [event.detail["attempt"] for event in whole if event.event == "launching"] == [1, 2]
    assert sorted(run[-6:] for run in starts(project)) == ["-a2-n0", "-a2-n1"]


_THIEF = """\
import socket, sys, time
taken = socket.socket()
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
taken.bind(("", int(sys.argv[1])))
taken.listen()
print("mine", flush=True)
time.sleep(300)
"""


def _thief(pid: int, port: int) -> subprocess.Popen[bytes]:
    thief = subprocess.Popen([*inside(pid), sys.executable, "-c", _THIEF, str(port)], stdout=subprocess.PIPE)
    assert thief.stdout is not None
    with thief.stdout as out:
        assert out.readline() == b"mine\n"
    return thief
