"""NVIDIA GPUs: a stand-in nvidia-smi that runs as a real program and replays recordings, and NVML's answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gpulayer.gpu import discovery_nvidia
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_nvidia import add_nvidia_devices
from gpulayer.gpu.discovery_report import Scene, finish_device, new_host
from tests.machines import H200_IDS, RECORDED, play, write_nvidia_smi, write_program

GIB = 1 << 30
QUERY = (RECORDED / "nvidia" / "h200x2.query.csv").read_text()
HEADER, FIRST_ROW, SECOND_ROW = QUERY.splitlines()
MIG = "MIG-aaaaaaaa-0000-4000-8000-00000000000{}"


def found(
    tool: Path | None = None,
    nvml: dict[str, Any] | None = None,
    **files: str,
) -> tuple[list[dict[str, Any]], Any]:
    """Return the devices and the notes {code: note} of a Linux host with 64 GiB; CUDA's library is missing."""
    if nvml is not None:
        files["/proc/driver/nvidia/version"] = "580.1"
    tools = {"nvidia-smi": str(tool)} if tool else {}
    system = play(
        {"files": files, "tools": tools, "children": {"nvml_child": nvml or {}, "cuda_child": {"init": None}}}
    )
    scene = Scene(system, Notes(), new_host(memory_bytes=64 * GIB, memory_available_bytes=32 * GIB), [])
    add_nvidia_devices(scene)
    for device in scene.devices:
        finish_device(device, scene.notes)
    return scene.devices, {note["code"]: note for note in scene.notes.entries}


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    return tmp_path / "nvidia-smi"


def edited(tool: Path, **cells: str) -> Path:
    """Replay the recording with columns of its first row replaced, and that row alone."""
    names = [column.partition(" ")[0] for column in HEADER.split(", ")]
    row = FIRST_ROW.split(", ")
    for column, value in cells.items():
        row[names.index(column.replace("__", "."))] = value
    write_nvidia_smi(tool, query=f"{HEADER}\n{', '.join(row)}\n")
    return tool


def test_the_recorded_machine(tool: Path) -> None:
    write_nvidia_smi(tool)
    devices, notes = found(tool)
    assert [device["id"] for device in devices] == list(H200_IDS)
    first = devices[0]
    assert (first["accelerator"], first["name"], first["compute_capability"]) == ("cuda", "NVIDIA H200", "9.0")
    assert (first["memory_kind"], first["memory_bytes"], first["memory_gb"]) == ("dedicated", 143771 << 20, 140.4)
    assert (first["free_memory_bytes"], first["usable_source"]) == (143156 << 20, "nvidia-smi")
    assert (first["driver_version"], first["pci_bus_id"]) == ("580.159.04", "0000:00:06.0")
    assert first["select_env"] == {"CUDA_VISIBLE_DEVICES": H200_IDS[0], "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [device["index"] for device in devices] == [0, 1]
    assert notes == {}


@pytest.mark.parametrize("gone", ["compute_cap", "mig.mode.current"])
def test_a_driver_that_does_not_know_newer_fields(tool: Path, gone: str) -> None:
    write_nvidia_smi(tool, query=QUERY.replace(gone, "something_else"))
    devices, notes = found(tool)
    assert [device["id"] for device in devices] == list(H200_IDS)
    assert devices[0]["compute_capability"] is None
    assert devices[0]["memory_bytes"] == 143771 << 20
    assert notes == {}


@pytest.mark.parametrize(
    "word", ["[N/A]", "N/A", "[Not Supported]", "Not Supported", "[Unknown Error]", "ERR!", "0 MiB"]
)
def test_memory_that_is_not_told_is_unknown(tool: Path, word: str) -> None:
    devices, notes = found(edited(tool, memory__total=word, memory__free=word))
    device = devices[0]
    assert device["memory_bytes"] is device["memory_kind"] is device["usable_memory_bytes"] is None
    assert device["free_memory_bytes"] is device["memory_gb"] is None
    assert notes["memory_not_reported"]["subject"] == H200_IDS[0]


@pytest.mark.parametrize("sign", ["/etc/nv_tegra_release", "/dev/nvhost-ctrl-gpu"])
def test_memory_that_is_not_told_is_the_hosts_on_a_tegra(tool: Path, sign: str) -> None:
    devices, notes = found(edited(tool, memory__total="[N/A]", memory__free="[N/A]"), None, **{sign: "there"})
    device = devices[0]
    assert (device["memory_kind"], device["memory_bytes"], device["usable_memory_bytes"]) == ("unified", 64 * GIB, None)
    assert (device["free_memory_bytes"], device["free_source"]) == (32 * GIB, "host")
    assert notes["memory_not_reported"]["severity"] == "info"


def test_no_name_makes_memory_unified(tool: Path) -> None:
    devices, _ = found(edited(tool, name="NVIDIA GB10", memory__total="[N/A]", memory__free="[N/A]"))
    assert devices[0]["memory_kind"] is devices[0]["memory_bytes"] is None


def test_ats_without_a_figure_is_unified_and_with_a_figure_dedicated(tool: Path) -> None:
    columns = f"{HEADER}, addressing_mode"
    unknown = FIRST_ROW.replace("143771 MiB", "[N/A]")
    write_nvidia_smi(tool, query=f"{columns}\n{unknown}, ATS\n{SECOND_ROW}, ATS\n")
    devices, _ = found(tool)
    assert [device["memory_kind"] for device in devices] == ["unified", "dedicated"]


def test_a_name_with_commas_and_quotes(tool: Path) -> None:
    quoted = FIRST_ROW.replace("NVIDIA H200", '"NVIDIA ""X"", 2 GPUs, 80GB"')
    write_nvidia_smi(tool, query=f"{HEADER}\n{quoted}\n{SECOND_ROW}\n")
    devices, notes = found(tool)
    assert [device["name"] for device in devices] == ['NVIDIA "X", 2 GPUs, 80GB', "NVIDIA H200"]
    assert notes == {}


def test_many_gpus_in_pci_order(tool: Path) -> None:
    rows = [
        FIRST_ROW.replace("0, ", f"{index}, ", 1)
        .replace("11111111", f"{index:08d}")
        .replace(":06.0", f":{index:02x}.0")
        for index in reversed(range(20))
    ]
    write_nvidia_smi(tool, query="\n".join([HEADER, *rows]))
    devices, _ = found(tool)
    assert [device["id"][4:12] for device in devices] == [f"{index:08d}" for index in range(20)]


def test_a_gpu_that_is_listed_twice_is_one_device(tool: Path) -> None:
    """Some drivers print one row for each MIG instance, all with the GPU's UUID."""
    write_nvidia_smi(tool, query=f"{HEADER}\n{FIRST_ROW}\n{FIRST_ROW}\n{SECOND_ROW}\n")
    devices, _ = found(tool)
    assert [device["id"] for device in devices] == list(H200_IDS)


def test_a_gpu_without_a_uuid_is_named_by_its_place(tool: Path) -> None:
    devices, _ = found(edited(tool, uuid="[Unknown Error]"))
    assert devices[0]["id"] == "pci:0000:00:06.0"
    assert devices[0]["select_env"]["CUDA_VISIBLE_DEVICES"] == "0"


def test_no_driver() -> None:
    devices, notes = found()
    assert devices == []
    assert notes["nvidia_smi_not_found"]["severity"] == "info"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "driver_library_mismatch"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 0", "driver_library_mismatch"),
        (
            "echo 'NVIDIA-SMI has failed because it couldn'\"'\"'t communicate with the NVIDIA driver.'; exit 9",
            "driver_not_loaded",
        ),
        ("echo 'Unable to determine the device handle for GPU0000:06:00.0: Unknown Error'", "gpu_lost"),
        ("echo 'Failed to initialize NVML: Insufficient Permissions' >&2; exit 4", "mig_permission"),
        ("echo 'Fehler: kein Gerät'; exit 0", "nvidia_smi_failed"),
        ("exit 0", "nvidia_smi_failed"),
        ("exit 127", "nvidia_smi_failed"),
        ("kill -SEGV $$", "nvidia_smi_failed"),
    ],
)
def test_an_nvidia_smi_in_trouble_is_told_by_name(tool: Path, script: str, code: str) -> None:
    devices, notes = found(write_program(tool, f"#!/bin/sh\n{script}\n"))
    assert devices == []
    assert list(notes) == [code]


def test_one_lost_gpu_does_not_hide_the_other(tool: Path) -> None:
    write_nvidia_smi(tool)
    real = tool.rename(tool.with_name("real"))
    lost = "Unable to determine the device handle for GPU0000:06:00.0: GPU is lost.  Reboot the system"
    write_program(tool, f'#!/bin/sh\necho "{lost}"\n"{real}" "$@"\n')
    devices, notes = found(tool)
    assert [device["id"] for device in devices] == list(H200_IDS)
    assert "Reboot the system" in notes["gpu_lost"]["detail"]


def test_an_nvidia_smi_that_cannot_be_executed(tool: Path) -> None:
    tool.write_text("no program")
    tool.chmod(0o755)
    devices, notes = found(tool)
    assert devices == []
    assert list(notes) == ["nvidia_smi_failed"]


def test_a_hung_nvidia_smi_is_abandoned(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_nvidia, "NVIDIA_SMI_LIMIT_S", 0.2)
    write_program(tool, "#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 60; done\n")
    start = time.monotonic()
    devices, notes = found(tool)
    assert time.monotonic() - start < 5
    assert devices == []
    assert list(notes) == ["nvidia_smi_timeout"]


def test_its_messages_are_not_translated(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    _, notes = found(write_program(tool, '#!/bin/sh\necho "language $LC_ALL"\n'))
    assert notes["nvidia_smi_failed"]["detail"].startswith("language C")


def test_mig_instances_stand_in_place_of_their_gpu(tool: Path) -> None:
    listing = (
        f"GPU 0: NVIDIA H200 (UUID: {H200_IDS[0]})\n"
        f"  MIG 1g.18gb     Device  0: (UUID: {MIG.format(1)})\n"
        f"  MIG 3g.71gb     Device  1: (UUID: {MIG.format(2)})\n"
        f"GPU 1: NVIDIA H200 (UUID: {H200_IDS[1]})\n"
    )
    query = QUERY.replace("Disabled", "Enabled", 1)
    write_nvidia_smi(tool, query=query, listing=listing)
    devices, notes = found(tool)
    assert [device["id"] for device in devices] == [MIG.format(1), MIG.format(2), H200_IDS[1]]
    first = devices[0]
    assert (first["parent_id"], first["name"], first["compute_capability"]) == (H200_IDS[0], "MIG 1g.18gb", "9.0")
    assert (first["memory_kind"], first["memory_bytes"]) == ("dedicated", None)
    assert first["select_env"]["CUDA_VISIBLE_DEVICES"] == MIG.format(1)
    assert {"mig_enabled", "memory_not_reported"} == set(notes)


def nvml_gpu(**changes: Any) -> dict[str, Any]:
    gpu = {"codes": {}, "uuid": H200_IDS[0], "name": "NVIDIA H200", "memory": [141 * GIB, 140 * GIB]}
    return {**gpu, "pci": "00000000:00:06.0", "compute": "9.0", "ats": False, "mig": False, "instances": [], **changes}


def test_nvml_is_asked_first_where_a_driver_is_loaded(tool: Path) -> None:
    devices, notes = found(tool, {"init": 0, "driver": "580.1", "cuda": 13000, "gpu:0": nvml_gpu()})
    device = devices[0]
    assert (device["usable_source"], device["driver_version"], device["runtime_version"]) == ("nvml", "580.1", "13.0")
    assert (device["memory_bytes"], device["free_memory_bytes"]) == (141 * GIB, 140 * GIB)
    assert (device["health"], notes) == ("ok", {})


def test_mig_instances_of_nvml_have_their_memory() -> None:
    instance = {"codes": {}, "uuid": MIG.format(1), "name": "NVIDIA H200 MIG 1g.18gb", "memory": [18 * GIB, 17 * GIB]}
    devices, _ = found(None, {"init": 0, "gpu:0": nvml_gpu(mig=True, instances=[instance])})
    assert [(device["id"], device["memory_bytes"]) for device in devices] == [(MIG.format(1), 18 * GIB)]


def test_a_lost_gpu_is_unusable() -> None:
    gpus = {"gpu:0": nvml_gpu(memory=None, codes={"memory": 15}), "gpu:1": {"codes": {"handle": 15}}}
    devices, notes = found(None, {"init": 0, **gpus})
    assert [(device["id"], device["health"]) for device in devices] == [(H200_IDS[0], "unusable")]
    assert {"gpu_lost", "memory_not_reported"} == set(notes)


def test_memory_that_the_driver_keeps_from_this_user_is_unknown() -> None:
    """As in a container that was given one MIG instance: its GPU is there, its memory is not told."""
    devices, notes = found(None, {"init": 0, "gpu:0": nvml_gpu(memory=None, codes={"memory": 4})})
    assert [(device["memory_kind"], device["memory_bytes"], device["health"]) for device in devices] == [
        (None, None, "ok")
    ]
    assert set(notes) == {"mig_permission", "memory_not_reported"}


@pytest.mark.parametrize(("init", "code"), [(9, "driver_not_loaded"), (18, "driver_library_mismatch")])
def test_a_driver_in_trouble_is_not_asked_twice(tool: Path, init: int, code: str) -> None:
    write_nvidia_smi(tool)
    devices, notes = found(tool, {"init": init})
    assert devices == []
    assert list(notes) == [code]


def test_nvidia_smi_is_asked_where_nvml_is_not_there(tool: Path) -> None:
    write_nvidia_smi(tool)
    devices, notes = found(tool, {"init": 12})
    assert [device["id"] for device in devices] == list(H200_IDS)
    assert notes == {}


def test_nonsense_from_nvml_is_unknown() -> None:
    nonsense = nvml_gpu(uuid="rm -rf", name=7, memory=[-1, -1], pci="here", compute="9", codes={})
    good = nvml_gpu(memory=[1 << 70, 0], compute=None)
    devices, _ = found(None, {"init": 0, "gpu:0": nonsense, "gpu:1": good, "cuda": "x"})
    assert [(device["id"], device["memory_bytes"]) for device in devices] == [(H200_IDS[0], None)]
