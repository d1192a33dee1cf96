"""An independent judge of plans: it knows the rules by itself, and never asks those who made the plan.

It reads the plan's JSON, the fleet's JSON (`gpulayer.fleet/1`), the jobs document and what is known beside the probe,
compares every job with every host by hand, and returns what is wrong in words. Nothing of `gpulayer.placement`
may be imported here (a test holds that).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

GIB = 1024**3
PLACED = {"run", "retry", "follow"}
FRAMEWORK = {
    ("torch", "cuda"): {"torch.cuda"},
    ("torch", "mps"): {"torch.mps"},
    ("torch", "rocm"): {"torch.rocm"},
    ("torch", "cpu"): {"torch"},
    ("mlx", "cuda"): {"mlx.cuda"},
    ("mlx", "mps"): {"mlx.metal"},
    ("mlx", "cpu"): {"mlx.cpu"},
    ("executorch", "cuda"): {"executorch.cuda"},
    ("executorch", "mps"): {"executorch.coreml", "executorch.mlx", "executorch.metal"},
    ("executorch", "cpu"): {"executorch.xnnpack"},
}


@dataclass
class Known:
    """What the inventory and the survey say of a host beside its report. Hosts with one `machine` are one machine.

    `pythons` are the reports of other interpreters, by their names.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    drain: bool = False
    max_jobs: int | None = None
    expect: Mapping[str, Any] | None = None
    held: Sequence[str] = ()
    slots_held: int = 0
    machine: str | None = None
    pythons: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass
class Room:
    """What is left on one machine. None: unknown, not counted."""

    devices: set[str]
    slots: int
    cpus: int
    memory: int | None


# What a trial of a dtype ends with where it proves that it cannot be used.
FAILED = {"unsupported", "wrong", "crashed"}


def judge(
    plan: Mapping[str, Any],
    fleet: Mapping[str, Any],
    jobs: Mapping[str, Any],
    known: Mapping[str, Known] | None = None,
) -> list[str]:
    """Return what is wrong with the plan; an empty list is a good plan."""
    hosts = {entry["name"]: entry for entry in fleet["hosts"]}
    beside = {name: (known or {}).get(name, Known()) for name in hosts}
    wrong = list(_lines(plan, jobs))
    if wrong:
        return wrong
    rooms = _rooms(hosts, beside)
    for line in plan["jobs"]:
        job = {"accelerator": "cpu", **jobs["jobs"][line["job"]]}
        seen = _seen(job, hosts, beside)
        wrong += _verdict(job, line, plan["shapes"][line["shape"]], seen, beside)
        if line["action"] in PLACED:
            wrong += _place(job, line, seen, beside, rooms)
    for line in plan["jobs"]:
        job = {"accelerator": "cpu", **jobs["jobs"][line["job"]]}
        wrong += _patience(job, line, _seen(job, hosts, beside), beside, rooms)
    return wrong + list(_order(plan))


def _seen(
    job: Mapping[str, Any], hosts: Mapping[str, Mapping[str, Any]], beside: Mapping[str, Known]
) -> dict[str, Mapping[str, Any]]:
    """The hosts as the interpreter sees them in which the job's demands are judged; one that was not asked has nothing.

    That is the job's own, where the job demands a framework or capabilities of it.
    """
    python = job.get("python") if job.get("framework") or demand(job, "capabilities") else None
    seen: dict[str, Mapping[str, Any]] = {}
    for name, entry in hosts.items():
        report = entry["report"]
        if python is not None and report is not None:
            bare = {**report, "capabilities": [], "frameworks": []}
            report = beside[name].pythons.get(python, bare)
        seen[name] = {**entry, "report": report}
    return seen


def accelerators(job: Mapping[str, Any]) -> list[str]:
    word = job["accelerator"]
    return [word] if isinstance(word, str) else list(word)


def demand(job: Mapping[str, Any], key: str) -> Any:
    return job.get("resources", {}).get(key)


def count_of(job: Mapping[str, Any], accelerator: str) -> int:
    asked = demand(job, "gpus")
    if asked is not None:
        return int(asked)
    return 0 if accelerator == "cpu" else job.get("distributed", {}).get("processes_per_node") or 1


def nodes_of(job: Mapping[str, Any]) -> int:
    return int(job.get("distributed", {}).get("nodes") or 1)


def kind_of(job: Mapping[str, Any], report: Mapping[str, Any]) -> str | None:
    """What the hosts of a gang have in common: the CPU architecture, unless there is one host or the job takes any."""
    if nodes_of(job) == 1 or job["distributed"].get("mixed_arch"):
        return "any"
    arch: str | None = report["host"]["arch"]
    return {"aarch64": "arm64"}.get(arch or "", arch)


def in_company(
    job: Mapping[str, Any], names: Sequence[str], hosts: Mapping[str, Mapping[str, Any]], beside: Mapping[str, Known]
) -> dict[str, int]:
    """How many machines, of those names, a host goes together with, itself included."""
    machines: dict[str | None, set[str]] = defaultdict(set)
    for name in names:
        machines[kind_of(job, hosts[name]["report"])].add(beside[name].machine or name)
    return {name: len(machines[kind_of(job, hosts[name]["report"])]) for name in names}


def places_of(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    place = line["placement"]
    return list(place) if isinstance(place, list) else [place]


def _lines(plan: Mapping[str, Any], jobs: Mapping[str, Any]) -> Iterator[str]:
    """Every job has one line, in the document's order, that agrees with itself."""
    if [line["job"] for line in plan["jobs"]] != list(jobs["jobs"]):
        yield "the plan's jobs are not the document's"
        return
    for line in plan["jobs"]:
        placed = line["action"] in PLACED
        if placed != (line["placement"] is not None) or (line["action"] == "queue") != (line["position"] is not None):
            yield f"{line['job']}: placement or position does not go with {line['action']}"
        gang = jobs["jobs"][line["job"]].get("distributed")
        if line["nodes"] != (nodes_of(jobs["jobs"][line["job"]]) if gang else None):
            yield f"{line['job']}: takes {line['nodes']} hosts"
        elif placed and isinstance(line["placement"], list) != bool(gang):
            yield f"{line['job']}: the places of a gang are a list, and of no other job"
        if line["shape"] not in plan["shapes"]:
            yield f"{line['job']}: its shape is not in the plan"
    positions = [line["position"] for line in plan["jobs"] if line["position"] is not None]
    if positions != list(range(1, len(positions) + 1)):
        yield f"the positions of the queue are {positions}"
    counts = Counter(line["action"] for line in plan["jobs"])
    if any(plan["summary"][action] != counts[action] for action in plan["summary"]):
        yield "the summary does not count the actions"


def _devices(report: Mapping[str, Any], accelerator: str) -> list[Mapping[str, Any]]:
    split = {device["parent_id"] for device in report["devices"]}
    return [one for one in report["devices"] if one["accelerator"] == accelerator and one["id"] not in split]


def suits(job: Mapping[str, Any], accelerator: str, device: Mapping[str, Any], report: Mapping[str, Any]) -> bool:
    """Whether a device has all that the job asks of a device; what is unknown satisfies nothing."""
    kind, memory, least = (demand(job, key) for key in ("gpu_memory_kind", "gpu_memory_gb", "compute_capability"))
    dtypes = set(demand(job, "dtypes") or ())
    if device["health"] == "unusable" or (kind and device["memory_kind"] != kind):
        return False
    if memory and (accelerator == "cpu" or (device["usable_memory_bytes"] or 0) < memory * GIB):
        return False
    if least:
        has = device["compute_capability"]
        if has is None or tuple(map(int, has.split("."))) < tuple(map(int, least.removeprefix(">=").split("."))):
            return False
    if accelerator == "mps" and dtypes & {"float64", "complex128"}:
        return False
    ops = [one["detail"].get("ops", {}) for one in report["frameworks"] if one["name"] == job.get("framework")]
    return accelerator == "cpu" or not any(op.get(dtype) in FAILED for op in ops for dtype in dtypes)


def _host_suits(job: Mapping[str, Any], name: str, entry: Mapping[str, Any], known: Known) -> bool:
    """Whether a host has all that the job asks of a host, whatever the accelerator."""
    report, where = entry["report"], job.get("where", {})
    if not entry["reached"] or known.drain or kind_of(job, report) is None:
        return False
    return (
        name in (where.get("hosts") or [name])
        and name not in where.get("not_hosts", ())
        and all(known.labels.get(key) == value for key, value in where.get("labels", {}).items())
        and _as_expected(known.expect, report)
        and (demand(job, "cpus") or 0) <= (report["host"]["cpu_logical"] or 0)
        and (demand(job, "disk_gb") or 0) * GIB <= (report["host"].get("disk_free_bytes") or 0)
        and set(demand(job, "capabilities") or ()) <= set(report["capabilities"])
    )


def _as_expected(expect: Mapping[str, Any] | None, report: Mapping[str, Any]) -> bool:
    if expect is None:
        return True
    word, count = expect.get("accelerator"), expect.get("count")
    words = [word] if word else ["cuda", "mps", "rocm", "xpu"]
    there = sum(len(_devices(report, one)) for one in words)
    if word == "cpu":
        there = max(there, 1)
    return there == count if count is not None else there > 0


def _limit(report: Mapping[str, Any]) -> int | None:
    sizes = [report["host"][key] for key in ("memory_bytes", "memory_limit_bytes") if report["host"][key] is not None]
    return min(sizes) if sizes else None


def memory_of(job: Mapping[str, Any], accelerator: str, report: Mapping[str, Any]) -> int:
    """What a job counts for in the host's memory: unified GPU memory is the host's."""
    taken = (demand(job, "memory_gb") or 0) * GIB
    if accelerator != "cpu" and any(one["memory_kind"] == "unified" for one in _devices(report, accelerator)):
        taken += (demand(job, "gpu_memory_gb") or 0) * GIB * count_of(job, accelerator)
    return int(taken)


def fitting(job: Mapping[str, Any], accelerator: str, report: Mapping[str, Any]) -> list[str] | None:
    """The devices that a job may have under an accelerator (none on a CPU), or None where it does not fit."""
    count, devices = count_of(job, accelerator), _devices(report, accelerator)
    if accelerator == "cpu":
        cpu = devices or [
            {"health": "ok", "memory_kind": None, "compute_capability": None, "usable_memory_bytes": None}
        ]
        good = count == 0 and all(suits(job, "cpu", one, report) for one in cpu)
        ids: list[str] = []
    else:
        ids = [one["id"] for one in devices if suits(job, accelerator, one, report)]
        good = 1 <= count <= len(ids)
    wanted = FRAMEWORK.get((job.get("framework", ""), accelerator), set())
    if wanted and not wanted & set(report["capabilities"]):
        return None
    if "distributed" in job and wanted:
        backend = job["distributed"].get("backend") or ("gloo" if accelerator == "cpu" else "nccl")
        if f"torch.distributed.{backend}" not in report["capabilities"]:
            return None
    limit, taken = _limit(report), memory_of(job, accelerator, report)
    if limit is None:
        return ids if good and not demand(job, "memory_gb") else None
    return ids if good and taken <= limit else None


def _verdict(
    job: Mapping[str, Any],
    line: Mapping[str, Any],
    verdict: Mapping[str, Any],
    hosts: Mapping[str, Mapping[str, Any]],
    beside: Mapping[str, Known],
) -> Iterator[str]:
    """Fits are those that fit; every other host has a reason, and each reason is true."""
    name = line["job"]
    company = {one: in_company(job, _alone(job, one, hosts, beside), hosts, beside) for one in accelerators(job)}
    fits = [host for host in hosts if any(found.get(host, 0) >= nodes_of(job) for found in company.values())]
    if verdict["fits"] != fits:
        yield f"{name}: fits {verdict['fits']}, and should fit {fits}"
    reasons = defaultdict(set)
    for refusal in verdict["refusals"]:
        if len(refusal["hosts"]) > 1 and refusal["device"] is not None:
            yield f"{name}: a refusal of several hosts names a device"
        for host in refusal["hosts"]:
            reasons[host].add(refusal["code"])
            true = _is_true(refusal["code"], job, host, hosts[host], beside[host])
            if not true or (refusal["code"] == "distributed" and not _is_alone(job, host, hosts, company, refusal)):
                yield f"{name}: {host} is refused for {refusal['code']}, which does not hold"
    for host in hosts:
        others = reasons[host] - {"busy"}
        if (host in fits) == bool(others):
            yield f"{name}: {host} {'fits' if host in fits else 'does not fit'} and its reasons are {sorted(others)}"
    if (line["action"] == "refuse" and fits) or (line["action"] in {"run", "retry", "queue"} and not fits):
        yield f"{name}: is {line['action']} and fits {fits}"


def _alone(
    job: Mapping[str, Any], accelerator: str, hosts: Mapping[str, Mapping[str, Any]], beside: Mapping[str, Known]
) -> list[str]:
    """The hosts that fit, each taken by itself."""
    return [
        host
        for host, entry in hosts.items()
        if _host_suits(job, host, entry, beside[host]) and fitting(job, accelerator, entry["report"]) is not None
    ]


def _is_alone(
    job: Mapping[str, Any],
    host: str,
    hosts: Mapping[str, Mapping[str, Any]],
    company: Mapping[str, Mapping[str, int]],
    refusal: Mapping[str, Any],
) -> bool:
    """Whether a host goes together with as few others as the refusal says, and with too few."""
    found = refusal["found"]
    said = found if isinstance(found, int) else found.get(kind_of(job, hosts[host]["report"]))
    there = company[refusal["accelerator"]].get(host)
    return bool(said == there and said < refusal["needed"] == nodes_of(job))


def _is_true(code: str, job: Mapping[str, Any], name: str, entry: Mapping[str, Any], known: Known) -> bool:
    """Whether a reason that needs no other knowledge than one look at the host holds."""
    report, where = entry["report"], job.get("where", {})
    if code == "unreachable" or report is None:
        return not entry["reached"]
    devices = [one for accelerator in accelerators(job) for one in _devices(report, accelerator)]
    claims = {
        "accelerator": not devices and "cpu" not in accelerators(job),
        "capability": bool(job.get("framework") or demand(job, "capabilities")),
        "gpu-count": any(count_of(job, one) > len(_devices(report, one)) or one == "cpu" for one in accelerators(job)),
        "gpu-memory": any((one["usable_memory_bytes"] or 0) < demand(job, "gpu_memory_gb") * GIB for one in devices)
        or "cpu" in accelerators(job)
        if demand(job, "gpu_memory_gb")
        else False,
        "memory-kind": any(one["memory_kind"] != demand(job, "gpu_memory_kind") for one in devices)
        or "cpu" in accelerators(job),
        "compute-capability": bool(demand(job, "compute_capability")),
        "dtype": bool(demand(job, "dtypes")),
        "cpus": (demand(job, "cpus") or 0) > (report["host"]["cpu_logical"] or 0),
        "memory": any(memory_of(job, one, report) > (_limit(report) or 0) for one in accelerators(job)),
        "disk": (demand(job, "disk_gb") or 0) * GIB > (report["host"].get("disk_free_bytes") or 0),
        "labels": any(known.labels.get(key) != value for key, value in where.get("labels", {}).items()),
        "where": name in where.get("not_hosts", ()) or name not in (where.get("hosts") or [name]),
        "drain": known.drain,
        "health": any(one["health"] == "unusable" for one in devices),
        "expect": not _as_expected(known.expect, report),
        "busy": bool(known.held or known.slots_held),
        "distributed": "distributed" in job,
        "unknown": True,
    }
    return claims[code]


def _rooms(hosts: Mapping[str, Mapping[str, Any]], beside: Mapping[str, Known]) -> dict[str, Room]:
    """What is free on each host before the plan; names of one machine share one room."""
    machines: dict[str, Room] = {}
    rooms = {}
    for name, entry in hosts.items():
        if not entry["reached"]:
            continue
        known, host = beside[name], entry["report"]["host"]
        slots = known.max_jobs or host["cpu_logical"] or 1
        room = Room(
            devices={one["id"] for seen in (entry["report"], *known.pythons.values()) for one in seen["devices"]}
            - set(known.held),
            slots=slots - known.slots_held,
            cpus=max(host["cpu_logical"] or 1, slots) - known.slots_held,
            memory=_limit(entry["report"]),
        )
        shared = machines.setdefault(known.machine or name, room)
        shared.devices &= room.devices
        shared.slots = min(shared.slots, room.slots)
        rooms[name] = shared
    return rooms


def has_room(job: Mapping[str, Any], accelerator: str, report: Mapping[str, Any], room: Room) -> bool:
    """Whether a job that fits could start now."""
    ids = fitting(job, accelerator, report)
    if ids is None:
        return False
    is_cpu = accelerator == "cpu"
    cpus = demand(job, "cpus") or (1 if is_cpu else 0)
    if (is_cpu and room.slots < 1) or (cpus and cpus > room.cpus):
        return False
    if room.memory is not None and memory_of(job, accelerator, report) > room.memory:
        return False
    return is_cpu or len(room.devices & set(ids)) >= count_of(job, accelerator)


def _place(
    job: Mapping[str, Any],
    line: Mapping[str, Any],
    hosts: Mapping[str, Mapping[str, Any]],
    beside: Mapping[str, Known],
    rooms: Mapping[str, Room],
) -> Iterator[str]:
    """The place of a job is one that fits and that nobody has; it is taken from the room."""
    if line["action"] == "follow":
        return
    names = [place["host"] for place in places_of(line)]
    if len(names) != nodes_of(job) or in_company(job, names, hosts, beside) != dict.fromkeys(names, nodes_of(job)):
        yield f"{line['job']}: {names} do not go together"
    if names != sorted(names, key=list(hosts).index):
        yield f"{line['job']}: {names} are not in the inventory's order"
    for place in places_of(line):
        yield from _one_place(job, {**line, "placement": place}, hosts, beside, rooms)


def _one_place(
    job: Mapping[str, Any],
    line: Mapping[str, Any],
    hosts: Mapping[str, Mapping[str, Any]],
    beside: Mapping[str, Known],
    rooms: Mapping[str, Room],
) -> Iterator[str]:
    name, accelerator = line["job"], line["accelerator"]
    host, devices = line["placement"]["host"], line["placement"]["devices"]
    if host not in rooms or accelerator not in accelerators(job):
        yield f"{name}: is placed on {host} under {accelerator}"
        return
    report, room = hosts[host]["report"], rooms[host]
    ids = fitting(job, accelerator, report)
    if not _host_suits(job, host, hosts[host], beside[host]) or ids is None or not set(devices) <= set(ids):
        yield f"{name}: is placed on {host} with {devices}, which does not fit"
    if len(set(devices)) != count_of(job, accelerator) or len(set(devices)) != len(devices):
        yield f"{name}: has {devices}, and asked for {count_of(job, accelerator)}"
    if not set(devices) <= room.devices:
        yield f"{name}: has {devices}, and not all of them are free"
    room.devices -= set(devices)
    is_cpu = accelerator == "cpu"
    room.slots -= is_cpu
    room.cpus -= demand(job, "cpus") or (1 if is_cpu else 0)
    if room.memory is not None:
        room.memory -= memory_of(job, accelerator, report)
    if room.slots < 0 or (room.cpus < 0 and (is_cpu or demand(job, "cpus"))) or (room.memory or 0) < 0:
        yield f"{name}: {host} has more jobs than it can hold"


def _patience(
    job: Mapping[str, Any],
    line: Mapping[str, Any],
    hosts: Mapping[str, Mapping[str, Any]],
    beside: Mapping[str, Known],
    rooms: Mapping[str, Room],
) -> Iterator[str]:
    """Nobody waits while a fitting device is free, and nobody has a lesser choice while a better one is free."""
    better: list[str] = []
    if line["action"] == "queue":
        better = accelerators(job)
    elif line["action"] in {"run", "retry"}:
        better = list(takewhile(lambda word: word != line["accelerator"], accelerators(job)))
    for accelerator in better:
        free = [
            host
            for host, room in rooms.items()
            if _host_suits(job, host, hosts[host], beside[host])
            and has_room(job, accelerator, hosts[host]["report"], room)
        ]
        for host, company in in_company(job, free, hosts, beside).items():
            if company >= nodes_of(job):
                yield f"{line['job']}: is {line['action']}, and {host} has a free place under {accelerator}"


def _order(plan: Mapping[str, Any]) -> Iterator[str]:
    """Of jobs that ask for the same thing the earlier one is served first."""
    waiting: set[str] = set()
    for line in plan["jobs"]:
        if line["action"] == "queue":
            waiting.add(line["shape"])
        elif line["action"] in {"run", "retry"} and line["shape"] in waiting:
            yield f"{line['job']}: starts before an earlier job that asks for the same thing"
