"""What the ranks of the test gangs run. Where torch is not what is tested they do without: its import takes seconds."""

from __future__ import annotations

from pathlib import Path

# The sum of all ranks' numbers plus one, by every rank.
ALL_REDUCE = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", int(total), "of", dist.get_world_size(), flush=True)
open(f"rank{dist.get_rank()}.txt", "w").write(os.environ["MASTER_ADDR"] + " " + os.environ["GLOO_SOCKET_IFNAME"])
dist.destroy_process_group()
"""

# Journals its start, tells that it is there, and waits for a file; whoever is named in FAIL ends as FAIL says instead.
GATED = """\
import os, signal, time
rank = int(os.environ["RANK"])
with open(os.path.expanduser("~/journal"), "a") as journal:
    journal.write(os.environ["GPULAYER_RUN_ID"] + "\\n")
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
who, _, how = os.environ.get("FAIL", "").partition(":")
if who == str(rank):
    while not os.path.exists(os.environ["GATE"] + ".fail"):
        time.sleep(0.02)
    if how == "KILL":
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(int(how))
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.02)
print("done", flush=True)
"""


STAND_IN = Path(__file__).parents[1] / "host" / "torchrun"


def gated(
    folder: Path, *, real: bool = False, nodes: int = 2, processes: int = 1, fail: str = "", **more: object
) -> dict[str, object]:
    """Return a gang that runs until the file `gate` is in `folder`; `fail` is RANK:CODE or RANK:KILL, at gate.fail.

    Unless `real`, a stand-in for torchrun starts the ranks.
    """
    env = {"GATE": str(folder / "gate"), "FAIL": fail}
    return {
        "command": ["python", "-c", GATED],
        "env": env if real else env | {"PYTHONPATH": str(STAND_IN)},
        "distributed": {"nodes": nodes, "processes_per_node": processes},
        **more,
    }
