"""Verdicts: all rules over one job and one host, and the ways in which a job fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpulayer.gpu.facts import Device, HostFacts
from gpulayer.placement.plan import Code, HostView, Kind, Refusal
from gpulayer.placement.rules import (
    ACCELERATOR_RULES,
    DEVICE_RULES,
    FACT_RULES,
    HOST_RULES,
    devices_of,
    disk,
    gpus_of,
    memory_taken,
    slots_of,
    undecided,
    where,
)
from gpulayer.spec.jobs import JobSpec
from gpulayer.spec.support import Accelerator

# The probe's notes after which the absence of a device proves nothing.
UNSURE: Final = {
    Accelerator.CUDA: frozenset({"nvidia_smi_timeout", "nvidia_smi_failed", "driver_library_mismatch"}),
    Accelerator.MPS: frozenset({"metal_probe_failed", "system_profiler_empty"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way in which a job fits on a host: under this accelerator, with `count` of the devices at `positions`.

    `positions` index `HostFacts.devices`, the least capable device first, so that options hold for all hosts with
    equal facts. `cpus` and `memory` (bytes) are what the job takes of the host; a CPU job takes a slot too (`slot`).
    `rank` orders hosts: the memory of the least capable fitting device, then the number of devices.
    """

    accelerator: Accelerator
    count: int
    positions: tuple[int, ...]
    cpus: int
    memory: int
    slot: bool
    rank: tuple[float, int]


@dataclass(frozen=True, slots=True)
class Fits:
    """The job fits, in these ways, in the job's own order of preference."""

    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The job does not fit, for all of these reasons."""

    refusals: tuple[Refusal, ...]


Verdict = Fits | Refused


def verdict(job: JobSpec, view: HostView) -> Verdict:
    """Return whether a job fits on a host, whoever holds its devices now, and how; else every reason why not."""
    own = own_refusals(job, view)
    found = class_verdict(job, view)
    if not own:
        return found
    return Refused((*own, *(found.refusals if isinstance(found, Refused) else ())))


def own_refusals(job: JobSpec, view: HostView) -> list[Refusal]:
    """Return the refusals for what a host has for itself: its name and its free disk."""
    found = [where(job, view.host), disk(job, view.facts) if view.facts else None]
    return [refusal for refusal in found if refusal]


def class_verdict(job: JobSpec, view: HostView) -> Verdict:
    """Return the verdict of all other rules: it is the same for all hosts that are alike (`matching.class_key`)."""
    refusals = [refusal for rule in HOST_RULES if (refusal := rule(job, view.host))]
    facts = view.facts
    if facts is None:
        return Refused((_unreachable(view), *refusals))
    refusals += [refusal for rule in FACT_RULES if (refusal := rule(job, view.host, facts))]
    options: list[Option] = []
    reasons: list[Refusal] = []
    there = [accelerator for accelerator in job.accelerators if _has(facts, accelerator)]
    for accelerator in there:
        under = _under(job, accelerator, facts)
        if isinstance(under, Option):
            options.append(under)
        else:
            reasons += under
    if not there:
        reasons += _absent(job, facts)
    if options and not refusals:
        return Fits(tuple(options))
    return Refused((*refusals, *(() if options else reasons)))


def busy(option: Option, view: HostView) -> list[Refusal]:
    """Return who holds what the job could have under this option, where too little of it is free now."""
    facts = view.facts
    if facts is None:
        return []
    wait = "wait: the job is queued until it is free"
    if option.slot:
        slots = slots_of(view.host, facts)
        if view.slots_held + 1 <= slots and view.slots_held + option.cpus <= max(facts.cpu_logical or 1, slots):
            return []
        held = {"slots_held": view.slots_held, "slots": slots}
        word = option.accelerator.value
        return [Refusal(code=Code.BUSY, kind=Kind.BUSY, accelerator=word, needed=option.cpus, found=held, fix=wait)]
    held_ids = [facts.devices[position].id for position in option.positions]
    held_ids = [device for device in held_ids if device in view.holders]
    if len(option.positions) - len(held_ids) >= option.count:
        return []
    return [
        Refusal(
            code=Code.BUSY,
            kind=Kind.BUSY,
            accelerator=option.accelerator.value,
            device=device,
            needed=option.count,
            found=view.holders[device],
            fix=wait,
        )
        for device in held_ids
    ]


def _under(job: JobSpec, accelerator: Accelerator, facts: HostFacts) -> Option | list[Refusal]:
    """How a job fits under one accelerator that the host has, or why not."""
    devices = devices_of(facts, accelerator)
    reasons = [refusal for rule in ACCELERATOR_RULES if (refusal := rule(job, accelerator, devices, facts))]
    fitting: list[Device] = []
    unfit: list[Refusal] = []
    for device in devices or [_CPU]:
        refused = [refusal for rule in DEVICE_RULES if (refusal := rule(job, accelerator, device, facts))]
        unfit += refused
        if not refused:
            fitting.append(device)
    count = gpus_of(job, accelerator)
    if len(fitting) < max(count, 1):
        reasons += unfit
    if reasons:
        return reasons
    is_cpu = accelerator is Accelerator.CPU
    fitting.sort(key=capacity)
    positions = {device.id: position for position, device in enumerate(facts.devices)}
    return Option(
        accelerator=accelerator,
        count=count,
        positions=() if is_cpu else tuple(positions[device.id] for device in fitting),
        cpus=job.resources.cpus or (1 if is_cpu else 0),
        memory=memory_taken(job, accelerator, devices),
        slot=is_cpu,
        rank=(0 if is_cpu else capacity(fitting[0]), len(facts.devices)),
    )


# A host whose report lists no CPU device has one all the same.
_CPU: Final = Device(id="cpu:0", accelerator="cpu", index=0, health="ok")


def _has(facts: HostFacts, accelerator: Accelerator) -> bool:
    return accelerator is Accelerator.CPU or any(device.accelerator == accelerator.value for device in facts.devices)


def capacity(device: Device) -> float:
    """Return how much memory a device offers, in bytes; infinite where that is unknown, so that it is taken last."""
    size = device.usable_bytes if device.usable_bytes is not None else device.memory_bytes
    return float("inf") if size is None else size


def _unreachable(view: HostView) -> Refusal:
    stage = view.stage.value if view.stage else "no answer"
    return Refusal(
        code=Code.UNREACHABLE,
        kind=Kind.HOST,
        found=f"{stage}: {view.error}" if view.error else stage,
        fix="`gpulayer probe` tells at which stage the way to the host ends",
    )


def _absent(job: JobSpec, facts: HostFacts) -> list[Refusal]:
    """Say that the host has none of the job's accelerators, or that its probe could not tell."""
    codes = {note.code for note in facts.notes}
    wanted = [accelerator.value for accelerator in job.accelerators]
    unsure = [accelerator for accelerator in job.accelerators if codes & UNSURE.get(accelerator, frozenset())]
    if unsure:
        fix = "the probe could not tell whether there is such a device: see the host's notes with `gpulayer probe`"
        return [undecided(Code.ACCELERATOR, accelerator=accelerator, needed=wanted, fix=fix) for accelerator in unsure]
    return [
        Refusal(
            code=Code.ACCELERATOR,
            kind=Kind.NEVER,
            needed=wanted,
            found=sorted({device.accelerator for device in facts.devices} or {Accelerator.CPU.value}),
            fix="add a host that has one, or another word to the job's `accelerator` if the program runs there",
        )
    ]
