"""Cancel and the processes of others on a real NVIDIA GPU: what the driver tells is what the record says."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpulayer.gpu.discovery_occupants import occupancies
from gpulayer.gpu.facts import Device
from hardware_tests.evidence import HARDWARE
from hardware_tests.proof import NothingToProveError, recorded, usable_devices
from hardware_tests.ssh import ssh_host
from hardware_tests.test_gpu_smoke import SMOKE
from tests.host.agent_client import AgentClient, AgentError, new_spec

CUDA = SMOKE["test_cuda_independent_jobs"]
SLACK = 256 << 20  # bytes by which a driver's own use of an idle GPU may differ

# Takes GiB of a GPU. With a program it runs that in a daemon: own session, no parent, no environment of the job's.
HOLD = """
import os, sys, time
size, gpu, *program = sys.argv[1:]
if program:
    if os.fork(): time.sleep(1000)
    os.setsid()
    if os.fork(): os._exit(0)
    os.execve(sys.executable, [sys.executable, "-c", *program, size, gpu], {})
os.environ["CUDA_VISIBLE_DEVICES"] = gpu
import torch
held = torch.ones(int(size) << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(1000)
"""


@contextmanager
def stranger(gib: int, gpu: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that GPUlayer did not start, and that has `gib` GiB of the GPU."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(gib), gpu], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def told_of(devices: Sequence[Device]) -> tuple[str, int]:
    """Return the first GPU whose driver tells who is on it, and the bytes of its memory that are free."""
    seen = occupancies()
    for device in devices:
        found = seen.get(device.id)
        if found is not None and found.processes is not None and found.free is not None:
            return device.id, found.free
    raise NothingToProveError("processes_not_told", ", ".join(device.id for device in devices))


def holders(agent: AgentClient) -> dict[str, str]:
    found: dict[str, str] = agent.ask("survey", project="tests", after=None)[0]["holders"]
    return found


async def test_others_make_a_gpu_busy_and_a_cancel_gives_its_memory_back(
    request: pytest.FixtureRequest, folder: Path
) -> None:
    with recorded("cuda-cancel", request.node.nodeid, CUDA.accelerator) as evidence:
        with ssh_host(folder) as reached:
            devices = await usable_devices(reached, CUDA, evidence)
        gpu, free = told_of(devices)
        fields: dict[str, Any] = {"accelerator": "cuda", "devices": [gpu], "slots": None, "grace": 1}
        spec = new_spec(["python", "-c", HOLD, "20", gpu, HOLD], python=sys.executable, **fields)
        with AgentClient(folder, limit=120) as agent:
            agent.hello()
            with stranger(2, gpu) as process:
                assert holders(agent)[gpu].startswith(f"process {process.pid} (")
                with pytest.raises(AgentError) as caught:
                    agent.launch(spec)
                assert caught.value.code == "busy"
                assert process.poll() is None
            agent.launch(spec)
            agent.wait_for(spec["run"], b"held")
            (inside,) = occupancies()[gpu].processes or [{}]
            assert inside["memory_bytes"] > 20 << 30
            assert holders(agent)[gpu] == spec["run"]
            with stranger(2, gpu) as process:
                frames = agent.frames(agent.send("follow", run=spec["run"], offset=0, tail=None))
                seen = next(
                    state for header, _ in frames if (state := header.get("state")) and state["foreign_process"]
                )
                assert [found["pid"] for found in seen["foreign_process"]] == [process.pid]
            begun = time.monotonic()
            agent.ask("cancel", run=spec["run"], grace=1, by="the test")
            *_, (last, _) = frames
            took = time.monotonic() - begun
        left = occupancies()[gpu]
        evidence.extra = {
            "free_bytes": {"before": free, "after": left.free},
            "held_bytes": inside["memory_bytes"],
            "busy": str(caught.value),
            "cancel_s": round(took, 2),
            "left": last["state"]["left"],
        }
        assert last["state"]["status"] == "cancelled"
        assert last["state"]["left"] == {"tree": "empty", "devices": {gpu: "free"}, "processes": []}
        assert left.processes == []
        assert abs(free - (left.free or 0)) < SLACK
        assert took < 30
        evidence.outcome = HARDWARE
