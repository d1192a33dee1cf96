"""What CUDA's driver says of its devices: whose their memory is, and what is kept of the answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpulayer.gpu import cuda_child
from gpulayer.gpu.discovery_child import Report
from gpulayer.gpu.discovery_cuda import CudaDevice, ask_cuda, count_device_memory
from gpulayer.gpu.discovery_notes import Notes
from gpulayer.gpu.discovery_nvidia import add_nvidia_devices
from gpulayer.gpu.discovery_report import Scene, new_host
from tests.machines import H200_IDS, play

GIB = 1 << 30
UUID = H200_IDS[0].removeprefix("GPU-")
MIG = ("aaaaaaaa-0000-4000-8000-000000000001", "aaaaaaaa-0000-4000-8000-000000000002")
NODE = "/sys/devices/system/node/node{}/meminfo"


def told(**changes: Any) -> dict[str, Any]:
    """One device as the child tells of it."""
    device = {"integrated": 0, "major": 9, "minor": 0, "numa_config": 0, "numa_id": -1, "total": 139 * GIB}
    return {**device, "name": "NVIDIA H200", "pci": "0000:00:06.0", "uuid": UUID, **changes}


def gpu(**changes: Any) -> dict[str, Any]:
    """One GPU as NVML tells of it."""
    known = {"codes": {}, "uuid": H200_IDS[0], "name": "NVIDIA H200", "memory": [140 * GIB, 100 * GIB]}
    return {
        **known,
        "pci": "00000000:00:06.0",
        "compute": "9.0",
        "ats": False,
        "mig": False,
        "instances": [],
        **changes,
    }


def scene(nvml: dict[str, Any], *cuda: dict[str, Any], **files: str) -> Scene:
    """A host with 64 GiB whose NVML lists one GPU."""
    said = {"init": 0, **{f"device:{place}": device for place, device in enumerate(cuda)}}
    files["/proc/driver/nvidia/version"] = "580.1"
    children = {"nvml_child": {"init": 0, "driver": "580.1", "gpu:0": nvml}, "cuda_child": said}
    host = new_host(memory_bytes=64 * GIB, memory_available_bytes=32 * GIB, boot_id="boot")
    found = Scene(play({"files": files, "children": children}), Notes(), host, [])
    add_nvidia_devices(found)
    return found


def codes(found: Scene) -> list[str]:
    return [note["code"] for note in found.notes.entries]


def test_an_integrated_gpu_shares_the_hosts_memory_whatever_figure_its_driver_gives() -> None:
    found = scene(gpu(memory=[8 * GIB, GIB]), told(integrated=1, total=45 * GIB))
    (device,) = found.devices
    assert (device["memory_kind"], device["memory_bytes"]) == ("unified", 64 * GIB)
    assert (device["usable_memory_bytes"], device["usable_source"]) == (45 * GIB, "cuda")
    assert (device["free_memory_bytes"], device["free_source"]) == (32 * GIB, "host")
    assert codes(found) == ["memory_carveout_ignored"]


def test_an_integrated_gpu_without_a_figure_needs_no_other_sign() -> None:
    found = scene(gpu(memory=None), told(integrated=1, total=60 * GIB))
    assert (found.devices[0]["memory_kind"], found.devices[0]["memory_bytes"]) == ("unified", 64 * GIB)
    assert codes(found) == ["memory_not_reported"]


def test_a_gpu_that_is_not_integrated_is_dedicated_though_coherent_and_silent_about_its_memory() -> None:
    found = scene(gpu(memory=None, ats=True), told())
    (device,) = found.devices
    assert (device["memory_kind"], device["memory_bytes"], device["usable_source"]) == ("dedicated", 139 * GIB, "cuda")
    assert device["free_memory_bytes"] is None
    assert codes(found) == []


def test_where_cuda_does_not_answer_nothing_is_made_up() -> None:
    found = scene(gpu(memory=None))
    assert found.devices[0]["memory_kind"] is found.devices[0]["memory_bytes"] is None


@pytest.mark.parametrize("changes", [{"uuid": MIG[0], "pci": "0000:99:00.0"}, {"uuid": None, "pci": None}])
def test_what_cuda_says_of_another_gpu_is_not_taken_for_this_one(changes: dict[str, Any]) -> None:
    found = scene(gpu(), told(integrated=1, **changes))
    assert found.devices[0]["memory_kind"] == "dedicated"


def test_a_mig_instance_is_known_by_its_own_uuid_never_by_its_gpus_address() -> None:
    instances: list[dict[str, Any]] = [
        {"codes": {}, "uuid": f"MIG-{uuid}", "name": "MIG 1g.18gb", "memory": None} for uuid in MIG
    ]
    found = scene(gpu(mig=True, instances=instances), told(uuid=MIG[1], total=17 * GIB))
    assert [device["memory_bytes"] for device in found.devices] == [None, 17 * GIB]
    assert {device["memory_kind"] for device in found.devices} == {"dedicated"}


def test_memory_that_a_gpu_lends_to_the_kernel_is_left_out_of_the_hosts() -> None:
    lines = "Node 1 MemTotal:       {} kB\nNode 1 MemFree:        {} kB\n"
    found = scene(
        gpu(ats=True), told(numa_config=1, numa_id=1), **{NODE.format(1): lines.format(40 * GIB >> 10, 10 * GIB >> 10)}
    )
    assert (found.host["memory_bytes"], found.host["memory_available_bytes"]) == (24 * GIB, 22 * GIB)
    assert found.host["memory_includes_device_memory"] is False
    assert found.devices[0]["memory_kind"] == "dedicated"
    assert codes(found) == ["host_memory_includes_device"]


def test_lent_memory_that_cannot_be_told_apart_is_said_to_be_included() -> None:
    found = scene(gpu(ats=True), told(numa_config=1, numa_id=1))
    assert (found.host["memory_bytes"], found.host["memory_includes_device_memory"]) == (64 * GIB, True)
    assert codes(found) == ["host_memory_includes_device"]


def test_the_memory_of_an_integrated_gpu_is_the_hosts_and_stays_there() -> None:
    lines = f"Node 0 MemTotal: {40 * GIB >> 10} kB\nNode 0 MemFree: {GIB >> 10} kB\n"
    found = scene(gpu(memory=None), told(integrated=1, numa_config=1, numa_id=0), **{NODE.format(0): lines})
    assert (found.host["memory_bytes"], found.devices[0]["memory_bytes"]) == (64 * GIB, 64 * GIB)
    assert "host_memory_includes_device" not in codes(found)


def test_lent_memory_beyond_the_hosts_leaves_something() -> None:
    device = CudaDevice(uuid=UUID, pci=None, name=None, compute=None, total=None, integrated=False, node=2)
    host = new_host(memory_bytes=GIB)
    system = play({"files": {NODE.format(2): f"Node 2 MemTotal: {2 * GIB} kB\nNode 2 MemFree: 1 kB"}})
    count_device_memory(system, Notes(), host, [device])
    assert (host["memory_bytes"], host["memory_available_bytes"]) == (1, None)


def test_a_jetson_without_nvidia_smi_is_told_of_by_cuda_alone() -> None:
    files = {"/etc/nv_tegra_release": "R35"}
    said = {"init": 0, "device:0": told(integrated=1, name="Xavier", major=7, minor=2, total=30 * GIB)}
    host = new_host(memory_bytes=31 * GIB)
    found = Scene(play({"files": files, "children": {"nvml_child": {}, "cuda_child": said}}), Notes(), host, [])
    add_nvidia_devices(found)
    (device,) = found.devices
    assert (device["id"], device["name"], device["compute_capability"]) == (H200_IDS[0], "Xavier", "7.2")
    assert (device["memory_kind"], device["usable_memory_bytes"]) == ("unified", 30 * GIB)


def test_nonsense_is_unknown() -> None:
    nonsense = told(uuid="x", pci=7, integrated=[1], major="a", total=-1, numa_config=1, numa_id=1 << 40)
    found = ask_cuda(play({"children": {"cuda_child": {"init": 0, "device:0": nonsense, "device:1": 3}}}), Notes(), [],
                     folder=None, fresh=False)  # fmt: skip
    assert found == (CudaDevice(None, None, "NVIDIA H200", None, None, None, None),)


def test_an_answer_is_kept_until_what_it_stands_on_changes(tmp_path: Path) -> None:
    first = play({"children": {"cuda_child": {"init": 0, "device:0": told()}}})
    other = play({"children": {"cuda_child": {"init": 0, "device:0": told(integrated=1)}}})

    def integrated(system: Any, *known: str, fresh: bool = False) -> Any:
        (device,) = ask_cuda(system, Notes(), known, folder=str(tmp_path), fresh=fresh)
        return device.integrated

    assert integrated(first, "boot 1") is False
    assert integrated(other, "boot 1") is False
    assert integrated(other, "boot 2") is True
    assert integrated(other, "boot 1", fresh=True) is True


def test_a_driver_that_failed_is_asked_again(tmp_path: Path) -> None:
    failed = play({"children": {"cuda_child": {"init": 999}}})
    assert ask_cuda(failed, Notes(), [], folder=str(tmp_path), fresh=False) == ()
    assert not list(tmp_path.iterdir())


class Driver:
    """CUDA's library with one device, as ctypes would show it; each question fills what it is given and returns 0."""

    attributes: ClassVar = {18: 1, 75: 12, 76: 1, 130: 0}

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return flags

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
        number._obj.value = 13010
        return 0

    def cuDeviceGetCount(self, number: Any) -> int:  # noqa: N802
        number._obj.value = 1
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = 70 + index
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> int:  # noqa: N802
        assert device.value == 70
        number._obj.value = self.attributes.get(attribute, -1)
        return 0 if attribute in self.attributes else 1  # CUDA_ERROR_INVALID_VALUE, as of an older driver

    def cuDeviceTotalMem_v2(self, total: Any, _device: Any) -> int:  # noqa: N802
        total._obj.value = 45 * GIB
        return 0

    def cuDeviceGetName(self, words: Any, _length: int, _device: Any) -> int:  # noqa: N802
        words.value = b"NVIDIA N1X"
        return 0

    def cuDeviceGetPCIBusId(self, _words: Any, _length: int, _device: Any) -> int:  # noqa: N802
        return 999

    def cuDeviceGetUuid(self, uuid: Any, _device: Any) -> int:  # noqa: N802
        uuid[:] = bytes.fromhex(UUID.replace("-", ""))
        return 0


def written(driver: Driver | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(cuda_child, "_library", lambda: driver)
    read_end, write_end = os.pipe()
    cuda_child.main(Report(write_end))
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        return dict(map(json.loads, answer))


def test_the_child_tells_what_an_older_driver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"integrated": 1, "major": 12, "minor": 1, "numa_config": 0, "total": 45 * GIB, "name": "NVIDIA N1X"}
    said = written(Driver(), monkeypatch)
    assert said == {"init": 0, "cuda": 13010, "device:0": {**device, "uuid": UUID}}


def test_the_child_says_that_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(None, monkeypatch) == {"init": None}
