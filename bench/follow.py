"""A job that writes 1 GB as fast as it can, followed slowly: what the follower costs it, and whether every byte comes.

    python -m bench.follow [ROUNDS]

Each round runs the job alone, then with a follower that takes about 10 MB/s until the job has ended and then the rest.
The job measures itself. The order within a round changes, since disks and neighbours do too.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.host.agent_client import AgentClient, new_spec

BYTES = 1_000_000_000
CHUNK = 1 << 20
SLOWLY = 10_000_000  # bytes a second

JOB = """
import hashlib, os, sys, time
block, digest, left = os.urandom(%(chunk)d), hashlib.sha256(), %(bytes)d
began = time.perf_counter()
while left:
    left -= os.write(1, block[: min(left, len(block))])
took = time.perf_counter() - began
whole, rest = divmod(%(bytes)d, len(block))
for _ in range(whole):
    digest.update(block)
digest.update(block[:rest])
with open(sys.argv[1], "w") as file:
    file.write(f"{took} {digest.hexdigest()}")
""" % {"chunk": CHUNK, "bytes": BYTES}


def run(agent: AgentClient, folder: Path, name: str, *, followed: bool) -> tuple[float, bool]:
    """Seconds that the job wrote for, and whether its log is what it wrote."""
    told = folder / f"{name}.told"
    spec = new_spec([sys.executable, "-c", JOB, str(told)], job=name)
    agent.launch(spec)
    digest, received, begun = hashlib.sha256(), 0, time.perf_counter()
    if not followed:
        while not told.exists() or not told.read_text():
            time.sleep(0.05)
    for _, payload in agent.frames(agent.send("follow", run=spec["run"], offset=0, tail=None)):
        digest.update(payload)
        received += len(payload)
        if not told.exists():
            time.sleep(max(0.0, begun + received / SLOWLY - time.perf_counter()))
    took, written = told.read_text().split()
    (agent.run_folder(spec["run"]) / "output.log").unlink()
    return float(took), written == digest.hexdigest() and received == BYTES


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    alone, beside, equal = [], [], True
    with tempfile.TemporaryDirectory() as folder, AgentClient(Path(folder), limit=300) as agent:
        agent.hello()
        for number in range(rounds):
            for followed in (False, True) if number % 2 else (True, False):
                took, same = run(agent, Path(folder), f"job-{number}-{int(followed)}", followed=followed)
                (beside if followed else alone).append(took)
                equal = equal and same
                print(
                    f"round {number}: {'followed' if followed else 'alone   '} {took:6.2f} s, bytes equal: {same}",
                    flush=True,
                )
    slower = statistics.median(beside) / statistics.median(alone) - 1
    print(
        f"median alone {statistics.median(alone):.2f} s, followed {statistics.median(beside):.2f} s: {slower:+.1%}; all equal: {equal}"
    )


if __name__ == "__main__":
    main()
