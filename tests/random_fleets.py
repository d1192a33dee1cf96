"""Random fleets and jobs documents for tests of placement: all that may be known, unknown or in the way."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

from tests.fleets import device, document_of, fleet_of, framework, gang, gib, report
from tests.oracle import Known

CAPABILITIES = ("torch", "torch.mps", "torch.cuda", "torch.rocm", "mlx", "mlx.metal", "mlx.cuda", "mlx.cpu")
COLLECTIVE = ("torch.distributed.gloo", "torch.distributed.nccl")
NOTES = ("nvidia_smi_timeout", "metal_probe_failed", "torch_not_installed")
SIZES = (4, 8, 16, 24)
OWN_PYTHON = "~/venv/bin/python"
FAILING = tuple({"bfloat16": result} for result in ("unsupported", "wrong", "crashed"))

T = TypeVar("T")


class Dice(Random):
    """A source of choices, the same for the same seed. Some are harsh, so that nothing fits; most are mild."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.harshness = self.choice([0.02, 0.1, 0.4])

    def rarely(self, usual: T, *others: T) -> T:
        return self.choice(others) if self.random() < self.harshness else usual

    def some(self, values: Sequence[T]) -> list[T]:
        return [value for value in values if self.random() > self.harshness]


def random_gpus(dice: Dice, accelerator: str, memory: float | None) -> list[dict[str, Any]]:
    """Some devices of one accelerator, equal or not, known or not."""
    devices = []
    for index in range(1 if accelerator == "mps" else dice.randint(1, 3)):
        total = memory if accelerator == "mps" else dice.rarely(dice.choice(SIZES), None)
        usable = dice.rarely(total, None)
        kind = "unified" if accelerator == "mps" else dice.rarely("dedicated", "unified", None)
        facts: dict[str, Any] = {"health": dice.rarely("ok", "degraded", "unknown", "unusable")}
        if accelerator == "cuda":
            facts["compute_capability"] = dice.rarely("8.9", "7.5", "12.1", None)
        devices.append(device(accelerator, index, memory=total, usable=usable, memory_kind=kind, **facts))
    return devices


def random_report(dice: Dice) -> dict[str, Any] | None:
    """What one host says, or None: it does not answer."""
    kind = dice.rarely(dice.choice(["mps", "cuda", "cuda", "rocm", "cpu", "both"]), "gone")
    if kind == "gone":
        return None
    memory = dice.rarely(32, 8, None)
    devices = []
    for accelerator in {"cpu": (), "both": ("cuda", "rocm")}.get(kind, (kind,)):
        devices += random_gpus(dice, accelerator, memory)
    torch = framework("torch", status=dice.rarely("ok", "timeout", "crashed"), ops=dice.rarely({}, *FAILING))
    return report(
        *devices,
        memory=memory,
        limit=dice.rarely(None, 6),
        cpus=dice.rarely(4, 1, 2, None),
        disk=dice.rarely(100, 1, None),
        capabilities=tuple(dice.some(CAPABILITIES)),
        frameworks=tuple(dice.some([torch])),
        notes=dice.rarely((), *((note,) for note in NOTES)),
    )


def another_report(dice: Dice, one: dict[str, Any]) -> dict[str, Any]:
    """What another interpreter of the same host says: it has other frameworks, and may see the devices otherwise."""
    other = copy.deepcopy(one)
    other["capabilities"] = dice.some(CAPABILITIES)
    other["frameworks"] = dice.some([framework("torch", ops=dice.rarely({}, *FAILING))])
    if dice.random() < dice.harshness:
        other["devices"].append(device("rocm", 7, memory=16, usable=16))
    other["devices"].reverse()
    for seen in other["devices"]:
        if dice.random() < dice.harshness:
            seen["usable_memory_bytes"] = None
    return other


def random_knowledge(dice: Dice, one: dict[str, Any] | None) -> Known:
    """What the inventory and the survey say of a host."""
    ids = [device["id"] for device in one["devices"] if device["accelerator"] != "cpu"] if one else []
    max_jobs = dice.choice([None, None, 1, 2, 3])
    slots = (max_jobs or one["host"]["cpu_logical"] or 1) if one else 0
    return Known(
        labels=dice.rarely({"site": "desk"}, {"site": "rack"}, {}),
        drain=dice.rarely(False, True),
        max_jobs=max_jobs,
        expect=dice.rarely(None, {"accelerator": "cuda", "count": 1}, {"accelerator": "mps"}),
        pythons={OWN_PYTHON: another_report(dice, one)} if one and dice.random() < 0.7 else {},
        held=[name for name in ids if dice.random() < 0.2],
        slots_held=dice.randint(0, slots) if dice.random() < 0.3 else 0,
    )


def random_twin(dice: Dice, one: dict[str, Any] | None) -> dict[str, Any] | None:
    """A host that is equal to another but, mostly, for one fact."""
    one = copy.deepcopy(one)
    if one is None or dice.random() < 0.3:
        return one
    host, first = one["host"], one["devices"][0]
    changes: list[tuple[dict[str, Any], str, list[Any]]] = [
        (host, "cpu_logical", [1, 4, None]),
        (host, "memory_limit_bytes", [gib(6), gib(20), None]),
        (host, "disk_free_bytes", [gib(1), gib(100), None]),
        (first, "health", ["ok", "unusable"]),
        (first, "usable_memory_bytes", [None, gib(3)]),
        (first, "memory_kind", ["dedicated", "unified", None]),
        (one, "capabilities", [[], sorted(CAPABILITIES)]),
        (one, "frameworks", [[], [framework("torch", status="timeout")], [framework("torch", ops=FAILING[0])]]),
        (one, "notes", [[], report(notes=NOTES)["notes"]]),
    ]
    where, fact, values = dice.choice(changes)
    where[fact] = dice.choice(values)
    return one


def random_fleet(seed: int, hosts: int) -> tuple[dict[str, Any], dict[str, Known]]:
    """A fleet of up to three kinds of hosts, many of them twins, and what is known beside the probe."""
    dice = Dice(seed)
    kinds = [random_report(dice) for _ in range(3)]
    fleet = fleet_of({f"h{number}": random_twin(dice, dice.choice(kinds)) for number in range(hosts)})
    other_dice = Dice(seed + 1)  # what an older seed rolls stays as it was
    for entry in fleet["hosts"]:
        if entry["report"]:
            entry["report"]["host"]["arch"] = other_dice.rarely("x86_64", "arm64", "aarch64", None)
            entry["report"]["capabilities"] += other_dice.some(COLLECTIVE)
    return fleet, {entry["name"]: random_knowledge(dice, entry["report"]) for entry in fleet["hosts"]}


def random_shape(dice: Dice) -> dict[str, Any]:
    """What one job asks for."""
    words = dice.sample(["cuda", "mps", "rocm", "cpu"], dice.choice([1, 1, 2, 3]))
    resources: dict[str, Any] = {
        "cpus": dice.choice([None, None, 1, 2, 3]),
        "memory_gb": dice.choice([None, None, 1, 5, 16]),
        "disk_gb": dice.rarely(None, 10),
        "capabilities": dice.rarely(None, ["torch"], ["mlx", "torch"]),
        "dtypes": dice.rarely(None, ["float32"], ["float64"], ["bfloat16"]),
    }
    if words != ["cpu"]:
        resources |= {
            "gpus": dice.rarely(None, 1, 2, 3) if "cpu" in words else dice.choice([None, None, 1, 2, 3]),
            "gpu_memory_gb": dice.rarely(None, *SIZES),
            "gpu_memory_kind": dice.rarely(None, "dedicated", "unified"),
            "compute_capability": dice.rarely(None, ">=8.0"),
        }
    job: dict[str, Any] = {
        "accelerator": words if len(words) > 1 else words[0],
        "resources": {key: value for key, value in resources.items() if value is not None},
    }
    if name := dice.choice([None, None, "torch", "torch" if "rocm" in words else "mlx"]):
        job["framework"] = name
    if python := dice.choice([None, None, OWN_PYTHON]):
        job["python"] = python
    if where := dice.rarely(None, {"labels": {"site": "desk"}}, {"hosts": ["h0", "h2"]}, {"not_hosts": ["h1"]}):
        job["where"] = where
    return job


def random_gang(dice: Dice, shape: dict[str, Any]) -> dict[str, Any]:
    """The shape as a gang's, where it can be one."""
    words = shape["accelerator"] if isinstance(shape["accelerator"], list) else [shape["accelerator"]]
    if "mps" in words or shape.get("framework") == "mlx":
        return shape
    several = shape["resources"].get("gpus", 1) > 1
    given = {
        "processes_per_node": dice.choice([None, 1, 2] if several or "gpus" not in shape["resources"] else [None, 1]),
        "backend": dice.rarely(None, "gloo"),
        "mixed_arch": dice.choice([None, None, True]),
    }
    return gang(shape, dice.choice([1, 2, 2, 3]), **{key: value for key, value in given.items() if value is not None})


def random_document(seed: int, jobs: int) -> dict[str, Any]:
    """A jobs document of up to four shapes."""
    dice = Dice(seed)
    shapes = [random_shape(dice) for _ in range(4)]
    gangs = Dice(seed + 1)
    shapes = [random_gang(gangs, shape) if gangs.random() < 0.4 else shape for shape in shapes]
    return document_of(**{f"j{number}": dice.choice(shapes) for number in range(jobs)})
