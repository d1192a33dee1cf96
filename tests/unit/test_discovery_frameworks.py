"""MLX, ExecuTorch and Intel's GPUs: real children of a stand-in interpreter, which find stand-ins; and the real MLX."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpulayer.gpu import discovery_frameworks
from gpulayer.gpu.discovery import probe
from gpulayer.spec.support import CAPABILITIES
from tests.machines import MAC_TORCH, mac_recording, play, write_missing, write_program, write_stand_in

GIB = 1 << 30
METAL = {
    "metal": True,
    "gpu": {
        "device_name": "Apple M2 Max",
        "architecture": "applegpu_g14s",
        "max_buffer_length": 16 * GIB,
        "max_recommended_working_set_size": 21 * GIB,
        "memory_size": 32 * GIB,
    },
}
NO_METAL: dict[str, Any] = {"metal_child": {"devices": []}}
GPU = "GPU-aaaaaaaa-0000-4000-8000-000000000001"
SMI = {"codes": {}, "uuid": GPU, "name": "NVIDIA X", "memory": [24 * GIB, 20 * GIB], "pci": "00000000:01:00.0",
       "compute": "8.6", "ats": False, "mig": False, "instances": []}  # fmt: skip
MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that finds what is put into `site` beside it before its own site-packages.

    It compiles nothing there (-B): the time of that folder is a fact on which kept answers stand.
    """
    site = tmp_path / "site"
    site.mkdir()
    return write_program(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH="{site}" exec {sys.executable} -B "$@"\n')


def say(python: Path, name: str, said: Mapping[str, Any]) -> None:
    write_stand_in(python.parent / "site", name, said)


def mac(python: Path, *names: str, **changes: Any) -> dict[str, Any]:
    return probe(str(python), names, system=play(mac_recording(**changes)))


def linux(python: Path, *names: str, gpu: bool = False) -> dict[str, Any]:
    files = {"/proc/meminfo": MEMINFO}
    children: dict[str, Any] = {}
    if gpu:
        files["/proc/driver/nvidia/version"] = "580.1"
        children["nvml_child"] = {"init": 0, "driver": "580.1", "cuda": 13000, "gpu:0": SMI}
    recording = {"self": {"platform": "linux"}, "files": files, "children": children}
    return probe(str(python), names, system=play(recording))


def codes(report: dict[str, Any]) -> list[str]:
    own = {"network", "nvidia", "system"}
    return [note["code"] for note in report["notes"] if note["subject"] not in own]


def test_mlx_on_the_apple_gpu(python: Path) -> None:
    say(python, "mlx", METAL)
    report = mac(python, "mlx")
    assert report["capabilities"] == ["mlx", "mlx.cpu", "mlx.distributed.ring", "mlx.metal"]
    entry = report["frameworks"][0]
    assert (entry["status"], entry["detail"]["gpu_usable"], entry["detail"]["cuda"]) == ("ok", True, False)
    assert report["devices"][0]["architecture"] == "applegpu_g14s"
    assert codes(report) == []


@pytest.mark.parametrize("old", [False, True])
def test_mlx_tells_the_usable_memory_where_neither_metal_nor_torch_does(python: Path, old: bool) -> None:
    say(python, "mlx", {**METAL, "old": old})
    sysctl = {**mac_recording()["sysctl"], "iogpu.wired_limit_mb": "10240"}
    device = mac(python, "mlx", children=NO_METAL, sysctl=sysctl)["devices"][0]
    assert (device["usable_memory_bytes"], device["usable_source"]) == (21 * GIB, "mlx")
    assert device["max_buffer_bytes"] == 16 * GIB
    say(python, "torch", MAC_TORCH)
    device = mac(python, "torch", "mlx", children=NO_METAL, sysctl=sysctl)["devices"][0]
    assert (device["usable_memory_bytes"], device["usable_source"]) == (MAC_TORCH["mps"]["memory"], "torch")
    device = mac(python, children=NO_METAL, sysctl=sysctl)["devices"][0]
    assert (device["usable_memory_bytes"], device["usable_source"]) == (10 * GIB, "sysctl")


def test_no_deprecated_call_of_mlx_is_made(python: Path) -> None:
    """The stand-in prints, as MLX does, where the old name is used although the new one is there."""
    say(python, "mlx", METAL)
    with (python.parent / "site" / "mlx" / "core.py").open("a") as file:
        file.write("\ndef _no(): raise SystemExit('deprecated')\nmetal.device_info = _no\n")
    report = mac(python, "mlx", children=NO_METAL)
    assert report["frameworks"][0]["detail"]["device_name"] == "Apple M2 Max"


@pytest.mark.parametrize(
    ("product", "code"), [("wrong", "mlx_wrong_result"), ("[metal::malloc] out of memory", "mlx_gpu_failed")]
)
def test_a_gpu_that_mlx_cannot_use_is_no_capability(python: Path, product: str, code: str) -> None:
    say(python, "mlx", {**METAL, "gpu_product": product})
    report = mac(python, "mlx")
    assert report["capabilities"] == ["mlx", "mlx.cpu", "mlx.distributed.ring"]
    assert report["devices"][0]["health"] == "degraded"
    assert codes(report) == [code]


def test_mlx_that_computes_wrongly_on_the_cpu_is_no_capability(python: Path) -> None:
    say(python, "mlx", {"cpu_product": "wrong"})
    report = linux(python, "mlx")
    assert report["capabilities"] == []
    assert codes(report) == ["mlx_wrong_result"]


def test_mlx_on_cuda(python: Path) -> None:
    say(python, "mlx", {"cuda": True, "gpu": {"device_name": "NVIDIA X"}, "distributed": ["ring", "nccl"]})
    report = linux(python, "mlx", gpu=True)
    assert "mlx.cuda" in report["capabilities"]
    assert "mlx.distributed.nccl" in report["capabilities"]
    assert report["devices"][0]["usable_source"] == "nvml"
    say(python, "mlx", {})
    report = linux(python, "mlx", gpu=True)
    assert codes(report) == ["mlx_no_gpu"]
    assert codes(linux(python, "mlx")) == []


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ('raise ModuleNotFoundError("No module named \'mlx\'", name="mlx")', "not_installed", "mlx_not_installed"),
        ("raise ImportError('libmlx.so: cannot open shared object file')", "import_failed", "mlx_backend_missing"),
        ("raise ValueError('what')", "import_failed", "mlx_import_failed"),
        ("import os; os.abort()", "crashed", "child_crashed"),
    ],
)
def test_an_mlx_that_cannot_be_imported(python: Path, source: str, status: str, code: str) -> None:
    package = python.parent / "site" / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    report = mac(python, "mlx")
    assert (report["frameworks"][0]["status"], codes(report)) == (status, [code])
    assert report["capabilities"] == []
    assert report["devices"][0]["id"] == "apple:0"


def test_mlx_without_its_core_lacks_a_backend(python: Path) -> None:
    """As where only mlx-cpu is installed."""
    package = python.parent / "site" / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert codes(mac(python, "mlx")) == ["mlx_backend_missing"]


@pytest.mark.linux("a machine without an Apple GPU; hardware_tests prove that one")
def test_the_real_mlx_of_this_interpreter() -> None:
    report = probe(sys.executable, ["mlx"], deep=True)
    entry = report["frameworks"][0]
    assert entry["status"] == "ok"
    assert entry["version"]
    assert {"mlx", "mlx.cpu", "mlx.distributed.ring"} <= set(report["capabilities"])
    ops = entry["detail"]["ops"]
    assert entry["detail"]["ops_device"] == "cpu:0"
    assert {key for key, result in ops.items() if result != "ok"} == {"complex128", "float8_e4m3fn", "float8_e5m2"}
    assert {ops["complex128"], ops["float8_e5m2"]} == {"unsupported"}
    assert entry["detail"]["op_errors"]["complex128"] == "AttributeError"


MAC_REGISTRY = {"XnnpackBackend": True, "CoreMLBackend": True, "MLXBackend": True, "QnnBackend": True}


def test_executorch_on_a_mac(python: Path) -> None:
    say(python, "executorch", MAC_REGISTRY)
    with (python.parent / "site" / "executorch" / "runtime.py").open("a") as file:
        file.write("\nprint('a line on stdout')\n")
    report = mac(python, "executorch")
    assert report["capabilities"] == ["executorch", "executorch.coreml", "executorch.mlx", "executorch.xnnpack"]
    detail = report["frameworks"][0]["detail"]
    assert detail["registered"] == list(MAC_REGISTRY)
    assert "QnnBackend" not in detail["usable"]
    assert codes(report) == []


def test_registered_is_told_apart_from_usable(python: Path) -> None:
    """OpenVINO's library is missing, and Core ML says that it is available where there is no Apple GPU."""
    say(python, "executorch", {"XnnpackBackend": True, "OpenvinoBackend": False, "CoreMLBackend": True})
    report = linux(python, "executorch")
    assert report["capabilities"] == ["executorch", "executorch.xnnpack"]
    notes = [note for note in report["notes"] if note["code"] == "executorch_backend_registered_unusable"]
    assert [note["subject"] for note in notes] == ["OpenvinoBackend", "CoreMLBackend"]


def test_the_removed_mps_delegate_is_no_capability(python: Path) -> None:
    say(python, "executorch", {"MPSBackend": True, "XnnpackBackend": True})
    report = mac(python, "executorch")
    assert report["capabilities"] == ["executorch", "executorch.xnnpack"]
    assert report["frameworks"][0]["detail"]["registered"] == ["MPSBackend", "XnnpackBackend"]


def test_executorch_without_torch_says_so(python: Path) -> None:
    say(python, "executorch", {})
    site = python.parent / "site"
    advice = 'raise ModuleNotFoundError("_C is not found. Please reinstall ExecuTorch from pip.", name="x")\n'
    (site / "executorch" / "runtime.py").write_text(advice)
    assert codes(mac(python, "executorch")) == ["executorch_import_failed"]
    isolated = write_program(python.parent / "bare", f'#!/bin/sh\nPYTHONPATH="{site}" exec {sys.executable} -S "$@"\n')
    report = mac(isolated, "executorch")
    assert codes(report) == ["executorch_needs_torch"]
    assert report["frameworks"][0]["status"] == "import_failed"


def test_executorch_that_is_not_there(python: Path) -> None:
    write_missing(python.parent / "site", "executorch")
    report = mac(python, "executorch")
    assert report["frameworks"][0]["status"] == "not_installed"
    assert codes(report) == ["executorch_not_installed"]


def test_no_framework_is_taken_from_the_current_folder(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "mlx", "executorch"):
        write_missing(python.parent / "site", name)
        (tmp_path / "here" / name).mkdir(parents=True)
        (tmp_path / "here" / name / "__init__.py").write_text("__version__ = 'shadow'")
    monkeypatch.chdir(tmp_path / "here")
    report = mac(python, "torch", "mlx", "executorch")
    assert {entry["status"] for entry in report["frameworks"]} == {"not_installed"}


@pytest.mark.parametrize("name", ["mlx", "executorch"])
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import os; os.kill(os.getpid(), 11)", "crashed"),
        ("import time; time.sleep(600)", "timeout"),
    ],
)
def test_one_framework_costs_the_others_nothing(
    python: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, status: str
) -> None:
    code = {"crashed": "child_crashed", "timeout": "child_timeout"}[status]
    frameworks = discovery_frameworks._FRAMEWORKS
    if status == "timeout":
        monkeypatch.setitem(frameworks, name, frameworks[name]._replace(limit=0.5))
    say(python, "torch", MAC_TORCH)
    package = python.parent / "site" / name
    package.mkdir()
    (package / "__init__.py").write_text(source)
    report = mac(python, name, "torch")
    assert [entry["status"] for entry in report["frameworks"]] == [status, "ok"]
    assert codes(report) == [code]
    assert report["complete"] is (status == "crashed")
    assert "torch.mps" in report["capabilities"]


def test_answers_of_all_frameworks_are_kept(python: Path, tmp_path: Path) -> None:
    kept = tmp_path / "state"
    kept.mkdir()
    say(python, "torch", MAC_TORCH)
    say(python, "mlx", METAL)
    write_missing(python.parent / "site", "executorch")

    def asked() -> list[bool]:
        names = ("torch", "mlx", "executorch")
        report = probe(str(python), names, system=play(mac_recording()), state_root=str(kept))
        assert {"torch.mps", "mlx.metal"} <= set(report["capabilities"])
        return [entry["cached"] for entry in report["frameworks"]]

    assert [asked(), asked()] == [[False] * 3, [True] * 3]


XPU = {"name": "Intel Arc B580", "uuid": "8680-0b", "total_memory": 12 * GIB, "is_integrated_gpu": False}


def test_intels_gpu_is_reported(python: Path) -> None:
    say(python, "torch", {"version": "2.14.1", "xpu": [{**XPU, "free": 11 * GIB}]})
    report = linux(python, "torch")
    device = report["devices"][0]
    assert (device["id"], device["accelerator"], device["memory_kind"]) == ("xpu:8680-0b", "xpu", "dedicated")
    assert (device["memory_bytes"], device["free_memory_bytes"], device["free_source"]) == (12 * GIB, 11 * GIB, "torch")
    assert device["select_env"] == {"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}
    assert {"torch.xpu", "torch.distributed.xccl"} <= set(report["capabilities"])


def test_an_integrated_gpu_of_intel_shares_the_hosts_memory(python: Path) -> None:
    say(python, "torch", {"version": "2.14.1", "xpu": [{**XPU, "is_integrated_gpu": True}]})
    report = linux(python, "torch")
    device = report["devices"][0]
    assert (device["memory_kind"], device["memory_bytes"]) == ("unified", 64 * GIB)
    assert (device["usable_memory_bytes"], device["free_memory_bytes"]) == (12 * GIB, None)
    assert "xpu_memory_unknown" in codes(report)


@pytest.mark.parametrize(("product", "code"), [("wrong", "xpu_wrong_result"), ("device lost", "xpu_kernel_failed")])
def test_intels_gpu_that_does_not_compute_is_no_capability(python: Path, product: str, code: str) -> None:
    say(python, "torch", {"version": "2.14.1", "xpu": [{**XPU, "product": product}]})
    report = linux(python, "torch")
    assert "torch.xpu" not in report["capabilities"]
    assert report["devices"][0]["health"] == "degraded"
    assert code in codes(report)


def test_a_cpu_that_computes_for_mps_is_no_apple_gpu(python: Path) -> None:
    say(python, "torch", {**MAC_TORCH, "mps": {**MAC_TORCH["mps"], "double": True}})
    report = mac(python, "torch")
    assert "torch.mps" not in report["capabilities"]
    assert report["frameworks"][0]["detail"]["mps_usable"] is False
    assert codes(report) == ["cpu_fallback_suspected"]


def test_the_fallback_that_the_host_sets_is_off_in_the_probe(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0")
    say(python, "torch", MAC_TORCH)
    with (python.parent / "site" / "torch" / "__init__.py").open("a") as file:
        file.write("\nimport os\nassert os.environ['PYTORCH_ENABLE_MPS_FALLBACK'] == '0'\n")
    report = mac(python, "torch")
    assert "torch.mps" in report["capabilities"]
    assert codes(report) == ["mps_fallback_enabled", "mps_watermark_changed"]
    environment = report["frameworks"][0]["detail"]["mps_environment"]
    assert environment == {"PYTORCH_ENABLE_MPS_FALLBACK": "1", "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.0"}


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        ("The MPS backend is supported on MacOS 26.0+.Current OS version can be queried", "macos_too_old_for_torch"),
        ("The MPS backend is supported on MacOS 14.0+.Current OS version can be queried", "mps_built_unavailable"),
        ("No supported Metal GPU was found", "mps_built_unavailable"),
    ],
)
def test_macos_is_called_too_old_only_where_it_is(python: Path, refusal: str, code: str) -> None:
    """PyTorch gives one text for every cause; it is believed where the host's version is below the one it names."""
    say(python, "torch", {**MAC_TORCH, "mps": {"available": False, "refusal": refusal}})
    report = mac(python, "torch")
    assert codes(report) == [code]
    assert "torch.mps" not in report["capabilities"]


def test_a_torch_that_lacks_newer_names_is_still_proven(python: Path) -> None:
    say(python, "torch", MAC_TORCH)
    with (python.parent / "site" / "torch" / "__init__.py").open("a") as file:
        file.write("\ndel mps.recommended_max_memory, xpu, cuda.get_arch_list, distributed.is_xccl_available\n")
    report = mac(python, "torch")
    assert "torch.mps" in report["capabilities"]
    assert codes(report) == []


def test_every_capability_of_the_vocabulary_is_shown_by_some_machine_and_no_other(python: Path) -> None:
    backends = ("Xnnpack", "CoreML", "MLX", "Metal", "Cuda", "Vulkan", "Openvino", "MPS", "Qnn")
    say(python, "executorch", {f"{name}Backend": True for name in backends})
    say(python, "mlx", {**METAL, "distributed": ["ring", "jaccl", "nccl", "mpi"]})
    say(python, "torch", MAC_TORCH)
    shown = {"apple": set(mac(python, "torch", "mlx", "executorch")["capabilities"])}
    say(python, "mlx", {"cuda": True})
    card = {"name": "NVIDIA X", "major": 8, "minor": 6, "total_memory": 23 * GIB, "is_integrated": 0, "uuid": GPU[4:]}
    say(python, "torch", {"version": "2.14.1", "cuda": "13.0", "devices": [card]})
    shown["nvidia"] = set(linux(python, "torch", "mlx", "executorch", gpu=True)["capabilities"])
    say(python, "torch", {"version": "2.14.1", "hip": "6.4", "devices": [card]})
    shown["amd"] = set(linux(python, "torch")["capabilities"])
    say(python, "torch", {"version": "2.14.1", "xpu": [XPU]})
    shown["intel"] = set(linux(python, "torch")["capabilities"])
    assert set().union(*shown.values()) == set(CAPABILITIES)
    assert [name for name, words in shown.items() if "torch.mps" in words or "mlx.metal" in words] == ["apple"]
    assert [name for name, words in shown.items() if "torch.cuda" in words] == ["nvidia"]
