"""One test's hosts, proxies and controllers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gpulayer.fleet.transport import ConnectOptions
from gpulayer.run import api
from gpulayer.run.events import Event
from tests.faults.hosts import PoweredHost
from tests.faults.oracle import Journal, check, check_nothing_is_left
from tests.faults.proxy import Proxy
from tests.machines import RECORDED, write_nvidia_smi
from tests.run.project import Project

ONE_GPU = "GPU-11111111-1111-4111-8111-111111111111"


async def applied(project: Project) -> AsyncGenerator[Event]:
    """Plan, apply, and yield each event as it comes, so that a test can act between two."""
    events = api.apply(await project.plan(), project.jobs, project.inventory, fleet=project.fleet)
    async with aclosing(events):
        async for event in events:
            yield event


@dataclass(kw_only=True)
class Scene:
    """Hosts, each behind a proxy where one is wanted, and controllers that know them by the same names."""

    folder: Path
    start_host: Callable[..., PoweredHost]
    options: ConnectOptions
    number: int
    hosts: dict[str, PoweredHost] = field(default_factory=dict)
    projects: list[Project] = field(default_factory=list)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    _exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    def host(self, name: str, *, slots: int = 4, gpu: bool = False, **options: Any) -> PoweredHost:
        """Start a host with `slots` CPU slots; `gpu` gives it one, as a stand-in of nvidia-smi tells."""
        if gpu:
            tool = self.folder / f"{name}-bin" / "nvidia-smi"
            header, first, *_ = (RECORDED / "nvidia" / "h200x2.query.csv").read_text().splitlines()
            listing, *_ = (RECORDED / "nvidia" / "h200x2.nvidia-smi-L.txt").read_text().splitlines()
            write_nvidia_smi(tool, f"{header}\n{first}\n", f"{listing}\n")
            path = f"{tool.parent}:{os.environ['PATH']}"
            options["environment"] = {"PATH": path, **options.get("environment", {})}
        host = self.start_host(name, **options)
        self.hosts[name] = host
        self.extra[name] = {"max_jobs": slots}
        return host

    async def proxy(self, name: str) -> Proxy:
        """Put a proxy before a host: all controllers that come later go through it."""
        host = self.hosts[name]
        proxy = await self._exits.enter_async_context(Proxy(target=host.port))
        self.extra[name] |= {"port": proxy.port, "host_key": host.fingerprint}
        return proxy

    def project(self, laptop: str = "laptop") -> Project:
        """Return the project as another machine has it: the same name, a history of its own."""
        folder = self.folder / laptop / f"faults-{self.number}"
        folder.mkdir(parents=True)
        project = Project(folder=folder, hosts=dict(self.hosts), options=self.options, extra=self.extra)
        self.projects.append(project)
        return project

    def controller(
        self, project: Project, *words: str, fail: str | None = None, stderr: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a controller as a process of its own that dies at `fail` (point:action:count)."""
        command = [sys.executable, "-m", "tests.run.controller", str(project.folder), str(self.options.known_hosts[0])]
        return subprocess.Popen(
            [*command, *words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": os.getcwd()} | ({"GL_FAIL": fail} if fail else {}),  # noqa: PTH109
        )

    def check(self) -> Journal:
        """Ask the oracle about all projects."""
        return check(self.projects, self.hosts.values())

    def record(self, name: str, run: str) -> dict[str, Any]:
        """Return what the supervisor of a run keeps on its host."""
        (path,) = self.hosts[name].home.rglob(f"runs/{run}/state.json")
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    async def disconnect(self) -> None:
        """Close every controller's links."""
        for project in self.projects:
            await project.close()
            project.fleets.clear()

    async def close(self) -> None:
        """Close all links; hold that nothing is left on any host."""
        await self.disconnect()
        await self._exits.aclose()
        check_nothing_is_left(self.hosts.values())
