"""Which hosts are alike: all that a rule looks at tells them apart, and nothing else does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gpulayer.placement.matching import class_key
from gpulayer.placement.plan import HostView
from tests.fleets import device, fleet_of, framework, report, views_of
from tests.oracle import Known

BASE = report(
    device("cuda", memory=24, usable=24, compute_capability="8.9"),
    device("cuda", 1, memory=24, usable=24, compute_capability="8.9"),
    capabilities=("torch", "torch.cuda"),
    frameworks=(framework("torch"),),
)


def view(name: str, one: dict[str, Any] | None, **known: Any) -> HostView:
    return views_of(fleet_of({name: one}), {name: Known(**known)})[0]


def put(value: object, *path: str | int) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


TELLING: dict[str, Callable[[Any], None]] = {
    "accelerator": put("rocm", "devices", 0, "accelerator"),
    "model": put("another", "devices", 1, "name"),
    "virtual": put(True, "devices", 0, "virtual"),
    "split": put("GPU-0", "devices", 1, "parent_id"),
    "compute capability": put("9.0", "devices", 0, "compute_capability"),
    "memory kind": put("unified", "devices", 0, "memory_kind"),
    "device memory": put(48 * 2**30, "devices", 0, "memory_bytes"),
    "usable memory": put(None, "devices", 0, "usable_memory_bytes"),
    "health": put("unusable", "devices", 0, "health"),
    "one device less": lambda one: one["devices"].pop(0),
    "CPUs": put(16, "host", "cpu_logical"),
    "memory": put(2**37, "host", "memory_bytes"),
    "limit": put(2**33, "host", "memory_limit_bytes"),
    "capabilities": put(["torch"], "capabilities"),
    "framework": put([], "frameworks"),
    "framework's status": put("timeout", "frameworks", 0, "status"),
    "framework's version": put("2.14.0", "frameworks", 0, "version"),
    "dtypes": put({"bfloat16": "unsupported"}, "frameworks", 0, "detail", "ops"),
    "notes": put(report(notes=("nvidia_smi_timeout",))["notes"], "notes"),
    "CPU architecture": put("aarch64", "host", "arch"),
}
SILENT: dict[str, Callable[[Any], None]] = {
    "boot": put("other", "host", "boot_id"),
    "hostname": put("other", "host", "hostname"),
    "available memory": put(1, "host", "memory_available_bytes"),
    "free disk": put(1, "host", "disk_free_bytes"),
    "a device's id": put("GPU-other", "devices", 0, "id"),
    "free GPU memory": put(1, "devices", 0, "free_memory_bytes"),
    "notes of no weight": put(report(notes=("torch_not_installed",))["notes"], "notes"),
    "time": put("2026-11-30T11:11:11Z", "started_at"),
}


def twin(change: Callable[[Any], None]) -> HostView:
    other = copy.deepcopy(BASE)
    change(other)
    return view("twin", other)


@pytest.mark.parametrize("fact", TELLING)
def test_hosts_differ_in(fact: str) -> None:
    assert class_key(view("host", BASE)) != class_key(twin(TELLING[fact]))


@pytest.mark.parametrize("fact", SILENT)
def test_hosts_are_alike_whatever_their(fact: str) -> None:
    assert class_key(view("host", BASE)) == class_key(twin(SILENT[fact]))


@pytest.mark.parametrize(
    "known", [{"labels": {"a": "b"}}, {"drain": True}, {"max_jobs": 1}, {"expect": {"accelerator": "cuda"}}], ids=str
)
def test_hosts_differ_in_what_the_inventory_says(known: dict[str, Any]) -> None:
    assert class_key(view("host", BASE)) != class_key(view("twin", BASE, **known))


def test_hosts_that_do_not_answer_are_alike_and_like_no_other() -> None:
    assert class_key(view("one", None)) == class_key(view("two", None))
    assert class_key(view("one", None)) != class_key(view("two", BASE))
