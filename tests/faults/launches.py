"""Launches over a link that is reset at a given byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gpulayer.placement.plan import HostView, KnownRun
from gpulayer.run.channel import Channel
from gpulayer.run.follow import Follower, Links, Reporter
from gpulayer.run.launch import Launcher, spec_of
from gpulayer.run.store import Store
from gpulayer.run.survey import Question, survey
from gpulayer.run.work import queued
from gpulayer.spec.support import Accelerator
from tests.faults.oracle import journaled
from tests.faults.proxy import Proxy
from tests.faults.scene import Scene
from tests.run.project import Project


@dataclass(kw_only=True)
class Launches:
    """The product's own launcher before one host; every launch is a run of its own."""

    project: Project
    proxy: Proxy
    store: Store
    view: HostView
    launcher: Launcher
    follower: Follower
    number: int = 0

    @classmethod
    async def on(cls, scene: Scene) -> Self:
        """Make a host behind a proxy, and the launcher of a project that knows it."""
        scene.host("a", slots=64)
        proxy = await scene.proxy("a")
        project = scene.project()
        project.write({"a": {"command": journaled()}})
        (answer,) = await survey(project.fleet, project.inventory.hosts.values(), Question(project=project.name))
        store = Store.open(project.folder)
        reporter = Reporter(store=store, channel=Channel())
        links = Links(fleet=project.fleet, reporter=reporter)
        return cls(
            project=project,
            proxy=proxy,
            store=store,
            view=answer.view,
            launcher=Launcher(links=links, reporter=reporter, trees={}),
            follower=Follower(links=links, reporter=reporter, store=store),
        )

    async def close(self) -> None:
        """Close what is open here."""
        await self.launcher.close()
        self.store.close()

    async def measure(self) -> dict[bool, int]:
        """Return the bytes of a launch and its answer, by direction (True: to the host)."""
        before = dict(self.proxy.moved)
        run = await self._launch()
        total = {up: self.proxy.moved[up] - before[up] for up in before}
        await self.follower.follow(run)
        return total

    async def cut_at(self, *, up: bool, count: int) -> None:
        """Launch a run and follow it to its end; the link is reset after `count` bytes of it have gone one way."""
        await self.project.fleet.session("a", deadline=30)
        self.proxy.cut_after(up=up, count=count)
        state = await self.follower.follow(await self._launch())
        assert (state.run.status, state.run.code) == ("exited", 0)

    async def _launch(self) -> KnownRun:
        self.number += 1
        run = replace(queued("a", f"{self.number:012x}{0:052x}", 1), host="a")
        spec = spec_of(
            self.project.jobs.jobs["a"],
            run,
            project=self.project.name,
            view=self.view,
            accelerator=Accelerator.CPU,
            peers=["a"],
            tree=None,
            python=None,
        )
        answer = await self.launcher.launch(run, [spec])
        assert isinstance(answer, tuple)
        return answer[1].run
