"""Cold probe and cold launch on N hosts against `xargs ssh`, whole processes, in one run.

    python -m bench.fleet --hosts 20 --runs 5

`probe` gathers facts of every host, `launch` has one job on each whose line arrives here. GPUlayer's launch plans,
starts a supervisor that outlives the connection, and keeps a record; ssh's only runs the command.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from tests.sshd import Farm, new_farm

# What a script that gathers facts by hand asks; the hosts share this machine's files, so that it need not be sent.
FACTS = """\
import json, os, platform, shutil, subprocess, sys
facts = {"system": platform.uname()._asdict(), "cpus": os.cpu_count(), "python": sys.version,
         "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "disk": shutil.disk_usage("/").free}
try:
    facts["gpus"] = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
except OSError as error:
    facts["gpus"] = str(error)
print(json.dumps(facts))
"""

SSH_CONFIG = """\
Host *
  IdentityFile {identity}
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
  LogLevel ERROR
"""


class Bench:
    """A farm of hosts, and both ways to reach them."""

    def __init__(self, farm: Farm, hosts: int) -> None:
        self.farm = farm
        self.names = [f"host-{number:03}" for number in range(hosts)]
        for number, name in enumerate(self.names, start=1):
            self.start(name, number)
        self.folder = farm.root / "bench"
        self.folder.mkdir()
        self.inventory = self.folder / "inventory.yaml"
        self.inventory.write_text(
            yaml.safe_dump({"version": 1, "hosts": {name: farm.hosts[name].entry for name in self.names}})
        )
        self.facts = self.folder / "facts.py"
        self.facts.write_text(FACTS)
        config = SSH_CONFIG.format(identity=farm.identity, known_hosts=farm.known_hosts)
        for name in self.names:
            host = farm.hosts[name].host
            config += f"Host {name}\n  HostName {host.address}\n  Port {host.port}\n  User {host.user}\n"
        self.ssh_config = self.folder / "ssh_config"
        self.ssh_config.write_text(config)

    def start(self, name: str, number: int) -> None:
        """Start a host; the first has number 1."""
        del number
        self.farm.host(name)

    def gpulayer(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "gpulayer", *words, "--inventory", str(self.inventory)]

    def xargs_ssh(self, command: str) -> list[str]:
        script = f"printf '%s\\n' {' '.join(self.names)} | xargs -P {len(self.names)} -I@ ssh -F {self.ssh_config} @ {shlex.quote(command)}"
        return ["/bin/sh", "-c", script]

    def jobs(self, turn: int) -> str:
        """A jobs file with one job a host that no earlier turn has run."""
        path = self.folder / "jobs.yaml"
        jobs = {
            f"job-{name}": {
                "accelerator": "cpu",
                "where": {"hosts": [name]},
                "env": {"TURN": str(turn)},
                "command": ["python3", "-c", "print('here')"],
            }
            for name in self.names
        }
        path.write_text(yaml.safe_dump({"version": 1, "name": "bench", "jobs": jobs}))
        return str(path)

    def timed(self, command: Sequence[str], lines: int, mark: str) -> tuple[float, float]:
        """Return wall and CPU seconds of a command and its children; its output holds `mark` at least `lines` times."""
        environment = os.environ | {"HOME": str(self.farm.controller_home), "PYTHONPATH": str(Path.cwd())}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody's programs are compiled anew each time
        errors = self.folder / "errors"
        with (self.folder / "output").open("w+") as output, errors.open("w") as stderr:
            began = time.perf_counter()
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=stderr, env=environment)
            _, status, used = os.wait4(child.pid, 0)
            wall = time.perf_counter() - began
            child.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            text = output.read()
        if child.returncode or text.count(mark) < lines:
            raise RuntimeError(
                f"{command} ended with {child.returncode} and printed:\n{text[-2000:]}\n{errors.read_text()[-2000:]}"
            )
        return wall, used.ru_utime + used.ru_stime


def compare(name: str, runs: int, ways: dict[str, Callable[[int], tuple[float, float]]]) -> dict[str, object]:
    """Run every way in turn, the first turn uncounted, and print medians, and those of each turn's ratios to the last way.

    Each turn begins with another way: whatever one leaves behind for the next (caches, heat) evens out. Ratios are taken
    within a turn, since a machine's speed drifts from one to the next.
    """
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(runs + 1):
        for way in (*list(ways)[turn % len(ways) :], *list(ways)[: turn % len(ways)]):
            taken = ways[way](turn)
            if turn:
                times[way].append(taken)
    medians = {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in times.items()}
    *_, rival = medians
    for way, (wall, cpu) in medians.items():
        pairs = list(zip(times[way], times[rival], strict=True))
        of_wall, of_cpu = (statistics.median(ours[at] / theirs[at] for ours, theirs in pairs) for at in (0, 1))
        ratio = "" if way == rival else f"   {of_wall:.2f} of its wall, {of_cpu:.2f} of its CPU"
        print(f"{name:7} {way:14} wall {wall:6.3f} s   controller CPU {cpu:6.3f} s{ratio}")
    return {way: dict(zip(("wall_s", "cpu_s"), row, strict=True)) for way, row in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the medians here")
    options = parser.parse_args()
    with new_farm() as farm:
        bench = Bench(farm, options.hosts)
        count = options.hosts
        figures = {
            "probe": compare(
                "probe",
                options.runs,
                {
                    "gpulayer": lambda _: bench.timed(bench.gpulayer("probe", "--json"), count, '"reached": true'),
                    "xargs ssh": lambda _: bench.timed(bench.xargs_ssh(f"python3 {bench.facts}"), count, '"cpus"'),
                },
            ),
            "launch": compare(
                "launch",
                options.runs,
                {
                    "gpulayer": lambda turn: bench.timed(
                        bench.gpulayer("apply", "--yes", bench.jobs(turn)), count, "here"
                    ),
                    "xargs ssh": lambda _: bench.timed(bench.xargs_ssh("python3 -c \"print('here')\""), count, "here"),
                },
            ),
        }
    if options.json:
        options.json.write_text(json.dumps({"hosts": count, "runs": options.runs, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
