"""The probe against the driver's own tool, against the driver's library, and against PyTorch."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpulayer.gpu.discovery_cuda import ask_cuda
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_system import System
from gpulayer.spec.support import Accelerator
from hardware_tests.evidence import HARDWARE
from hardware_tests.proof import NothingToProveError, probed, recorded, usable_devices
from hardware_tests.ssh import ssh_host
from hardware_tests.test_gpu_smoke import SMOKE

CUDA = SMOKE["test_cuda_independent_jobs"]

FIELDS = ("uuid", "name", "pci.bus_id", "memory.total", "driver_version", "compute_cap", "mig.mode.current")


def nvidia_smi(*words: str) -> list[list[str]]:
    """Return the tool's rows; none where there is no tool or no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=60, check=False)
    return list(csv.reader(done.stdout.splitlines(), skipinitialspace=True)) if done.returncode == 0 else []


async def test_the_probe_agrees_with_nvidia_smi(request: pytest.FixtureRequest, folder: Path) -> None:
    with recorded("probe-nvidia", request.node.nodeid, Accelerator.CUDA) as evidence:
        with ssh_host(folder) as reached:
            await probed(reached, ("torch",), evidence)
        assert evidence.report is not None
        found = [device for device in evidence.report["devices"] if device["accelerator"] == "cuda"]
        rows = [
            dict(zip(FIELDS, row, strict=True))
            for row in nvidia_smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
        ]
        evidence.extra = {"nvidia-smi": rows}
        if not rows:
            assert found == []
            raise NothingToProveError("no_device", "nvidia-smi lists none, and neither does the probe")
        whole = [row for row in rows if row["mig.mode.current"] != "Enabled"]
        assert {device["id"] for device in found if device["parent_id"] is None} == {row["uuid"] for row in whole}
        for row in whole:
            device = next(device for device in found if device["id"] == row["uuid"])
            assert device["name"] == row["name"]
            assert device["driver_version"] == row["driver_version"]
            assert device["compute_capability"] == row["compute_cap"]
            assert row["pci.bus_id"].lower().endswith(device["pci_bus_id"])
            assert device["health"] == "ok"
            if row["memory.total"].isdigit():
                assert device["memory_bytes"] >> 20 == int(row["memory.total"])
            else:
                assert device["memory_kind"] in {"unified", None}
        evidence.outcome = HARDWARE


# The runtime's figures, through another library than the driver's: no visibility variable may hide a GPU from it.
PROPERTIES = """
import json, os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
import torch
found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps({str(one.uuid): [bool(one.is_integrated), one.total_memory, one.major, one.minor] for one in found}))
"""


def torch_properties() -> dict[str, tuple[bool, int, int, int]]:
    """Return what PyTorch says of each GPU, by UUID: integrated, bytes, major, minor."""
    done = subprocess.run([sys.executable, "-c", PROPERTIES], capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, tuple[bool, int, int, int]] = json.loads(done.stdout)
    return found


async def test_whose_memory_a_gpu_has_is_what_the_cuda_driver_says(
    request: pytest.FixtureRequest, folder: Path
) -> None:
    """`integrated` of the driver (cuda_child.py), PyTorch's, and the kind of memory in the report are of one mind."""
    with recorded("probe-cuda", request.node.nodeid, Accelerator.CUDA) as evidence:
        with ssh_host(folder) as reached:
            devices = await usable_devices(reached, CUDA, evidence)
        notes = Notes()
        driver = ask_cuda(System(deadline=60.0), notes, (), folder=None, fresh=True)
        runtime = torch_properties()
        evidence.extra = {"cuda driver": [one._asdict() for one in driver], "torch": runtime}
        assert notes.entries == []
        told = {one.uuid: one for one in driver if one.uuid}
        assert len(told) == len(driver) > 0
        # CUDA shows one MIG instance alone, the first, so that others are not told of.
        seen = {device.id.partition("-")[2]: device for device in devices}
        assert set(told) == set(runtime) <= set(seen)
        assert set(seen) == set(told) or any(device.parent_id for device in devices)
        for uuid, one in told.items():
            integrated, total, major, minor = runtime[uuid]
            assert (one.integrated, one.total, one.compute) == (integrated, total, f"{major}.{minor}")
            assert seen[uuid].memory_kind == ("unified" if integrated else "dedicated")
            assert seen[uuid].compute_capability == (major, minor)
        evidence.outcome = HARDWARE
