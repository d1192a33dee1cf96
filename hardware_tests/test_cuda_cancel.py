"""Cancel and the processes of others on a real NVIDIA GPU: what the driver tells is what the record says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpulayer.gpu.discovery_occupants import occupancies
from tests.host.agent_client import AgentClient, AgentError, new_spec

# Takes GiB of the GPU in a daemon: own session, no parent, no environment of the job's.
HOLD = """
import os, sys, time
if len(sys.argv) > 2:
    if os.fork(): time.sleep(1000)
    os.setsid()
    if os.fork(): os._exit(0)
    os.execve(sys.executable, [sys.executable, "-c", sys.argv[2], sys.argv[1]], {})
import torch
held = torch.ones(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(1000)
"""


@contextmanager
def stranger(gib: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that GPUlayer did not start, and that has `gib` GiB of the first GPU."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(gib)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def device() -> str:
    """The first GPU whose driver tells who is on it."""
    found = next((name for name, seen in occupancies().items() if seen.processes is not None), None)
    if found is None or importlib.util.find_spec("torch") is None:
        pytest.skip("[no_device] no NVIDIA driver that tells its processes, or no PyTorch")
    return found


def holders(agent: AgentClient) -> dict[str, str]:
    found: dict[str, str] = agent.ask("survey", project="tests", after=None)[0]["holders"]
    return found


def test_others_make_a_gpu_busy_and_a_cancel_gives_its_memory_back(folder: Path) -> None:
    gpu = device()
    free = occupancies()[gpu].free
    assert free is not None
    fields: dict[str, Any] = {"accelerator": "cuda", "devices": [gpu], "slots": None, "grace": 1}
    spec = new_spec(["python", "-c", HOLD, "20", HOLD], python=sys.executable, **fields)
    with AgentClient(folder, limit=120) as agent:
        agent.hello()
        with stranger(2) as process:
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
        with stranger(2) as process:
            frames = agent.frames(agent.send("follow", run=spec["run"], offset=0, tail=None))
            seen = next(state for header, _ in frames if (state := header.get("state")) and state["foreign_process"])
            assert [found["pid"] for found in seen["foreign_process"]] == [process.pid]
        begun = time.monotonic()
        agent.ask("cancel", run=spec["run"], grace=1, by="the test")
        *_, (last, _) = frames
        took = time.monotonic() - begun
        assert last["state"]["status"] == "cancelled"
        assert last["state"]["left"] == {"tree": "empty", "devices": {gpu: "free"}, "processes": []}
        assert occupancies()[gpu].processes == []
        assert abs(free - (occupancies()[gpu].free or 0)) < 256 << 20
        assert took < 30
