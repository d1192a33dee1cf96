"""Facts of hosts: Linux from files that it could have, Macs from recorded (simulated) answers of their tools."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from gpulayer.gpu.discovery import probe
from gpulayer.gpu.discovery_linux import linux_host
from gpulayer.gpu.discovery_macos import _SYSCTL
from tests.machines import MAC_MEMORY, MAC_WORKING_SET, mac_recording, play

GIB = 1 << 30
MEMINFO = "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   33554432 kB\n"


def linux(**files: str) -> dict[str, Any]:
    return linux_host(
        play({"self": {"platform": "linux", "kernel": "6.1.0"}, "files": {"/proc/meminfo": MEMINFO, **files}})
    )


def test_memory_of_a_linux_host() -> None:
    host = linux()
    assert (host["memory_bytes"], host["memory_available_bytes"], host["memory_limit_bytes"]) == (
        64 * GIB,
        32 * GIB,
        None,
    )


@pytest.mark.parametrize("meminfo", ["MemTotal: 67108864 kB\n", "MemTotal: 67108864 kB\nMemAvailable: 0 kB"])
def test_available_memory_that_is_not_told_is_unknown(meminfo: str) -> None:
    host = linux(**{"/proc/meminfo": meminfo})
    assert (host["memory_bytes"], host["memory_available_bytes"]) == (64 * GIB, None)


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 0 kB", "MemTotal: much"])
def test_memory_that_cannot_be_read_is_unknown(meminfo: str) -> None:
    assert linux(**{"/proc/meminfo": meminfo})["memory_bytes"] is None


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/memory.max": str(8 * GIB)}, 8 * GIB),
        (
            {
                "/proc/self/cgroup": "0::/a/b",
                "/sys/fs/cgroup/a/b/memory.max": str(16 * GIB),
                "/sys/fs/cgroup/a/memory.max": str(8 * GIB),
            },
            8 * GIB,
        ),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/memory.max": str(4 * GIB)}, 4 * GIB),
        ({"/proc/self/cgroup": "0::/a", "/sys/fs/cgroup/a/memory.max": "max"}, None),
        ({"/proc/self/cgroup": "0::/a", "/sys/fs/cgroup/a/memory.max": str(65 * GIB)}, None),
        (
            {
                "/proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            },
            2 * GIB,
        ),
        (
            {
                "/proc/self/cgroup": "4:memory:/m",
                "/sys/fs/cgroup/memory/m/memory.limit_in_bytes": "9223372036854771712",
            },
            None,
        ),
        ({"/proc/self/cgroup": "0::/../../a", "/sys/fs/cgroup/a/memory.max": str(GIB)}, GIB),
    ],
)
def test_the_cgroups_limit_of_both_versions(files: dict[str, str], limit: int | None) -> None:
    host = linux(**files)
    assert host["memory_limit_bytes"] == limit
    assert host["memory_available_bytes"] == min(32 * GIB, limit or 64 * GIB)


def test_a_limit_is_what_the_cpu_device_can_use() -> None:
    files = {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": "0::/", "/sys/fs/cgroup/memory.max": str(4 * GIB)}
    children: dict[str, dict[str, Any]] = {"host_child": {}}
    report = probe(system=play({"self": {"platform": "linux"}, "files": files, "children": children}))
    cpu = report["devices"][-1]
    assert (cpu["id"], cpu["memory_bytes"], cpu["usable_memory_bytes"]) == ("cpu:0", 64 * GIB, 4 * GIB)
    assert cpu["free_memory_bytes"] == 4 * GIB


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, None),
        ({"/proc/cpuinfo": "flags : fpu sse"}, "none"),
        ({"/proc/cpuinfo": "flags : fpu hypervisor sse"}, "vm"),
        ({"/proc/cpuinfo": "x", "/sys/class/dmi/id/sys_vendor": "QEMU"}, "vm"),
        ({"/proc/cpuinfo": "flags : hypervisor", "/.dockerenv": ""}, "container"),
        ({"/proc/cpuinfo": "x", "/proc/1/cgroup": "0::/kubepods/pod1"}, "container"),
    ],
)
def test_virtualization(files: dict[str, str], word: str | None) -> None:
    assert linux(**files)["virtualization"] == word


def test_cores_names_and_ids() -> None:
    cpuinfo = "\n\n".join(
        f"processor : {core}\nmodel name : A CPU\nphysical id : 0\ncore id : {core // 2}" for core in range(8)
    )
    host = linux(
        **{
            "/proc/cpuinfo": cpuinfo,
            "/etc/os-release": 'NAME="Debian GNU/Linux"\nVERSION_ID="12"\n# c=1\n',
            "/etc/machine-id": "0123456789abcdef0123456789abcdef",
            "/proc/sys/kernel/random/boot_id": "a-b",
            "/proc/stat": "cpu 1\nbtime 1796000000\n",
        }
    )
    assert (host["cpu_model"], host["cpu_physical"]) == ("A CPU", 4)
    assert (host["os_name"], host["os_version"]) == ("Debian GNU/Linux", "12")
    assert (host["boot_id"], host["boot_time"]) == ("a-b", "2026-11-30T00:53:20Z")
    assert len(host["machine_id"]) == 32
    assert "0123456789abcdef" not in host["machine_id"]


def mac(children: dict[str, Any] | None = None, sysctl: dict[str, str | None] | None = None, **changes: Any) -> Any:
    """Probe a simulated Mac; `sysctl` changes single names (None: unknown to it)."""
    recording = mac_recording(**changes)
    values = {**recording["sysctl"], **(sysctl or {})}
    recording["sysctl"] = {name: value for name, value in values.items() if value is not None}
    recording["children"] = {"host_child": {}, **(recording["children"] if children is None else children)}
    return probe(system=play(recording))


def codes(report: dict[str, Any]) -> list[str]:
    return [note["code"] for note in report["notes"] if note["subject"] != "python"]


def test_a_macs_gpu_has_unified_memory_equal_to_the_hosts() -> None:
    report = mac()
    device, host = report["devices"][0], report["host"]
    assert (device["id"], device["accelerator"], device["name"]) == ("apple:0", "mps", "Apple M2 Max")
    assert (device["memory_kind"], device["memory_bytes"], device["memory_gb"]) == ("unified", MAC_MEMORY, 32.0)
    assert (device["usable_memory_bytes"], device["usable_source"]) == (MAC_WORKING_SET, "metal")
    assert (device["gpu_cores"], device["metal_family"], device["virtual"]) == (30, "apple8", False)
    assert (device["select_env"], device["health"]) == ({}, "ok")
    assert (host["memory_bytes"], host["memory_available_bytes"]) == (MAC_MEMORY, 700_000 * 16384)
    assert (host["os_version"], host["os_build"], host["machine_model"]) == ("15.7.7", "24G720", "Mac14,13")
    assert (host["cpu_performance"], host["cpu_efficiency"], host["on_ac_power"]) == (8, 4, True)


@pytest.mark.parametrize(
    ("level", "word"), [("1", "normal"), ("2", "warn"), ("4", "critical"), ("0", None), (None, None)]
)
def test_memory_pressure_is_a_word_of_the_kernels_level(level: str | None, word: str | None) -> None:
    report = mac(sysctl={"kern.memorystatus_vm_pressure_level": level})
    assert report["host"]["memory_pressure"] == word


def test_power_is_what_pmset_says() -> None:
    commands = {key: value for key, value in mac_recording()["commands"].items() if "pmset" not in key}
    battery = {**commands, "/usr/bin/pmset -g batt": "Now drawing from 'Battery Power'\n"}
    assert mac(commands=battery)["host"]["on_ac_power"] is False
    assert mac(commands=commands)["host"]["on_ac_power"] is None


def test_rosetta_does_not_hide_the_apple_gpu() -> None:
    own = {**mac_recording()["self"], "machine": "x86_64"}
    report = mac(sysctl={"sysctl.proc_translated": "1"}, self=own)
    host = report["host"]
    assert (host["arch"], host["process_arch"], host["translated"]) == ("arm64", "x86_64", True)
    assert report["devices"][0]["id"] == "apple:0"
    assert codes(report) == ["rosetta_process"]


@pytest.mark.parametrize(
    "children",
    [{"metal_child": {"devices": []}}, pytest.param({}, marks=pytest.mark.linux("a machine without Metal"))],
)
def test_without_metal_the_gpu_is_there_and_its_health_unknown(children: dict[str, Any]) -> None:
    """With no recorded answer the real child runs, and fails: there is no Metal here."""
    report = mac(children=children)
    device = report["devices"][0]
    assert (device["id"], device["health"], device["name"]) == ("apple:0", "unknown", "Apple M2 Max")
    assert (device["memory_bytes"], device["usable_memory_bytes"], device["usable_source"]) == (MAC_MEMORY, None, None)
    assert codes(report)[0] == ("sandboxed_gpu" if children else "metal_probe_failed")


def test_a_gpu_that_neither_metal_nor_the_system_lists_is_there_all_the_same() -> None:
    """system_profiler is the last to be asked, and only then."""
    recording = mac_recording()
    commands = {key: value for key, value in recording["commands"].items() if "AGXAccelerator" not in key}
    none: dict[str, Any] = {"metal_child": {"devices": []}}
    card = {"sppci_model": "Apple M2 Max", "sppci_cores": "30", "spdisplays_mtlgpufamilysupport": "spdisplays_metal3"}
    told = json.dumps({"SPDisplaysDataType": [card]})
    profiler = "/usr/sbin/system_profiler SPDisplaysDataType -json"
    report = mac(children=none, commands={**commands, profiler: told})
    device = report["devices"][0]
    assert (device["name"], device["gpu_cores"], device["metal_family"]) == ("Apple M2 Max", 30, "metal3")
    assert codes(report) == ["metal_no_device"]
    for answer in (None, "", '{"SPDisplaysDataType": []}', '{"SPDisplaysDataType": 3}', "[" * 100_000, "<?xml",
                   {"code": None, "stdout": told[:40], "timed_out": True}):  # fmt: skip
        said = {} if answer is None else {profiler: answer}
        silent = mac(children=none, commands={**commands, **said})
        assert silent["devices"][0]["name"] == "Apple M2 Max"  # the processor's
        assert codes(silent) == ["metal_no_device", "system_profiler_empty"]


def test_apples_stand_in_for_python_is_never_started() -> None:
    """The recording knows no xcode-select: that is a Mac without developer tools."""
    report = probe("/usr/bin/python3", ["torch"], system=play(mac_recording()))
    assert report["host"]["python"]["executable"] is None
    assert report["frameworks"][0]["status"] == "not_probed"
    note = next(note for note in report["notes"] if note["code"] == "python_unusable")
    assert "stand-in" in note["message"]
    tools = {**mac_recording()["commands"], "/usr/bin/xcode-select -p": "/Library/Developer/CommandLineTools\n"}
    report = probe("/usr/bin/python3", system=play(mac_recording(commands=tools)))
    assert "stand-in" not in json.dumps(report["notes"])


@pytest.mark.parametrize(
    ("listing", "found"),
    [
        (None, None),
        ("    device          \tnode GUID\n    ------          \t----------------\n", False),
        ("    device          \tnode GUID\n    ------          \t----------------\n    rdma_en2\t8400\n", True),
    ],
)
def test_rdma_over_thunderbolt(listing: str | None, found: bool | None) -> None:
    commands = {**mac_recording()["commands"], **({"/usr/bin/ibv_devices": listing} if listing else {})}
    assert mac(commands=commands)["network"]["thunderbolt_rdma"] is found


def test_the_wired_limit_counts_only_where_it_is_set() -> None:
    none: dict[str, Any] = {"metal_child": {"devices": []}}
    device = mac(children=none, sysctl={"iogpu.wired_limit_mb": "24576"})["devices"][0]
    assert (device["usable_memory_bytes"], device["usable_source"]) == (24 * GIB, "sysctl")


@pytest.mark.parametrize("figure", [0, -5, "much", None, 1 << 80])
def test_a_working_set_that_cannot_be_is_unknown(figure: Any) -> None:
    report = mac(children={"metal_child": {"devices": [{"name": "Apple M1", "working_set": figure}]}})
    assert report["devices"][0]["usable_memory_bytes"] is None


def test_a_virtual_macs_gpu_is_virtual() -> None:
    devices = [{"name": "Apple Paravirtual device", "working_set": 5 * GIB}]
    report = mac(children={"metal_child": {"devices": devices}}, sysctl={"kern.hv_vmm_present": "1"})
    assert (report["devices"][0]["virtual"], report["host"]["virtualization"]) == (True, "vm")
    assert "virtual_gpu" in codes(report)


def test_a_mac_that_tells_nothing_still_has_its_gpu() -> None:
    report = mac(children={"metal_child": {"devices": []}}, sysctl=dict.fromkeys(_SYSCTL), commands={})
    device = report["devices"][0]
    assert (device["id"], device["memory_kind"], device["memory_bytes"]) == ("apple:0", "unified", None)
    assert report["host"]["virtualization"] is None


def test_an_intel_macs_card_has_memory_of_its_own() -> None:
    cards = {"SPDisplaysDataType": [{"sppci_model": "AMD Radeon Pro 5500M", "spdisplays_vram": "8 GB"}]}
    metal = [
        {"name": "Intel UHD Graphics 630", "low_power": True},
        {"name": "AMD Radeon Pro 5500M", "low_power": False, "unified": False, "working_set": 8 * GIB},
    ]
    report = mac(
        children={"metal_child": {"devices": metal}},
        sysctl={"hw.optional.arm64": None, "sysctl.proc_translated": None},
        self={**mac_recording()["self"], "machine": "x86_64"},
        commands={"/usr/sbin/system_profiler SPDisplaysDataType -json": json.dumps(cards)},
    )
    device = report["devices"][0]
    assert [entry["id"] for entry in report["devices"]] == ["apple:0", "cpu:0"]
    assert (device["memory_kind"], device["memory_bytes"], device["usable_memory_bytes"]) == (
        "dedicated",
        8 * GIB,
        None,
    )
    assert report["host"]["translated"] is None
    assert codes(report) == ["intel_mac"]


def test_this_machine() -> None:
    """The real machine: what Python knows by itself must be what the probe says."""
    host = probe()["host"]
    assert host["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    may_use = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert host["cpu_logical"] == may_use
    assert host["hostname"] == os.uname().nodename
    assert 0 < host["disk_free_bytes"] < 1 << 60
