"""Verdicts: all rules over one job and one host, and the ways in which a job fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpulayer.gpu.facts import Device
from gpulayer.placement.plan import Code, HostView, Kind, Refusal, why_unreached
from gpulayer.placement.rules import (
    ACCELERATOR_RULES,
    DEVICE_RULES,
    HOST_RULES,
    NO_DOUBLE,
    SITE_RULES,
    Site,
    cpus_taken,
    disk,
    gpus_of,
    memory_taken,
    site_of,
    undecided,
    where,
)
from gpulayer.spec.identity import asked_python
from gpulayer.spec.inventory import Host
from gpulayer.spec.jobs import JobSpec
from gpulayer.spec.support import NEVER_DTYPES, Accelerator

# The probe's notes after which the absence of a device proves nothing.
UNSURE: Final = {
    Accelerator.CUDA: frozenset(
        {"nvidia_smi_timeout", "nvidia_smi_failed", "driver_library_mismatch", "driver_not_loaded", "gpu_lost"}
    ),
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
    site = site_of(view, asked_python(job))
    own = own_refusals(job, view.host, site)
    found = class_verdict(job, view, site)
    if not own:
        return found
    return Refused((*own, *(found.refusals if isinstance(found, Refused) else ())))


def own_refusals(job: JobSpec, host: Host, site: Site | None) -> list[Refusal]:
    """Return the refusals for what a host has for itself: its name and its free disk."""
    found = [where(job, host), disk(job, site) if site else None]
    return [refusal for refusal in found if refusal]


def class_verdict(job: JobSpec, view: HostView, site: Site | None) -> Verdict:
    """Return the verdict of all other rules: it is the same for all hosts that are alike (`matching.class_key`)."""
    refusals = [refusal for rule in HOST_RULES if (refusal := rule(job, view.host))]
    if site is None:
        return Refused((_unreachable(view), *refusals))
    refusals += [refusal for rule in SITE_RULES if (refusal := rule(job, site))]
    options: list[Option] = []
    reasons: list[Refusal] = []
    there = [accelerator for accelerator in job.accelerators if accelerator in site.devices]
    for accelerator in there:
        under = _under(job, accelerator, site)
        if isinstance(under, Option):
            options.append(under)
        else:
            reasons += under
    if not there:
        reasons += _absent(job, site)
    if options and not refusals:
        return Fits(tuple(options))
    return Refused((*refusals, *(() if options else reasons)))


def busy(option: Option, site: Site, view: HostView) -> list[Refusal]:
    """Return who holds what the job could have under this option, where too little of it is free now."""
    wait = "wait: the job is queued until it is free"
    if option.slot:
        cpus = max(site.facts.cpu_logical or 1, site.slots)
        if view.slots_held < site.slots and view.slots_held + option.cpus <= cpus:
            return []
        held = {"slots_held": view.slots_held, "slots": site.slots}
        word = option.accelerator
        return [Refusal(code=Code.BUSY, kind=Kind.BUSY, accelerator=word, needed=option.cpus, found=held, fix=wait)]
    fitting = [site.facts.devices[position].id for position in option.positions]
    taken = [device for device in fitting if device in view.holders]
    if len(fitting) - len(taken) >= option.count:
        return []
    return [
        Refusal(
            code=Code.BUSY,
            kind=Kind.BUSY,
            accelerator=option.accelerator,
            device=device,
            needed=option.count,
            found=view.holders[device],
            fix=wait,
        )
        for device in taken
    ]


def _under(job: JobSpec, accelerator: Accelerator, site: Site) -> Option | list[Refusal]:
    """How a job fits under one accelerator that the host has, or why not."""
    reasons = [refusal for rule in ACCELERATOR_RULES if (refusal := rule(job, accelerator, site))]
    fitting: list[Device] = []
    unfit: list[Refusal] = []
    for device in site.devices[accelerator]:
        refused = [refusal for rule in DEVICE_RULES if (refusal := rule(job, accelerator, device, site))]
        if refused:
            unfit += refused
        else:
            fitting.append(device)
    count = gpus_of(job, accelerator)
    if len(fitting) < max(count, 1):
        reasons += unfit
    if reasons:
        return reasons
    is_cpu = accelerator is Accelerator.CPU
    fitting.sort(key=_capacity)
    positions = {device.id: position for position, device in enumerate(site.facts.devices)}
    return Option(
        accelerator=accelerator,
        count=count,
        positions=() if is_cpu else tuple(positions[device.id] for device in fitting),
        cpus=cpus_taken(job, accelerator),
        memory=memory_taken(job, accelerator, site),
        slot=is_cpu,
        rank=(0 if is_cpu else _capacity(fitting[0]), len(positions)),
    )


def _capacity(device: Device) -> float:
    """How much memory a device offers, in bytes; infinite where that is unknown, so that it is taken last."""
    size = device.usable_bytes if device.usable_bytes is not None else device.memory_bytes
    return float("inf") if size is None else size


def _unreachable(view: HostView) -> Refusal:
    return Refusal(
        code=Code.UNREACHABLE,
        kind=Kind.HOST,
        found=why_unreached(view),
        fix="`gpulayer probe` tells at which stage the way to the host ends",
    )


def _absent(job: JobSpec, site: Site) -> list[Refusal]:
    """Say that the host has none of the job's accelerators, or that its probe could not tell."""
    codes = {note.code for note in site.facts.notes}
    wanted = list(job.accelerators)
    unsure = [accelerator for accelerator in job.accelerators if codes & UNSURE.get(accelerator, frozenset())]
    if unsure:
        fix = "the probe could not tell whether there is such a device: see the host's notes with `gpulayer probe`"
        return [undecided(Code.ACCELERATOR, accelerator=accelerator, needed=wanted, fix=fix) for accelerator in unsure]
    fix = "add a host that has one, or another word to the job's `accelerator` if the program runs there"
    if all(NEVER_DTYPES.get(word, frozenset()).intersection(job.resources.dtypes) for word in job.accelerators):
        fix = f"no host that has one would do, for the job's dtypes: {NO_DOUBLE}"
    return [Refusal(code=Code.ACCELERATOR, kind=Kind.NEVER, needed=wanted, found=sorted(site.devices), fix=fix)]
