"""A random mix of faults over jobs that run, seeded; and a controller that dies at a random point of a launch."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.faults.hosts import PoweredHost, send, start_of
from tests.faults.oracle import journaled
from tests.faults.proxy import Proxy
from tests.faults.scene import Scene
from tests.run.project import Project, summary

CONTROLLER_POINTS = ("intended", "launch-due", "launch-answered")
HOST_POINTS = ("claimed", "spec-written", "intent-written", "leader-forked", "running-written", "gate-opened",
               "work-made", "leader-ended", "exit-due", "exit-written", "stopping-written")  # fmt: skip
COMMANDS = ("apply", "attach", "apply", "attach", "gc")
ACTIONS = ("kill", "delay", "error")
Harm = Callable[[], Callable[[], None] | None]
"""Does harm; what it returns ends that, where it would not end by itself."""
SETTLES = 60.0  # seconds until all that was hurt has its end


@dataclass(kw_only=True)
class Mix:
    """Two hosts with a GPU each behind proxies, and controllers that come and go. All chance comes from `dice`."""

    scene: Scene
    dice: random.Random
    hosts: dict[str, PoweredHost] = field(default_factory=dict)
    proxies: dict[str, Proxy] = field(default_factory=dict)
    controllers: list[subprocess.Popen[str]] = field(default_factory=list)
    passing: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

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
        """Do harm at random for a while, during which controllers work on the project; all that can pass has passed."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            self.controllers = [one for one in self.controllers if one.poll() is None or one.communicate() is None]
            if len(self.controllers) < 2:
                self.controllers.append(
                    self.scene.controller(project, self.dice.choice(("apply", "attach", "apply", "attach", "gc")))
                )
            name = self.dice.choice(sorted(self.hosts))
            harm = self.dice.choice(sorted(self.harms(name)))
            self.done[harm] += 1
            pass_by = self.harms(name)[harm]()
            if pass_by is not None:
                self.passing.append((time.monotonic() + self.dice.uniform(0.0, 3.0), pass_by))
            await asyncio.sleep(self.dice.uniform(0.0, 0.6))
            self.let_pass(time.monotonic())
        self.let_pass(math.inf)

    def let_pass(self, now: float) -> None:
        """End the harm that has lasted long enough."""
        for _, pass_by in [one for one in self.passing if one[0] <= now]:
            pass_by()
        self.passing = [one for one in self.passing if one[0] > now]

    def harms(self, name: str) -> dict[str, Harm]:
        """Return what can be done to a host, its link and the controllers."""
        host, proxy = self.hosts[name], self.proxies[name]
        return {
            "cut": proxy.cut,
            "kill sessions": host.cut,
            "stop sessions": lambda: self.stop(host.sessions()),
            "half-close": lambda: proxy.half_close(up=self.dice.random() < 0.5),
            "black hole": lambda: self.silence(proxy),
            "delay": lambda: self.slow_down(proxy),
            "kill a controller": self.controllers[0].kill,
            "stop a controller": lambda: self.stop([self.controllers[0].pid]),
            "kill a process": lambda: self.strike(host),
            "stop a process": lambda: self.stop(self.one_of(host)),
            "restart sshd": host.restart,
            "power": host.power_cycle,
        }

    def one_of(self, host: PoweredHost) -> list[int]:
        """Choose any process of a host, where there is one: agent, supervisor, job."""
        inside = sorted(host.inside())
        return [self.dice.choice(inside)] if inside else []

    def strike(self, host: PoweredHost) -> None:
        """Let any process of a host die."""
        for pid in self.one_of(host):
            send(pid)

    def stop(self, pids: list[int]) -> Callable[[], None]:
        """Stop processes for a while."""
        stopped = [(pid, start_of(pid)) for pid in pids]
        for pid, _ in stopped:
            send(pid, signal.SIGSTOP)

        def go_on() -> None:
            for pid, start in stopped:
                if start is not None and start_of(pid) == start:
                    send(pid, signal.SIGCONT)

        return go_on

    def silence(self, proxy: Proxy) -> Callable[[], None]:
        """Let nothing through for a while; what was under way then is late, or lost with its connections."""
        lost = self.dice.random() < 0.5
        proxy.black_hole()

        def end() -> None:
            if lost:
                proxy.cut()
            proxy.recover()

        return end

    def slow_down(self, proxy: Proxy) -> Callable[[], None]:
        """Let a link be far and narrow for a while."""
        proxy.delay, proxy.rate = self.dice.uniform(0.1, 1.0), self.dice.uniform(20_000, 200_000)

        def end() -> None:
            proxy.delay, proxy.rate = 0.0, None

        return end

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
        assert not {run.status for run in await project.status()} & {
            "running", "launching", "stopping", "orphaned", "unknown"
        }  # fmt: skip


async def a_mix(scene: Scene, *, seed: int, seconds: float, jobs: int) -> None:
    """Run a random mix of faults for a while; then hold what must hold."""
    mix = await Mix.of(scene, seed)
    project = scene.project()
    mix.jobs(project, jobs)
    await mix.hurt(seconds, project)
    print(f"seed {seed}: {dict(mix.done)}")  # noqa: T201  # shown where it fails
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
