"""The reader of probe reports: what a real probe says is read, and nothing that a hostile host says gets by."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.gpu.discovery import probe
from gpulayer.gpu.facts import BadReportError, HostFacts, facts_from_report, fingerprint
from tests.machines import H200_IDS, mac_recording, play

GIB = 1 << 30
INTERPRETER = {"executable": "/opt/venv/bin/python", "real_path": "/usr/bin/python3.12", "version": "3.12.1"}


def report_of(**children: Any) -> dict[str, Any]:
    files = {"/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB", "/dev/nvidiactl": ""}
    said = {"host_child": INTERPRETER, **children}
    system = play({"self": {"platform": "linux", "hostname": "h"}, "files": files, "children": said})
    return probe("/opt/venv/bin/python", ["torch"], system=system)


def gpu(uuid: str, slot: int) -> dict[str, Any]:
    known = {"codes": {}, "name": "NVIDIA H200", "memory": [140 * GIB, 139 * GIB], "compute": "9.0", "ats": False}
    return {**known, "uuid": uuid, "pci": f"00000000:00:0{slot}.0", "mig": False, "instances": []}


REPORT = report_of(
    nvml_child={"init": 0, "driver": "580.1", **{f"gpu:{n}": gpu(uuid, n) for n, uuid in enumerate(H200_IDS)}},
    torch_child={"version": "2.14.1", "cpu_product": "ok", "gloo": True, "cuda": "13.0", "cuda_available": True},
)
MAC = probe(system=play(mac_recording(children={**mac_recording()["children"], "host_child": INTERPRETER})))


def test_a_report_becomes_facts() -> None:
    facts = facts_from_report(REPORT)
    first = facts.devices[0]
    assert [device.id for device in facts.devices] == [*H200_IDS, "cpu:0"]
    assert (first.accelerator, first.compute_capability, first.memory_kind) == ("cuda", (9, 0), "dedicated")
    assert (first.memory_bytes, first.usable_bytes, first.free_bytes) == (140 * GIB, 140 * GIB, 139 * GIB)
    assert first.select_env["CUDA_VISIBLE_DEVICES"] == H200_IDS[0]
    assert (facts.os, facts.memory_bytes, facts.memory_available_bytes) == ("linux", 64 * GIB, 32 * GIB)
    assert (facts.python, facts.python_real_path) == ("/opt/venv/bin/python", "/usr/bin/python3.12")
    assert facts.capabilities == {"torch", "torch.distributed.gloo"}
    assert (facts.frameworks["torch"].version, facts.driver_version) == ("2.14.1", "580.1")
    assert "not_macos" in [note.code for note in facts.notes]


def test_unified_memory_stays_unified() -> None:
    device = facts_from_report(MAC).devices[0]
    assert (device.id, device.memory_kind, device.memory_bytes) == (
        "apple:0",
        "unified",
        facts_from_report(MAC).memory_bytes,
    )


def test_what_may_be_missing_is_unknown_and_unknown_keys_are_dropped() -> None:
    report = copy.deepcopy(REPORT)
    del report["host"]["disk_free_bytes"]
    del report["host"]["python"]["real_path"]
    report["surprise"] = report["host"]["surprise"] = {"x": 1}
    facts = facts_from_report(report)
    assert (facts.disk_free_bytes, facts.python_real_path) == (None, None)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document, the document's own first."""
    yield path
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(entry, (*path, key))


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


# What the reader does not read: people and probes of later versions do.
UNREAD = {
    *("probe_version", "elapsed_ms", "network"),
    *(f"host.{key}" for key in ("os_name", "os_version", "os_build", "kernel", "process_arch", "translated")),
    *(f"host.{key}" for key in ("virtualization", "machine_model", "boot_time", "cpu_model", "cpu_physical")),
    *(f"host.{key}" for key in ("cpu_performance", "cpu_efficiency", "memory_gb", "memory_pressure", "on_ac_power")),
    *("host.memory_includes_device_memory", "host.python.implementation", "host.python.arch"),
    *(f"devices.*.{key}" for key in ("vendor", "architecture", "gpu_cores", "metal_family", "uuid", "pci_bus_id")),
    *(f"devices.*.{key}" for key in ("memory_gb", "usable_memory_gb", "usable_source", "free_source")),
    *(f"devices.*.{key}" for key in ("max_buffer_bytes", "runtime_version")),
    *(f"frameworks.*.{key}" for key in ("python", "elapsed_ms", "signal", "cached")),
    *(f"frameworks.*.detail.{key}" for key in ("cuda", "hip", "xpu", "mps_built", "mps_available", "mps_usable")),
    *(f"frameworks.*.detail.{key}" for key in ("arch_list", "gloo", "nccl", "xccl", "mps_environment", "op_errors")),
}


def name_of(path: tuple[Any, ...]) -> str:
    return ".".join("*" if isinstance(key, int) else str(key) for key in path)


def is_read(path: tuple[Any, ...]) -> bool:
    return not any(name_of(path[: length + 1]) in UNREAD for length in range(len(path)))


READ = [path for path in places(REPORT) if is_read(path)]


ANY_BYTES = {
    *(f"host.{key}" for key in ("memory_bytes", "memory_limit_bytes", "memory_available_bytes", "disk_free_bytes")),
    *(f"devices.*.{key}" for key in ("usable_memory_bytes", "free_memory_bytes")),
    "devices.*.memory_bytes",  # the CPU's, which nothing exceeds
}


@pytest.mark.parametrize(
    ("wrong", "takers"),
    [
        (object(), set()),
        (float("nan"), set()),
        (1.5, set()),
        (-1, set()),
        (0, {"devices.*.free_memory_bytes", "devices.*.index", "host.disk_free_bytes", "host.memory_available_bytes"}),
        (10**9, ANY_BYTES),
        (1 << 62, set()),
        ("x" * 1001, set()),
        ([[]], set()),
        ({"x": 1}, {"frameworks.*.detail"}),
        (True, {"complete", "devices.*.virtual"}),
    ],
)
def test_no_field_takes_a_value_that_it_cannot_have(wrong: Any, takers: set[str]) -> None:
    assert {name_of(path) for path in READ if accepts(put(REPORT, path, wrong))} <= takers


def accepts(report: Any) -> bool:
    try:
        facts_from_report(report)
    except BadReportError:
        return False
    return True


def test_a_bad_field_is_named() -> None:
    report = put(REPORT, ("devices", 1, "memory_bytes"), -5)
    with pytest.raises(
        BadReportError, match=r"devices\[1\]\.memory_bytes: -5 is not a whole number from 1 to"
    ) as raised:
        facts_from_report(report)
    assert raised.value.field == "devices[1].memory_bytes"


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("schema",), "gpulayer.probe/2", "schema"),
        (("devices", 0, "usable_memory_bytes"), 141 * GIB, "devices[0].usable_memory_bytes"),
        (("devices", 0, "free_memory_bytes"), 141 * GIB, "devices[0].free_memory_bytes"),
        (("devices", 0, "memory_bytes"), 0, "devices[0].memory_bytes"),
        (("devices", 1, "id"), H200_IDS[0], "devices"),
        (("devices", 1, "id"), "../../etc", "devices[1].id"),
        (("devices", 1, "select_env"), {"LD_PRELOAD": "/tmp/x.so"}, "devices[1].select_env"),
        (("devices", 0, "compute_capability"), "9.0\n", "devices[0].compute_capability"),
        (("devices",), [REPORT["devices"][0] | {"id": f"GPU-{number}"} for number in range(500)], "devices"),
        (("notes",), REPORT["notes"] * 1001, "notes"),
        (("capabilities", 0), "torch\x1b[2J", "capabilities[0]"),
        (("frameworks", 0, "detail", "ops"), {str(n): "ok" for n in range(1001)}, "frameworks[0].detail.ops"),
        (("started_at",), "today", "started_at"),
        (("host", "cpu_logical"), 10**9, "host.cpu_logical"),
        pytest.param(("host", "memory_bytes"), 10**5000, "host.memory_bytes", id="digits"),
    ],
)
def test_hostile_reports(path: tuple[Any, ...], value: Any, field: str) -> None:
    with pytest.raises(BadReportError) as raised:
        facts_from_report(put(REPORT, path, value))
    assert raised.value.field == field
    assert len(str(raised.value)) < 500


def test_text_is_kept_as_it_came() -> None:
    name = "\x1b]0;pwn\x07\x9b31m\u202e"
    assert facts_from_report(put(REPORT, ("devices", 0, "name"), name)).devices[0].name == name


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(places(REPORT))), json_values)
def test_any_mutation_is_read_whole_or_refused(path: tuple[Any, ...], value: Any) -> None:
    report = put(REPORT, path, value)
    assert not accepts(report) or sane(facts_from_report(report))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([path for path in places(REPORT) if path]))
def test_any_missing_key_is_refused_or_not_needed(path: tuple[Any, ...]) -> None:
    report = copy.deepcopy(REPORT)
    inner = report
    for key in path[:-1]:
        inner = inner[key]
    if isinstance(inner, dict):
        del inner[path[-1]]
    optional = {"host.disk_free_bytes", "host.python.real_path", "frameworks.*.detail.ops"} | {
        "frameworks.*.detail.ops_device"
    }
    is_entry = isinstance(path[-1], int) or name_of(path[:-1]).endswith("select_env")
    assert accepts(report) is (is_entry or not is_read(path) or name_of(path) in optional)


def sane(facts: HostFacts) -> bool:
    sizes = [facts.memory_bytes, facts.memory_limit_bytes, *(device.memory_bytes for device in facts.devices)]
    return (
        all(size is None or 0 < size <= 1 << 60 for size in sizes)
        and len({device.id for device in facts.devices}) == len(facts.devices) <= 64
        and all((device.usable_bytes or 0) <= (device.memory_bytes or 1 << 60) for device in facts.devices)
    )


def test_a_fingerprint_has_what_a_placement_stands_on_and_nothing_that_moves() -> None:
    facts = facts_from_report(REPORT)
    other = facts_from_report(put(REPORT, ("frameworks", 0, "version"), "2.14.0"))
    own = fingerprint(facts, [H200_IDS[1]], {"~/venv": other})
    moved = put(REPORT, ("devices", 1, "free_memory_bytes"), GIB)
    moved = put(put(moved, ("notes",), []), ("host", "memory_available_bytes"), GIB)
    moved = put(moved, ("host", "memory_bytes"), 255 * GIB)  # a virtual machine may be given more as it is used
    assert json.loads(json.dumps(own)) == fingerprint(facts_from_report(moved), [H200_IDS[1]], {"~/venv": other})
    assert own != fingerprint(facts, [H200_IDS[1]], {"~/venv": facts})
    for path, value in (
        (("host", "boot_id"), "another"),
        (("devices", 0, "driver_version"), "581"),
        (("host", "python", "executable"), "/usr/bin/python3"),
        (("host", "python", "real_path"), "/usr/bin/python3.13"),
        (("frameworks", 0, "version"), "2.15.0"),
    ):
        changed = facts_from_report(put(REPORT, path, value))
        assert fingerprint(changed, [H200_IDS[1]], {"~/venv": other}) != own
    swapped = facts_from_report(put(REPORT, ("devices", 1, "id"), "GPU-another"))
    assert fingerprint(swapped, [H200_IDS[1]], {"~/venv": other}) == own  # the job's own interpreter still sees it
    assert fingerprint(swapped, [H200_IDS[1]], {})["devices"] == []
    assert fingerprint(swapped, [H200_IDS[1]], {"~/venv": swapped})["devices"] == []
