"""Simulated machines: interpreters that make the shipped probe answer for a Mac or for a CUDA host.

They are real processes and serve real sshd hosts; only what the probe sees of the machine, and the frameworks, are
stand-ins. Nothing here is evidence for hardware.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulayer.gpu.discovery_system import System
from tests.machines.simulate import recorded_system

HERE = Path(__file__).parent
RECORDED = HERE.parent / "recorded"

MAC_MEMORY = 32 << 30
MAC_WORKING_SET = 22906503168
H200_IDS = ("GPU-11111111-1111-4111-8111-111111111111", "GPU-22222222-2222-4222-8222-222222222222")

MAC_TORCH: Mapping[str, Any] = {
    "version": "2.14.1",
    "mps": {"available": True, "product": "ok", "memory": MAC_WORKING_SET},
}
CUDA_TORCH: Mapping[str, Any] = {
    "version": "2.11.0+cu130",
    "cuda": "13.0",
    "arch_list": ["sm_80", "sm_90"],
    "devices": [
        {
            "name": "NVIDIA H200",
            "major": 9,
            "minor": 0,
            "total_memory": 150109880320,
            "is_integrated": 0,
            "uuid": uuid.removeprefix("GPU-"),
        }
        for uuid in H200_IDS
    ],
}

# Runs the program of `-c` after the simulation's own. A shell script, so that sshd and agent start it like any other.
_PYTHON = """#!/bin/sh
# {what}, simulated.
found=
for word do
  shift
  set -- "$@" "$word"
  if test -z "$found" && test "$word" = -c; then
    found=yes
    set -- "$@" 'import sys; sys.path.insert(0, "{folder}"); import simulate; del sys.path[0]; simulate.run("{folder}")'
  fi
done
PATH="{folder}/bin:$PATH" PYTHONPATH="{folder}/site${{PYTHONPATH:+:$PYTHONPATH}}" exec {python} "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """Where a machine lies: `python` is what an inventory names, `bin` holds it and the machine's tools."""

    folder: Path
    python: Path
    bin: Path


def simulated_mac(
    folder: Path,
    *,
    torch: Mapping[str, Any] | None = MAC_TORCH,
    changes: Mapping[str, Any] | None = None,
    python: str = sys.executable,
) -> SimulatedMachine:
    """Build a Mac with Apple Silicon in `folder` (made if need be): apple:0, 32 GiB of unified memory.

    `torch` is what its PyTorch says (None: it has none); `changes` replace keys of its recording.
    """
    return _build(folder, "A Mac", mac_recording(**(changes or {})), torch, python)


def simulated_cuda_host(
    folder: Path, *, torch: Mapping[str, Any] | None = CUDA_TORCH, python: str = sys.executable
) -> SimulatedMachine:
    """Build a Linux host with two NVIDIA H200 in `folder` (made if need be), whose nvidia-smi replays a recording.

    Its memory, disks and CPUs are those of the machine that runs the tests.
    """
    tool = folder / "bin" / "nvidia-smi"
    hidden = ["/proc/driver/nvidia", "/dev/nvidia", "/dev/dxg", "/dev/nvhost", "/etc/nv_tegra", "/sys/class/kfd"]
    machine = _build(folder, "A CUDA host", {"hidden": hidden, "tools": {"nvidia-smi": str(tool)}}, torch, python)
    write_nvidia_smi(tool)
    return machine


def simulated_cpu_host(folder: Path, *, meminfo: Path, python: str = sys.executable) -> SimulatedMachine:
    """Build a host without GPUs in `folder`, on which a launch reads the free memory from the file `meminfo`."""
    return _build(folder, "A host", {"hidden": [], "opened": {"/proc/meminfo": str(meminfo)}}, None, python)


def play(recording: Mapping[str, Any], *, deadline: float = 60.0) -> System:
    """Return the System of the machine that `recording` tells of (`tests.machines.simulate` has its keys)."""
    system: System = recorded_system(System, dict(recording))(deadline=deadline)
    return system


def mac_recording(**changes: Any) -> dict[str, Any]:
    """Return the simulated Mac's recording with some of its keys replaced."""
    return {**json.loads((RECORDED / "simulated-mac.json").read_text()), **changes}


def write_nvidia_smi(
    tool: Path,
    query: str | None = None,
    listing: str | None = None,
) -> None:
    """Write a stand-in nvidia-smi that replays `query` (CSV with a header) and `listing`; two H200 by default."""
    recorded = RECORDED / "nvidia"
    tool.parent.mkdir(parents=True, exist_ok=True)
    (tool.parent / "query.csv").write_text(query or (recorded / "h200x2.query.csv").read_text())
    (tool.parent / "list.txt").write_text(listing or (recorded / "h200x2.nvidia-smi-L.txt").read_text())
    write_program(tool, f"#!{sys.executable} -IS\n{(HERE / 'nvidia_smi.py').read_text()}")


def write_program(path: Path, content: str) -> Path:
    """Write an executable file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


def write_stand_in(site: Path, name: str, said: Mapping[str, Any]) -> None:
    """Put a stand-in of the framework `name` that says `said` into the folder `site`."""
    shutil.copytree(HERE / "stand_ins" / name, site / name, dirs_exist_ok=True)
    (site / name / f"{name}.json").write_text(json.dumps(said))


def write_torch(site: Path, said: Mapping[str, Any]) -> None:
    """Put a stand-in torch that says `said` into the folder `site`."""
    write_stand_in(site, "torch", said)


def _build(
    folder: Path, what: str, recording: Mapping[str, Any], torch: Mapping[str, Any] | None, python: str
) -> SimulatedMachine:
    folder = folder.resolve()
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    (folder / "recording.json").write_text(json.dumps(recording))
    shutil.copy(HERE / "simulate.py", folder / "simulate.py")
    if torch is None:
        write_missing_torch(site)
    else:
        write_torch(site, torch)
    program = write_program(folder / "bin" / "python3", _PYTHON.format(what=what, folder=folder, python=python))
    return SimulatedMachine(folder=folder, python=program, bin=program.parent)


def write_missing(site: Path, name: str) -> None:
    """Make `import <name>` fail as where it is not installed, whatever the interpreter has."""
    (site / name).mkdir(
        exist_ok=True
    )  # a folder: what Python compiles then lies in it, and `site` stays as old as it is
    (site / name / "__init__.py").write_text(f'raise ModuleNotFoundError("No module named {name!r}", name={name!r})\n')


def write_missing_torch(site: Path) -> None:
    """Make `import torch` fail as where it is not installed, whatever the interpreter has."""
    write_missing(site, "torch")
