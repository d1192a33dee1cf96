"""A random mix of faults over jobs that run, seeded; and a controller that dies at a random point of a launch."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpulayer.run import api
from tests.faults.hosts import PoweredHost, send
from tests.faults.oracle import journaled
from tests.faults.proxy import Proxy
from tests.faults.scene import Scene
from tests.run.project import Project, summary

CONTROLLER_POINTS = ("intended", "launch-due", "launch-answered")
HOST_POINTS = ("claimed", "spec-written", "intent-written", "leader-forked", "running-written", "gate-opened",
               "work-made", "leader-ended", "exit-due", "exit-written", "stopping-written")  # fmt: skip
ACTIONS = ("kill", "delay", "error")
SETTLES = 60.0  # seconds until all that was hurt has its end


@dataclass(kw_only=True)
class Mix:
    """Two hosts with a GPU each behind proxies, and controllers that come and go. All chance comes from `dice`."""

    scene: Scene
    dice: random.Random
    hosts: dict[str, PoweredHost] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    controllers: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    async def of(cls, scene: Scene, seed: int) -> Mix:
        """Set the scene."""
        mix = cls(scene=scene, dice=random.Random(seed))  # noqa: S311  # no secret: a seed tells the whole story
        for name in ("a", "b"):
            mix.hosts[name] = scene.host(name, gpu=True, slots=2)
            mix.proxies[name] = await scene.proxy(name)
        return mix

    def jobs(self, project: Project, number: int) -> None:
        """Declare jobs of every kind: on a device or not, long or short, good or bad, with retries or without."""
        jobs = {}
        for n in range(number):
            device, code = self.dice.random() < 0.5, self.dice.choice((0, 0, 0, 3))
            body = f"echo begun {n}; sleep {self.dice.uniform(0.05, 1.0):.2f}; echo done"
            jobs[f"job-{n}"] = {
                "command": journaled(body, code=code, device=device),
                "accelerator": "cuda" if device else "cpu",
                "retries": self.dice.choice((0, 1, {"max": 1, "on": ["lost"]})),
            }
        project.write(jobs, timeout="1m")

    async def hurt(self, seconds: float, project: Project) -> None:
        """Do harm for a while, a random one at a time, while controllers work on the project."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            self.controllers = [one for one in self.controllers if one.poll() is None or one.communicate() is None]
            if len(self.controllers) < 2:
                self.controllers.append(self.scene.controller(project, self.dice.choice(("apply", "attach"))))
            name = self.dice.choice(sorted(self.hosts))
            harm = self.dice.choice(sorted(self.harms(name).items()))[1]
            harm()
            await asyncio.sleep(self.dice.uniform(0.0, 0.6))

    def harms(self, name: str) -> dict[str, Callable[[], None]]:
        """Return what can be done to a host, its link and the controllers."""
        host, proxy = self.hosts[name], self.proxies[name]
        return {
            "cut": proxy.cut,
            "kill sessions": host.cut,
            "half-close": lambda: proxy.half_close(up=self.dice.random() < 0.5),
            "kill a controller": self.controllers[0].kill,
            "kill a process": lambda: self.strike(host, signal.SIGKILL),
            "restart sshd": host.restart,
            "power": host.power_cycle,
        }

    def strike(self, host: PoweredHost, number: int) -> None:
        """Send a signal to any process of a host: agent, supervisor, job."""
        if inside := sorted(host.inside()):
            send(self.dice.choice(inside), number)

    async def settle(self, project: Project) -> None:
        """Let one quiet controller bring all to its end, and ask the oracle."""
        for one in self.controllers:
            one.kill()
            one.communicate()
        give_up = time.monotonic() + SETTLES
        while True:
            code, counts = summary(await project.apply(partial=True))
            if not counts.get("unknown") and not counts.get("unreachable"):
                break
            assert time.monotonic() < give_up, f"{code} {counts}"
        self.scene.check()
        assert not {run.status for run in await api.status(project.folder, project.inventory, fleet=project.fleet)} & {
            "running", "launching", "stopping", "orphaned", "unknown"
        }  # fmt: skip


async def a_mix(scene: Scene, *, seed: int, seconds: float, jobs: int) -> None:
    """Run a random mix of faults for a while; then hold what must hold."""
    mix = await Mix.of(scene, seed)
    project = scene.project()
    mix.jobs(project, jobs)
    await mix.hurt(seconds, project)
    await mix.settle(project)


async def kill_points(scene: Scene, *, seed: int) -> None:
    """Let a controller and a host fail at one random point each; then a second controller carries on."""
    dice = random.Random(seed)  # noqa: S311  # no secret
    point, action = dice.choice(HOST_POINTS), dice.choice(ACTIONS)
    fail = dice.choice(CONTROLLER_POINTS)
    host = scene.host("a", environment={"GL_FAIL": f"{point}:{action}:1"})
    project, second = scene.project("first"), scene.project("second")
    for one in (project, second):
        one.write({"a": {"command": journaled("echo said"), "retries": {"max": 1, "on": ["lost"]}}})
    dies = dice.random() < 0.5
    with scene.controller(project, "apply", fail=f"{fail}:kill:1" if dies else None) as controller:
        controller.communicate()
    host.environment({})
    host.restart()
    for one in (second, project):
        assert summary(await one.apply())[0] in {0, 1}
    scene.check()
