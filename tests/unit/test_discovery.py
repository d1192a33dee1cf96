"""The torch probe: real children of a stand-in interpreter, which find stand-in torches, and the real torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpulayer.gpu import discovery, discovery_frameworks
from gpulayer.gpu.discovery import probe
from gpulayer.remote.processes import start_of
from tests.machines import (
    CUDA_TORCH,
    MAC_TORCH,
    mac_recording,
    play,
    simulated_cuda_host,
    simulated_mac,
    write_missing_torch,
    write_program,
    write_torch,
)

GPU = "GPU-aaaaaaaa-0000-4000-8000-000000000001"
INTERPRETER = {"host_child": {"executable": sys.executable, "real_path": sys.executable, "version": "3.12.1"}}
NVML = {"init": 0, "driver": "580.1", "cuda": 13000}
GIB = 1 << 30


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that finds what is put into `site` beside it before its own site-packages."""
    site = tmp_path / "site"
    site.mkdir()
    return write_program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH="{site}" exec {sys.executable} "$@"\n')


def mac(python: Path, said: Mapping[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Probe the simulated Mac, whose interpreter has a torch that says `said`."""
    if said is not None:
        write_torch(python.parent / "site", said)
    return probe(str(python), ["torch"], system=play(mac_recording(**changes)))


def broken(python: Path, source: str, **options: Any) -> dict[str, Any]:
    """Probe a simulated Mac whose torch is `source`."""
    package = python.parent / "site" / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    report = probe(str(python), ["torch"], system=play(mac_recording()), **options)
    assert [device["id"] for device in report["devices"]] == ["apple:0", "cpu:0"]
    return report


def linux(python: Path, said: Mapping[str, Any], nvml: Mapping[str, Any] | None, **files: str) -> dict[str, Any]:
    """Probe a simulated Linux host with 64 GiB, where NVML says `nvml` (None: there is no driver)."""
    write_torch(python.parent / "site", said)
    known = {"/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB", **files}
    if nvml is not None:
        known["/proc/driver/nvidia/version"] = "580.1"
    children = {**INTERPRETER, "nvml_child": dict(nvml or {})}
    return probe(
        str(python), ["torch"], system=play({"self": {"platform": "linux"}, "files": known, "children": children})
    )


def codes(report: dict[str, Any], severity: str | None = None) -> list[str]:
    return [note["code"] for note in report["notes"] if severity is None or note["severity"] == severity]


def torch_of(report: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = report["frameworks"][0]
    return entry


def test_mps_that_computes_rightly_is_a_capability(python: Path) -> None:
    report = mac(python, MAC_TORCH)
    assert report["capabilities"] == ["torch", "torch.distributed.gloo", "torch.mps"]
    assert torch_of(report)["status"] == "ok"
    assert torch_of(report)["detail"]["mps_usable"] is True
    assert codes(report, "error") == codes(report, "warning") == []
    assert report["complete"] is True


def test_mps_built_but_unavailable_is_a_note_and_the_gpu_stays(python: Path) -> None:
    report = mac(python, {**MAC_TORCH, "mps": {"available": False}})
    assert "torch.mps" not in report["capabilities"]
    assert "torch" in report["capabilities"]
    assert codes(report, "warning") == ["mps_built_unavailable"]
    assert (report["devices"][0]["id"], report["devices"][0]["health"]) == ("apple:0", "ok")


def test_torch_built_without_mps(python: Path) -> None:
    report = mac(python, {**MAC_TORCH, "mps": None})
    assert codes(report, "warning") == ["mps_not_built"]
    assert torch_of(report)["detail"]["mps_usable"] is False


@pytest.mark.parametrize(
    ("product", "code"),
    [("wrong", "mps_wrong_result"), ("MPS backend out of memory", "mps_alloc_failed")],
)
def test_mps_that_is_available_but_does_not_work_is_no_capability(python: Path, product: str, code: str) -> None:
    report = mac(python, {**MAC_TORCH, "mps": {"available": True, "product": product, "memory": GIB}})
    assert "torch.mps" not in report["capabilities"]
    assert codes(report, "error") == [code]
    assert report["devices"][0]["health"] == "degraded"
    assert torch_of(report)["detail"]["mps_usable"] is False


def test_torch_knows_the_usable_memory_where_metal_does_not_answer(python: Path) -> None:
    report = mac(python, MAC_TORCH, children={"metal_child": {"devices": []}})
    device = report["devices"][0]
    assert (device["usable_memory_bytes"], device["usable_source"]) == (MAC_TORCH["mps"]["memory"], "torch")
    assert device["health"] == "unknown"


def test_missing_torch_is_a_note_and_no_failure(python: Path) -> None:
    write_missing_torch(python.parent / "site")
    report = mac(python, None)
    assert torch_of(report)["status"] == "not_installed"
    assert "torch_not_installed" in codes(report, "info")
    assert codes(report, "error") == []
    assert report["capabilities"] == []
    assert report["complete"] is True


def test_a_missing_part_of_torch_is_no_missing_torch(python: Path) -> None:
    report = broken(python, "import module_that_is_not_there")
    assert torch_of(report)["status"] == "import_failed"
    note = next(note for note in report["notes"] if note["code"] == "torch_import_failed")
    assert "module_that_is_not_there" in note["detail"]


@pytest.mark.parametrize(
    ("source", "status", "signal"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("import os; os.abort()", "crashed", "SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "crashed", "SIGILL"),
        ("import os; os._exit(0)", "crashed", None),
        ("import sys; sys.exit(3)", "import_failed", None),
        ("import sys; raise KeyboardInterrupt", "import_failed", None),
        ("raise ImportError('x' * 100_000)", "import_failed", None),
        ("import sys; sys.setrecursionlimit(50); exec('f = lambda: f()\\nf()')", "import_failed", None),
    ],
)
def test_a_torch_that_ends_its_process_costs_a_note(python: Path, source: str, status: str, signal: str | None) -> None:
    report = broken(python, source)
    assert (torch_of(report)["status"], torch_of(report)["signal"]) == (status, signal)
    assert codes(report, "error") == ["child_crashed" if status == "crashed" else "torch_import_failed"]
    assert report["capabilities"] == []


def test_a_torch_that_crashes_while_it_computes_keeps_what_it_showed_before(python: Path) -> None:
    write_torch(python.parent / "site", MAC_TORCH)
    with (python.parent / "site" / "torch" / "__init__.py").open("a") as file:
        file.write("\nimport os\nmps.recommended_max_memory = lambda: os.abort()\n")
    report = mac(python, None)
    assert (torch_of(report)["status"], torch_of(report)["signal"]) == ("crashed", "SIGABRT")
    assert report["capabilities"] == ["torch", "torch.distributed.gloo"]
    assert torch_of(report)["detail"]["mps_usable"] is None
    assert "torch.backends.mps" in report["notes"][-1]["detail"]


def test_a_torch_that_hangs_is_cut_off_even_where_it_ignores_signals(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frameworks = discovery_frameworks._FRAMEWORKS
    monkeypatch.setitem(frameworks, "torch", frameworks["torch"]._replace(limit=0.5))
    start = time.monotonic()
    report = broken(python, "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    assert time.monotonic() - start < 10
    assert torch_of(report)["status"] == "timeout"
    assert codes(report, "error") == ["child_timeout"]
    assert report["complete"] is False


def test_a_torch_that_floods_its_output_still_answers(python: Path) -> None:
    write_torch(python.parent / "site", MAC_TORCH)
    with (python.parent / "site" / "torch" / "__init__.py").open("a") as file:
        file.write("\nimport os\nfor _ in range(64):\n    os.write(1, b'x' * 65536)\n    os.write(2, b'y' * 65536)\n")
    report = mac(python, None)
    assert "torch.mps" in report["capabilities"]
    assert codes(report, "warning") == ["output_truncated"]


def test_what_torch_does_at_exit_is_neither_heard_nor_waited_for(python: Path) -> None:
    write_torch(python.parent / "site", MAC_TORCH)
    with (python.parent / "site" / "torch" / "__init__.py").open("a") as file:
        file.write("\nimport atexit, os, time\nprint('[\"mps_built\", false]')\n")
        file.write("atexit.register(lambda: time.sleep(600))\n")
    report = mac(python, None)
    assert torch_of(report)["status"] == "ok"
    assert "torch.mps" in report["capabilities"]


def test_a_grandchild_that_holds_the_pipes_is_not_waited_for(python: Path) -> None:
    write_torch(python.parent / "site", MAC_TORCH)
    pid_file = python.parent / "pid"
    with (python.parent / "site" / "torch" / "__init__.py").open("a") as file:
        file.write(
            "\nimport os, time\nif os.fork() == 0:\n"
            f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
            f"while not os.path.exists({str(pid_file)!r}):\n    time.sleep(0.01)\n"
        )
    start = time.monotonic()
    report = mac(python, None)
    assert "torch.mps" in report["capabilities"]
    assert time.monotonic() - start < 10
    wait_until_gone(int(pid_file.read_text()))


def wait_until_gone(pid: int) -> None:
    """The grandchild was in the child's process group, which is killed with it."""
    limit = time.monotonic() + 5
    while start_of(pid) is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert start_of(pid) is None


def test_a_torn_answer_is_told_and_the_rest_is_kept(python: Path) -> None:
    write_torch(python.parent / "site", MAC_TORCH)
    tear = "import os, sys\nos.write(int(sys.argv[-1]), b'[\"version\", ' + b'[' * 100_000 + b'\\n{}\\n7\\n')\n"
    init = python.parent / "site" / "torch" / "__init__.py"
    init.write_text(init.read_text() + tear)
    report = mac(python, None)
    assert codes(report, "error") == ["child_output_invalid"]
    assert "torch.mps" in report["capabilities"]


def test_an_answer_that_breaks_off_is_told(python: Path) -> None:
    report = broken(python, 'import os, sys\nos.write(int(sys.argv[-1]), b\'["version", "2.1\')\nos.abort()')
    assert codes(report, "error") == ["child_crashed", "child_output_invalid"]
    assert torch_of(report)["version"] is None


def test_torch_is_not_taken_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path
) -> None:
    (tmp_path / "torch.py").write_text("__version__ = 'shadow'")
    monkeypatch.chdir(tmp_path)
    report = mac(python, MAC_TORCH)
    assert torch_of(report)["version"] == MAC_TORCH["version"]


def test_an_interpreter_that_cannot_be_started(tmp_path: Path) -> None:
    report = probe(str(tmp_path / "no" / "python"), ["torch"], system=play(mac_recording()))
    assert torch_of(report)["status"] == "not_probed"
    assert "python_unusable" in codes(report, "error")
    assert report["host"]["python"]["executable"] is None
    assert report["devices"][0]["id"] == "apple:0"


def test_a_framework_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a framework: tensorflow"):
        probe(sys.executable, ["tensorflow"])


def gpu(**changes: Any) -> dict[str, Any]:
    return {
        "codes": {},
        "uuid": GPU,
        "name": "NVIDIA X",
        "memory": [24 * GIB, 20 * GIB],
        "pci": "00000000:01:00.0",
        "compute": "8.6",
        "ats": False,
        "mig": False,
        "instances": [],
        **changes,
    }


def cuda(**changes: Any) -> dict[str, Any]:
    device = {"name": "NVIDIA X", "major": 8, "minor": 6, "total_memory": 23 * GIB, "is_integrated": 0}
    return {"version": "2.14.1", "cuda": "13.0", "devices": [{**device, "uuid": GPU[4:], **changes}]}


def test_a_cuda_device_is_joined_with_what_torch_says_of_it(python: Path) -> None:
    report = linux(python, cuda(), {**NVML, "gpu:0": gpu()})
    device = report["devices"][0]
    assert [device["id"] for device in report["devices"]] == [GPU, "cpu:0"]
    assert (device["memory_bytes"], device["usable_memory_bytes"], device["usable_source"]) == (
        24 * GIB,
        23 * GIB,
        "torch",
    )
    assert (device["memory_kind"], device["free_memory_bytes"]) == ("dedicated", 20 * GIB)
    assert report["capabilities"] == ["torch", "torch.cuda", "torch.distributed.gloo", "torch.distributed.nccl"]


def test_integrated_wins_over_the_figure_of_the_driver(python: Path) -> None:
    report = linux(python, cuda(is_integrated=1, total_memory=45 * GIB), {**NVML, "gpu:0": gpu(memory=[8 * GIB, GIB])})
    device = report["devices"][0]
    assert (device["memory_kind"], device["memory_bytes"]) == ("unified", 64 * GIB)
    assert (device["usable_memory_bytes"], device["free_memory_bytes"]) == (45 * GIB, 32 * GIB)
    assert "memory_carveout_ignored" in codes(report)


def test_more_usable_than_there_is_is_clamped_and_noted(python: Path) -> None:
    report = linux(python, cuda(total_memory=25 * GIB), {**NVML, "gpu:0": gpu()})
    assert report["devices"][0]["usable_memory_bytes"] == 24 * GIB
    assert "usable_exceeds_memory" in codes(report)


@pytest.mark.parametrize(
    ("product", "code", "health"),
    [
        ("wrong", "cuda_wrong_result", "degraded"),
        ("CUDA error: no kernel image is available for execution on the device", "gpu_arch_unsupported", "ok"),
        ("CUDA error: an illegal memory access was encountered", "cuda_kernel_failed", "degraded"),
        ("CUDA out of memory. Tried to allocate 2.00 MiB", "cuda_kernel_failed", "ok"),
    ],
)
def test_a_gpu_that_does_not_compute_is_no_capability(python: Path, product: str, code: str, health: str) -> None:
    report = linux(python, cuda(product=product), {**NVML, "gpu:0": gpu()})
    assert "torch.cuda" not in report["capabilities"]
    assert (report["devices"][0]["health"], code in codes(report)) == (health, True)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"version": "2.14.1+cpu"}, "torch_cpu_build"),
        ({"version": "2.14.1", "cuda": "13.0"}, "cuda_built_unavailable"),
        (
            {**cuda(), "warnings": ["CUDA initialization: The NVIDIA driver on your system is too old (found 12080)."]},
            "driver_too_old",
        ),
    ],
)
def test_why_torch_does_not_see_the_gpu(python: Path, said: dict[str, Any], code: str) -> None:
    report = linux(python, said, {**NVML, "gpu:0": gpu()})
    assert code in codes(report)
    assert "torch.cuda" not in report["capabilities"]
    assert report["devices"][0]["id"] == GPU


def test_a_rocm_build_is_never_cuda(python: Path) -> None:
    node = "cpu_cores_count 0\nsimd_count 192\nlocation_id 49920\ndomain 0\n"
    card = "/sys/bus/pci/devices/0000:c3:00.0"
    files = {
        "/sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 16\nsimd_count 0\n",
        "/sys/class/kfd/kfd/topology/nodes/1/properties": node,
        f"{card}/mem_info_vram_total": str(48 * GIB),
        f"{card}/mem_info_vram_used": str(GIB),
    }
    said = {
        **cuda(pci_domain_id=0, pci_bus_id=0xC3, pci_device_id=0, gcnArchName="gfx1100"),
        "cuda": None,
        "hip": "6.4",
    }
    report = linux(python, said, None, **files)
    device = report["devices"][0]
    assert (device["id"], device["accelerator"], device["memory_kind"]) == ("pci:0000:c3:00.0", "rocm", "dedicated")
    assert (device["memory_bytes"], device["free_memory_bytes"]) == (48 * GIB, 23 * GIB)
    assert (device["architecture"], device["select_env"]) == ("gfx1100", {"HIP_VISIBLE_DEVICES": "0"})
    assert "torch.rocm" in report["capabilities"]
    assert "torch.cuda" not in report["capabilities"]
    assert "rocm_reports_as_cuda" in codes(report)


def test_a_gpu_that_only_torch_lists_is_a_device(python: Path) -> None:
    report = linux(python, cuda(), None)
    device = report["devices"][0]
    assert (device["id"], device["memory_kind"], device["memory_bytes"]) == (GPU, "dedicated", 23 * GIB)
    assert device["select_env"]["CUDA_VISIBLE_DEVICES"] == GPU


def test_beside_both_drivers_a_rocm_build_speaks_for_amd_alone(python: Path) -> None:
    card = "/sys/bus/pci/devices/0000:c3:00.0"
    files = {
        "/sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 192\nlocation_id 49920\ndomain 0\n",
        f"{card}/mem_info_vram_total": str(48 * GIB),
    }
    said = {**cuda(pci_domain_id=0, pci_bus_id=0xC3, pci_device_id=0), "cuda": None, "hip": "6.4"}
    report = linux(python, said, {**NVML, "gpu:0": gpu()}, **files)
    found = {device["accelerator"]: device for device in report["devices"]}
    assert (found["cuda"]["id"], found["cuda"]["usable_source"]) == (GPU, "nvml")
    assert (found["rocm"]["id"], found["rocm"]["usable_source"]) == ("pci:0000:c3:00.0", "torch")
    assert {"torch.rocm", "torch.cuda"} & set(report["capabilities"]) == {"torch.rocm"}


@pytest.mark.parametrize("value", ["7", "", "-1", "0,0", GPU, "MIG-aaaaaaaa-0000-4000-8000-000000000009"])
def test_visibility_that_an_rc_file_sets_is_noted_and_not_obeyed(
    python: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    write_torch(python.parent / "site", {**cuda()})
    init = python.parent / "site" / "torch" / "__init__.py"
    init.write_text(init.read_text() + "\nimport os\n_devices *= 'CUDA_VISIBLE_DEVICES' not in os.environ\n")
    files = {"/proc/driver/nvidia/version": "580.1"}
    children = {**INTERPRETER, "nvml_child": {**NVML, "gpu:0": gpu()}}
    system = play({"self": {"platform": "linux"}, "files": files, "children": children})
    report = probe(str(python), ["torch"], system=system)
    assert "device_hidden_by_env" in codes(report)
    assert "torch.cuda" in report["capabilities"]


def test_an_answer_is_used_again_until_something_that_it_stands_on_changes(tmp_path: Path) -> None:
    kept = tmp_path / "state"
    kept.mkdir()
    machine = simulated_mac(tmp_path / "mac")

    def cached(**options: Any) -> bool:
        report = probe(str(machine.python), ["torch"], system=play(mac_recording()), state_root=str(kept), **options)
        assert "torch.mps" in report["capabilities"]
        return bool(torch_of(report)["cached"])

    assert [cached(), cached(), cached(fresh=True)] == [False, True, False]
    assert [path.stat().st_mode & 0o777 for path in kept.iterdir()] == [0o600]
    site = tmp_path / "mac" / "site"
    os.utime(site, ns=(1, 1))
    assert [cached(), cached()] == [False, True]
    (kept / "frameworks.json").write_text("[" * 100_000)
    assert [cached(), cached()] == [False, True]
    boot = mac_recording()["sysctl"] | {"kern.bootsessionuuid": "another"}
    rebooted = play(mac_recording(sysctl=boot))
    report = probe(str(machine.python), ["torch"], system=rebooted, state_root=str(kept))
    assert torch_of(report)["cached"] is False


def test_what_may_be_otherwise_next_time_is_asked_again(python: Path, tmp_path: Path) -> None:
    write_torch(python.parent / "site", {**MAC_TORCH, "mps": {"available": False}})
    for _ in range(2):
        report = probe(str(python), ["torch"], system=play(mac_recording()), state_root=str(tmp_path))
        assert torch_of(report)["cached"] is False


def test_a_simulated_mac_and_a_simulated_cuda_host_answer_to_a_shipped_probe(tmp_path: Path) -> None:
    """The agent's own interpreter options; the modules are found as an import system finds them on the host."""
    machines = {
        simulated_mac(tmp_path / "mac").python: ("apple:0", "torch.mps"),
        simulated_cuda_host(tmp_path / "cuda").python: (f"GPU-{CUDA_TORCH['devices'][0]['uuid']}", "torch.cuda"),
    }
    for program, (device, capability) in machines.items():
        report = shipped_probe(program)
        assert report["devices"][0]["id"] == device
        assert capability in report["capabilities"]
        assert report["host"]["python"]["executable"] == str(program)


def shipped_probe(python: Path) -> dict[str, Any]:
    source = (
        f"import json, sys; sys.path.append({str(Path(discovery.__file__).parents[2])!r})\n"
        "from gpulayer.gpu.discovery import probe\nprint(json.dumps(probe(None, ['torch'])))"
    )
    answer = subprocess.run(
        [python, "-I", "-S", "-X", "utf8", "-c", source], check=True, capture_output=True, text=True
    )
    report: dict[str, Any] = json.loads(answer.stdout)
    return report
