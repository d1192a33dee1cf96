"""What a probe must survive: a bare environment, a state folder that is none, a shared deadline, odd Macs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpulayer.gpu import discovery_process
from gpulayer.gpu.discovery import probe
from gpulayer.gpu.discovery_process import run_bounded
from gpulayer.gpu.facts import facts_from_report
from gpulayer.remote.processes import start_of
from tests.machines import MAC_TORCH, mac_recording, play, write_program, write_stand_in

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that finds what is put into `site` beside it before its own site-packages."""
    site = tmp_path / "site"
    site.mkdir()
    return write_program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH="{site}" exec {sys.executable} "$@"\n')


def spoil(python: Path, name: str, source: str) -> None:
    package = python.parent / "site" / name
    package.mkdir()
    (package / "__init__.py").write_text(source)


def codes(report: dict[str, Any]) -> list[str]:
    return [note["code"] for note in report["notes"] if note["subject"] not in {"network", "system"}]


def test_a_bare_environment(tmp_path: Path) -> None:
    """PATH of four folders, no TERM, no language, no home and no folder for temporary files that there were."""
    gone = str(tmp_path / "gone")
    bare = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "POSIX", "HOME": gone, "TMPDIR": gone}
    answer = subprocess.run(
        [sys.executable, "-m", "gpulayer.probe", "--frameworks", "mlx"],
        cwd=ROOT,
        env=bare,
        check=True,
        capture_output=True,
    )
    report = json.loads(answer.stdout)
    assert (report["complete"], answer.stderr) == (True, b"")
    assert "mlx.cpu" in report["capabilities"]
    assert [note["code"] for note in report["notes"] if note["severity"] == "error"] == []


def test_a_state_folder_that_cannot_be_written_costs_only_the_time(python: Path, tmp_path: Path) -> None:
    write_stand_in(python.parent / "site", "torch", MAC_TORCH)
    folder = tmp_path / "state"
    folder.write_text("a file")
    for _ in range(2):
        report = probe(str(python), ["torch"], system=play(mac_recording()), state_root=str(folder), deep=True)
        assert "torch.mps" in report["capabilities"]
        assert report["frameworks"][0]["cached"] is False
    assert folder.read_text() == "a file"


def test_all_children_share_one_deadline(python: Path) -> None:
    names = ("torch", "mlx", "executorch")
    for name in names:
        spoil(python, name, "import time; time.sleep(600)")
    start = time.monotonic()
    report = probe(str(python), names, system=play(mac_recording(), deadline=3.0))
    assert time.monotonic() - start < 20
    assert {entry["status"] for entry in report["frameworks"]} == {"timeout"}
    assert report["complete"] is False
    assert report["devices"][0]["id"] == "apple:0"


def test_what_was_shown_before_the_time_limit_counts(python: Path) -> None:
    write_stand_in(python.parent / "site", "mlx", {"metal": True})
    with (python.parent / "site" / "mlx" / "core.py").open("a") as file:
        file.write("\nimport time\n_quick = matmul\n")
        file.write(
            "def matmul(*words, stream): return _quick(*words, stream=stream) if stream == cpu else time.sleep(600)"
        )
    report = probe(str(python), ["mlx"], system=play(mac_recording(), deadline=5.0))
    assert report["frameworks"][0]["status"] == "timeout"
    assert {"mlx", "mlx.cpu"} <= set(report["capabilities"])
    assert "mlx.metal" not in report["capabilities"]
    note = next(note for note in report["notes"] if note["code"] == "child_timeout")
    assert "a product on the GPU" in note["detail"]


def test_an_answer_without_end_is_cut(python: Path) -> None:
    write_stand_in(python.parent / "site", "mlx", {})
    with (python.parent / "site" / "mlx" / "core.py").open("a") as file:
        file.write("\nimport os, sys\nfor _ in range(100):\n    os.write(int(sys.argv[-1]), b'[' * 65536)\n")
    report = probe(str(python), ["mlx"], system=play(mac_recording()))
    assert {"output_truncated", "child_output_invalid"} <= set(codes(report))
    assert len(json.dumps(report)) < 64 << 10


def test_a_warning_at_the_import_is_no_trouble(python: Path) -> None:
    write_stand_in(python.parent / "site", "torch", MAC_TORCH)
    with (python.parent / "site" / "torch" / "__init__.py").open("a") as file:
        file.write("\nwarnings.warn('A module that was compiled using NumPy 1.x cannot be run in NumPy 2')\n")
    report = probe(str(python), ["torch"], system=play(mac_recording()))
    assert codes(report) == []
    assert "torch.mps" in report["capabilities"]


def test_a_process_that_no_signal_ends_is_abandoned_and_collected_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in state D is: the driver's tool sits in the kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(discovery_process, "_signal_group", lambda _: None)
        start = time.monotonic()
        outcome = run_bounded([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.2)
        assert time.monotonic() - start < 10
    assert (outcome.timed_out, outcome.code, outcome.signal) == (True, None, None)
    (left,) = discovery_process._abandoned
    assert left.poll() is None
    left.kill()
    while start_of(left.pid) is not None:
        time.sleep(0.01)
    assert run_bounded([sys.executable, "-c", ""], timeout=60).code == 0
    assert discovery_process._abandoned == []
    assert left.returncode == -signal.SIGKILL


def test_a_clock_that_jumps_back_changes_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1_796_000_000, 0, -1_000_000))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    report = probe(system=play(mac_recording()))
    assert report["started_at"] == "2026-11-30T00:53:20Z"
    assert 0 <= report["elapsed_ms"] < 60_000
    assert report["complete"] is True


def test_the_page_size_is_what_vm_stat_says() -> None:
    recording = mac_recording()
    told = recording["commands"]["/usr/bin/vm_stat"].replace("16384", "4096")
    recording["commands"]["/usr/bin/vm_stat"] = told
    assert probe(system=play(recording))["host"]["memory_available_bytes"] == 700_000 * 4096


def test_several_cards_of_an_intel_mac(tmp_path: Path) -> None:
    """One of them stands outside the machine; the processor's own graphics are left out."""
    metal = [
        {"name": "Intel UHD Graphics 630", "low_power": True},
        {"name": "AMD Radeon Pro 5300M", "low_power": False},
        {"name": "AMD Radeon RX 6800 XT", "low_power": False},
    ]
    cards = [
        {"sppci_model": "AMD Radeon Pro 5300M", "spdisplays_vram": "4 GB"},
        {"sppci_model": "AMD Radeon RX 6800 XT", "spdisplays_vram": "16 GB"},
    ]
    recording = mac_recording(children={"metal_child": {"devices": metal}})
    recording["self"] |= {"machine": "x86_64"}
    for name in ("hw.optional.arm64", "sysctl.proc_translated"):
        del recording["sysctl"][name]
    profiler = "/usr/sbin/system_profiler SPDisplaysDataType -json"
    recording["commands"][profiler] = json.dumps({"SPDisplaysDataType": cards})
    report = probe(str(tmp_path / "none"), system=play(recording))
    found = [(device["id"], device["memory_kind"], device["memory_bytes"]) for device in report["devices"][:-1]]
    assert found == [("apple:0", "dedicated", 4 * GIB), ("apple:1", "dedicated", 16 * GIB)]
    assert len(facts_from_report(report).devices) == 3
