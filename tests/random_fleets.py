"""Random fleets and jobs documents for tests of placement: all that may be known, unknown or in the way."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from tests.fleets import device, document_of, fleet_of, framework, report
from tests.oracle import Known

CAPABILITIES = ("torch", "torch.mps", "torch.cuda", "torch.rocm", "mlx", "mlx.metal", "mlx.cuda")
NOTES = ("nvidia_smi_timeout", "metal_probe_failed", "torch_not_installed")
SIZES = (4, 8, 16, 24)
HEALTH = ("ok", "ok", "ok", "degraded", "unknown", "unusable")

T = TypeVar("T")


class Dice(Random):
    """A source of choices, the same for the same seed."""

    def maybe(self, values: Sequence[T]) -> T | None:
        return self.choice(values) if self.random() < 0.5 else None

    def some(self, values: Sequence[T]) -> list[T]:
        return [value for value in values if self.random() < 0.5]


def random_gpus(dice: Dice, accelerator: str, memory: float | None) -> list[dict[str, Any]]:
    """Some devices of one accelerator, equal or not, known or not."""
    devices = []
    for index in range(1 if accelerator == "mps" else dice.randint(1, 3)):
        total = memory if accelerator == "mps" else dice.maybe(SIZES)
        usable = dice.maybe([total]) if total else None
        kind = "unified" if accelerator == "mps" else dice.choice(["dedicated", "unified", None])
        facts: dict[str, Any] = {"health": dice.choice(HEALTH)}
        if accelerator == "cuda":
            facts["compute_capability"] = dice.choice(["7.5", "8.9", "12.1", None])
        devices.append(device(accelerator, index, memory=total, usable=usable, memory_kind=kind, **facts))
    return devices


def random_report(dice: Dice) -> dict[str, Any] | None:
    """What one host says, or None: it does not answer."""
    kind = dice.choice(["mps", "cuda", "cuda", "rocm", "cpu", "both", "gone"])
    if kind == "gone":
        return None
    memory = dice.choice([8, 32, None])
    devices = []
    for accelerator in {"cpu": (), "both": ("cuda", "rocm")}.get(kind, (kind,)):
        devices += random_gpus(dice, accelerator, memory)
    torch = framework(
        "torch",
        status=dice.choice(["ok", "timeout", "crashed"]),
        ops=dice.choice([{}, {"bfloat16": "unsupported"}]),
    )
    return report(
        *devices,
        memory=memory,
        limit=dice.choice([None, None, 6]),
        cpus=dice.choice([1, 2, 4, None]),
        disk=dice.choice([1, 100, None]),
        capabilities=tuple(dice.some(CAPABILITIES)),
        frameworks=tuple(dice.some([torch])),
        notes=tuple(dice.some(NOTES)) if dice.random() < 0.3 else (),
    )


def random_knowledge(dice: Dice, one: dict[str, Any] | None) -> Known:
    """What the inventory and the survey say of a host."""
    ids = [device["id"] for device in one["devices"] if device["accelerator"] != "cpu"] if one else []
    max_jobs = dice.choice([None, None, 1, 2, 3])
    slots = (max_jobs or one["host"]["cpu_logical"] or 1) if one else 0
    return Known(
        labels=dice.choice([{}, {"site": "desk"}, {"site": "rack"}]),
        drain=dice.random() < 0.1,
        max_jobs=max_jobs,
        expect=dice.choice([None, None, None, None, {"accelerator": "cuda", "count": 1}, {"accelerator": "mps"}]),
        held=[name for name in ids if dice.random() < 0.2],
        slots_held=dice.randint(0, slots) if dice.random() < 0.3 else 0,
    )


def random_fleet(seed: int, hosts: int) -> tuple[dict[str, Any], dict[str, Known]]:
    """A fleet of up to three kinds, so that some hosts are equal, and what is known beside the probe."""
    dice = Dice(seed)
    kinds = [random_report(dice) for _ in range(3)]
    fleet = fleet_of({f"h{number}": copy.deepcopy(dice.choice(kinds)) for number in range(hosts)})
    return fleet, {entry["name"]: random_knowledge(dice, entry["report"]) for entry in fleet["hosts"]}


def random_shape(dice: Dice) -> dict[str, Any]:
    """What one job asks for."""
    words = dice.sample(["cuda", "mps", "rocm", "cpu"], dice.choice([1, 1, 2, 3]))
    resources: dict[str, Any] = {
        "cpus": dice.maybe([1, 2, 3]),
        "memory_gb": dice.maybe([1, 5, 30]),
        "disk_gb": dice.choice([None, None, 10]),
        "capabilities": dice.choice([None, None, None, ["torch"], ["mlx", "torch"]]),
        "dtypes": dice.choice([None, None, ["float32"], ["float64"], ["bfloat16"]]),
    }
    if words != ["cpu"]:
        resources |= {
            "gpus": dice.choice([None, None, 1, 2, 3]),
            "gpu_memory_gb": dice.maybe(SIZES),
            "gpu_memory_kind": dice.choice([None, None, "dedicated", "unified"]),
            "compute_capability": dice.choice([None, None, None, ">=8.0"]),
        }
    job: dict[str, Any] = {
        "accelerator": words if len(words) > 1 else words[0],
        "resources": {key: value for key, value in resources.items() if value is not None},
    }
    if name := dice.choice([None, "torch", "torch" if "rocm" in words else "mlx"]):
        job["framework"] = name
    if where := dice.choice(
        [None, None, None, {"labels": {"site": "desk"}}, {"hosts": ["h0", "h2"]}, {"not_hosts": ["h1"]}]
    ):
        job["where"] = where
    return job


def random_document(seed: int, jobs: int) -> dict[str, Any]:
    """A jobs document of up to four shapes."""
    dice = Dice(seed)
    shapes = [random_shape(dice) for _ in range(4)]
    return document_of(**{f"j{number}": dice.choice(shapes) for number in range(jobs)})
