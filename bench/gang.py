"""Launch of a gang of four ranks over four hosts against four hand-started `ssh HOST torchrun`, whole processes, in one run.

    python -m bench.gang --runs 5

All run the real torchrun and a program that joins the process group (gloo), and end when all four ranks have told the sum
of their all-reduce and have ended. `apply` carries out a plan that was made before, as the commands by hand were written
before; `plan and apply` makes it in the same command. GPUlayer checks besides that the nodes reach each other, and keeps
a record of every rank. As root the hosts have addresses of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import socket
import sys
from pathlib import Path

import yaml

from bench.fleet import Bench, compare
from tests.gangs.network import NAMESPACES, SWITCHES, NetworkHost, Switch
from tests.sshd import ADDRESS, Farm, new_farm

NODES = 4
PROGRAM = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", int(total), flush=True)
dist.destroy_process_group()
"""
SUM = "sum 10"


class Gangs(Bench):
    """Hosts whose interpreter has torch."""

    def __init__(self, farm: Farm, switch: Switch | None) -> None:
        self.switch = switch
        super().__init__(farm, NODES)

    def start(self, name: str, number: int) -> None:
        if self.switch is None:
            self.farm.host(name, python=sys.executable)
        else:
            self.farm.host(name, kind=NetworkHost, address=self.switch.address(number), python=sys.executable)

    def jobs(self, turn: int, way: str = "plan and apply") -> str:
        """A jobs file with one gang that was not run before: neither in an earlier turn nor in another way."""
        path = self.folder / "jobs.yaml"
        job = {
            "accelerator": "cpu",
            "env": {"TURN": f"{turn} {way}"},
            "command": ["python", "-c", PROGRAM],
            "distributed": {"nodes": NODES},
        }
        path.write_text(yaml.safe_dump({"version": 1, "name": "bench", "jobs": {"gang": job}}))
        return str(path)

    def planned(self, turn: int) -> str:
        """A plan of `jobs`."""
        self.timed(self.gpulayer("plan", self.jobs(turn, "apply")), 1, "gang")
        return str(self.folder / ".gpulayer" / "plan.json")

    def by_hand(self) -> list[str]:
        """What one types who has read torchrun's page and gloo's: a free port, an interface, a command for each host."""
        first = self.farm.hosts[self.names[0]].host.address
        with socket.socket() as probe:
            probe.bind((ADDRESS, 0))
            port = probe.getsockname()[1]
        interface = "lo" if self.switch is None else "eth0"
        commands = []
        for rank, name in enumerate(self.names):
            torchrun = [
                "env", f"GLOO_SOCKET_IFNAME={interface}", sys.executable, "-m", "torch.distributed.run",
                "--nnodes", str(NODES), "--node-rank", str(rank), "--nproc-per-node", "1",
                "--master-addr", str(first), "--master-port", str(port),
                "--no-python", sys.executable, "-c", PROGRAM,
            ]  # fmt: skip
            commands.append(f"ssh -F {self.ssh_config} {name} {shlex.quote(shlex.join(torchrun))} &")
        return ["/bin/sh", "-c", "\n".join([*commands, "wait"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the medians here")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        farm = stack.enter_context(new_farm())
        switch = stack.enter_context(Switch()) if NAMESPACES else None
        if switch is not None:
            SWITCHES.append(switch)
        bench = Gangs(farm, switch)
        figures = compare(
            "gang",
            options.runs,
            {
                "apply": lambda turn: bench.timed(bench.gpulayer("apply", bench.planned(turn)), NODES, SUM),
                "plan and apply": lambda turn: bench.timed(
                    bench.gpulayer("apply", "--yes", bench.jobs(turn)), NODES, SUM
                ),
                "ssh": lambda _: bench.timed(bench.by_hand(), NODES, SUM),
            },
        )
    if options.json:
        options.json.write_text(json.dumps({"nodes": NODES, "runs": options.runs, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
