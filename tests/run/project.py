"""A project in a folder with an inventory of real sshd hosts, and what tests ask of it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulayer.fleet.session import Fleet
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.placement.plan import KnownRun, Plan
from gpulayer.run import api
from gpulayer.run.events import Event
from gpulayer.run.paths import Paths
from gpulayer.run.store import Store
from gpulayer.spec.inventory import Inventory, load_inventory
from gpulayer.spec.jobs import JobSet, load_jobs
from tests.sshd import SshdHost

_NUMBERS = itertools.count()

# Tells the host-side journal that a run has started, before it does anything else.
STARTED = 'echo "$GPULAYER_RUN_ID" >> ~/journal'


@dataclass(kw_only=True)
class Project:
    """A jobs file and an inventory in `folder`; its name is the project's. `hosts` are the inventory's by name."""

    folder: Path
    hosts: dict[str, SshdHost]
    options: ConnectOptions
    extra: dict[str, Any]  # more keys of hosts, by host name
    fleets: list[Fleet] = field(default_factory=list)  # the last one is open, unless the inventory has changed since

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def paths(self) -> Paths:
        return Paths(self.folder)

    @property
    def fleet(self) -> Fleet:
        """The connections that one test shares, to the inventory as it was written last."""
        inventory = self.inventory
        if not self.fleets or self.fleets[-1].inventory != inventory:
            self.fleets.append(Fleet(inventory, self.options))
        return self.fleets[-1]

    async def close(self) -> None:
        """Close all connections."""
        for fleet in self.fleets:
            await fleet.close()

    @property
    def inventory(self) -> Inventory:
        return load_inventory(self.folder / "inventory.yaml")

    @property
    def jobs(self) -> JobSet:
        return load_jobs(self.folder / "jobs.yaml")

    def write(self, jobs: dict[str, dict[str, Any]], **defaults: Any) -> None:
        """Write jobs.yaml (YAML holds JSON) and inventory.yaml."""
        defaults = {"accelerator": "cpu", "timeout": "2m", **defaults}  # no job outlives a test that fails
        document = {"version": 1, "name": self.name, "defaults": defaults, "jobs": jobs}
        (self.folder / "jobs.yaml").write_text(json.dumps(document))
        entries = {name: host.entry | self.extra.get(name, {}) for name, host in self.hosts.items()}
        (self.folder / "inventory.yaml").write_text(json.dumps({"version": 1, "hosts": entries}))

    async def plan(self, **options: Any) -> Plan:
        return await api.plan(self.jobs, self.inventory, fleet=self.fleet, **options)

    async def apply(self, plan: Plan | None = None, **options: Any) -> list[Event]:
        """Plan where no plan is given, carry it out, and return all events."""
        decided = plan or await self.plan()
        events = api.apply(decided, self.jobs, self.inventory, fleet=self.fleet, **options)
        return [event async for event in events]

    async def attach(self, plan: Plan | None, **options: Any) -> list[Event]:
        events = api.attach(self.jobs, self.inventory, plan, fleet=self.fleet, **options)
        return [event async for event in events]

    async def status(self) -> list[KnownRun]:
        return await api.status(self.folder, self.inventory, fleet=self.fleet)

    async def cancel(self, jobs: Sequence[str] | None, **options: Any) -> list[Event]:
        events = api.cancel(
            self.folder, self.inventory, jobs, project=self.name, fleet=self.fleet, **options
        )  # fmt: skip
        return [event async for event in events]

    def local_log(self, run: str) -> bytes:
        path = self.paths.log(run)
        return path.read_bytes() if path.exists() else b""  # a run that said nothing has none

    def remote_log(self, host: str, run: str) -> bytes:
        (path,) = self.hosts[host].home.rglob(f"runs/{run}/output.log")
        return path.read_bytes()

    def starts(self) -> Counter[str]:
        """Return how often each run of this project was started, as the hosts' journals say."""
        runs = self.runs()
        lines = [
            line
            for host in self.hosts.values()
            if (host.home / "journal").exists()
            for line in (host.home / "journal").read_text().split()
        ]
        return Counter(line for line in lines if line in runs)

    def runs(self) -> dict[str, str]:
        """Return the hosts of this project's runs, by run id."""
        with Store.open(self.folder) as store:
            return {run.run: run.host for run in store.runs(self.name)}

    def logs_are_equal(self) -> bool:
        """Tell whether each run's log here is the host's, byte for byte."""
        return all(self.local_log(run) == self.remote_log(host, run) for run, host in self.runs().items() if host)

    def controller(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start a controller as a process of its own, which prints its events as lines of JSON."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.run.controller", str(self.folder), str(self.options.known_hosts[0]), *words],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.getcwd(), **variables},  # noqa: PTH109
        )


def gated(folder: Path) -> str:
    """Return a command that prints until a file appears: the test says when, no clock does."""
    return f"{STARTED}; i=0; until test -e {folder}/gate; do i=$((i+1)); echo line $i; sleep 0.02; done; echo done"


def release(project: Project) -> None:
    (project.folder / "gate").touch()


def summary(events: Sequence[Event]) -> tuple[int, dict[str, int]]:
    """Return the exit code and the counts of the last event, which must be the summary."""
    assert events[-1].event == "summary"
    assert [event.event for event in events].count("summary") == 1
    return events[-1].detail["exit_code"], dict(events[-1].detail["counts"])


def words(events: Sequence[Event], job: str) -> list[str]:
    """Return what happened to a job, output aside."""
    return [event.event for event in events if event.job == job and event.event != "output"]


def output(events: Sequence[Event], job: str) -> bytes:
    """Return a job's output as it was streamed; its offsets must follow each other."""
    data = b""
    for event in events:
        if event.job == job and event.event == "output":
            assert event.detail["offset"] == len(data)
            data += event.data
    return data


@asynccontextmanager
async def new_project(
    parent: Path, prefix: str, hosts: dict[str, SshdHost], options: ConnectOptions
) -> AsyncIterator[Project]:  # fmt: skip
    """A project on these hosts, of two CPU slots each; no two share a name, so that none sees another's runs."""
    folder = parent / f"{prefix}-{next(_NUMBERS)}"
    folder.mkdir()
    project = Project(
        folder=folder, hosts=dict(hosts), options=options, extra={name: {"max_jobs": 2} for name in hosts}
    )
    yield project
    await project.close()
