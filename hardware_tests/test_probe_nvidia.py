"""The probe against the driver's own tool."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path

import pytest

import gpulayer
from gpulayer.spec.support import Accelerator
from hardware_tests.evidence import HARDWARE
from hardware_tests.proof import NothingToProveError, recorded
from hardware_tests.ssh import ssh_host

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
            evidence.server = reached.server
            (answer,) = await gpulayer.probe(reached.inventory, frameworks=("torch",), options=reached.options)
        assert answer.report is not None, answer.view.error
        evidence.report = answer.report
        found = [device for device in answer.report["devices"] if device["accelerator"] == "cuda"]
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
