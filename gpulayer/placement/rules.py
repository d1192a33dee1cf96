"""The rules of placement: one pure function a rule. `verdicts.py` runs all of them, so that every reason is shown.

A rule returns None where the job fits and a `Refusal` where it does not; what cannot be decided is a refusal with code
`unknown` that says which question is open. Sizes are compared in bytes (1 GiB = 2^30). The rules come from ADR-0006:
a CUDA job never meets an MPS device, unified memory is never taken for dedicated, unknown never satisfies a demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulayer.gpu.facts import Device, FrameworkFact, HostFacts
from gpulayer.placement.plan import Code, HostView, Kind, Refusal
from gpulayer.spec.inventory import Host
from gpulayer.spec.jobs import DistributedJob, JobSpec
from gpulayer.spec.support import NEVER_DTYPES, Accelerator, MemoryKind, backend_capability, demanded

GIB: Final = 2**30

# A framework whose child did not come to an end is neither there nor absent.
UNDECIDED_STATUS: Final = frozenset({"timeout", "not_probed"})

# What proves that a dtype cannot be used; an error or a time limit may be of the moment.
FAILED_OPS: Final = frozenset({"unsupported", "wrong", "crashed"})


NO_DOUBLE: Final = "use `accelerator: cpu`, or float32 and complex64; PYTORCH_ENABLE_MPS_FALLBACK=1 does not help"


# A host whose report lists no CPU device has one all the same.
CPU_DEVICE: Final = Device(id="cpu:0", accelerator=Accelerator.CPU, index=0, health="ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A host that answered, as the rules look at it.

    `devices` are by accelerator, a GPU that is split (MIG) as its parts; there is always a CPU. `memory` is what
    processes can get: the host's, or its limit where that is lower (bytes, None: unknown). `slots` is how many CPU
    jobs the host takes at once (`HostView.slots`).
    """

    host: Host
    facts: HostFacts
    devices: Mapping[str, Sequence[Device]]
    memory: int | None
    slots: int


def site_of(view: HostView, python: str | None = None) -> Site | None:
    """Return the host as the rules look at it for jobs of an interpreter (None: the inventory's).

    None where the host did not answer.
    """
    facts = view.seen_by(python)
    if facts is None:
        return None
    parents = {device.parent_id for device in facts.devices}
    devices: dict[str, list[Device]] = {}
    for device in facts.devices:
        if device.id not in parents:
            devices.setdefault(device.accelerator, []).append(device)
    devices.setdefault(Accelerator.CPU, [CPU_DEVICE])
    known = [size for size in (facts.memory_bytes, facts.memory_limit_bytes) if size is not None]
    return Site(
        host=view.host,
        facts=facts,
        devices=devices,
        memory=min(known, default=None),
        slots=view.slots,
    )


def size(gib: float) -> int:
    """Return a demand in GiB as bytes."""
    return round(gib * GIB)


def gpus_of(job: JobSpec, accelerator: Accelerator) -> int:
    """Return how many devices of one host a job takes under an accelerator.

    Where it does not say that is none on cpu, and on a GPU one, or one for each of a gang's processes.
    """
    if job.resources.gpus is not None:
        return job.resources.gpus
    if accelerator is Accelerator.CPU:
        return 0
    return job.processes if isinstance(job, DistributedJob) else 1


def cpus_taken(job: JobSpec, accelerator: Accelerator) -> int:
    """Return how many logical CPUs a job is counted with: one for a CPU job that does not say."""
    return job.resources.cpus or (1 if accelerator is Accelerator.CPU else 0)


def memory_taken(job: JobSpec, accelerator: Accelerator, site: Site) -> int:
    """Return the host memory that a job is counted with, in bytes; GPU memory counts where it is unified."""
    taken = size(job.resources.memory_gb or 0)
    if job.resources.gpu_memory_gb is not None and _is_unified(accelerator, site):
        taken += size(job.resources.gpu_memory_gb) * gpus_of(job, accelerator)
    return taken


# Rules of a host by its entry in the inventory.


def where(job: JobSpec, host: Host) -> Refusal | None:
    """`where.hosts` and `where.not_hosts` name hosts."""
    allowed, banned = job.where.hosts, job.where.not_hosts
    if (not allowed or host.name in allowed) and host.name not in banned:
        return None
    needed = {"hosts": list(allowed)} if allowed and host.name not in allowed else {"not_hosts": list(banned)}
    return Refusal(code=Code.WHERE, kind=Kind.JOB, needed=needed, fix="change the job's `where`")


def labels(job: JobSpec, host: Host) -> Refusal | None:
    """Every label of `where.labels` must be on the host."""
    wanted = job.where.labels
    missing = {key: value for key, value in wanted.items() if host.labels.get(key) != value} if wanted else {}
    if not missing:
        return None
    return Refusal(
        code=Code.LABELS,
        kind=Kind.HOST,
        needed=missing,
        found={key: host.labels.get(key) for key in missing},
        fix="label the host so in the inventory, or change the job's `where.labels`",
    )


def drain(_job: JobSpec, host: Host) -> Refusal | None:
    """Hosts that are drained take no new job."""
    if not host.drain:
        return None
    return Refusal(code=Code.DRAIN, kind=Kind.HOST, fix="set `drain: false` in the inventory")


# Rules of a host by its facts.


def expect(_job: JobSpec, site: Site) -> Refusal | None:
    """Where the inventory expects devices and the probe finds others, something broke: nothing is placed there."""
    return unexpected(site)


def unexpected(site: Site) -> Refusal | None:
    """Return what is wrong where a host does not have the devices that the inventory expects of it."""
    wanted = site.host.expect
    if wanted is None:
        return None
    word, count = wanted.accelerator, wanted.count
    there = sum(
        len(devices)
        for accelerator, devices in site.devices.items()
        if (accelerator == word if word else accelerator != Accelerator.CPU)
    )
    if there == count or (count is None and there):
        return None
    return Refusal(
        code=Code.EXPECT,
        kind=Kind.HOST,
        needed={"accelerator": word, "count": count},
        found=there,
        fix="find out why the probe does not see these devices, or change the host's `expect`",
    )


def cpus(job: JobSpec, site: Site) -> Refusal | None:
    """`cpus` compares with the host's logical CPUs."""
    needed, found = job.resources.cpus, site.facts.cpu_logical
    if needed is None or (found is not None and needed <= found):
        return None
    if found is None:
        return undecided(Code.CPUS, needed=needed, fix="the host does not say how many CPUs it has")
    return Refusal(
        code=Code.CPUS, kind=Kind.JOB, needed=needed, found=found, fix="lower `resources.cpus`, or add a bigger host"
    )


def disk(job: JobSpec, site: Site) -> Refusal | None:
    """`disk_gb` compares with what is free where the runs are kept."""
    if job.resources.disk_gb is None:
        return None
    needed, found = size(job.resources.disk_gb), site.facts.disk_free_bytes
    if found is None:
        return undecided(Code.DISK, needed=needed, fix="the host does not say how much of its disk is free")
    if needed <= found:
        return None
    return Refusal(
        code=Code.DISK,
        kind=Kind.HOST,
        needed=needed,
        found=found,
        fix="free disk space on the host, or move its `state_dir` to a bigger disk",
    )


def capabilities(job: JobSpec, site: Site) -> Refusal | None:
    """All of `resources.capabilities` must have been shown by the probed interpreter."""
    missing = [name for name in job.resources.capabilities if name not in site.facts.capabilities]
    return _lacking(missing, {"all_of": missing}, site, None) if missing else None


def architecture(job: JobSpec, site: Site) -> Refusal | None:
    """Hosts of a gang are of one CPU architecture, and one that is not known is no other's."""
    if not wants_one_arch(job) or arch_of(site) is not None:
        return None
    return undecided(
        Code.DISTRIBUTED,
        needed="one CPU architecture",
        fix="the host does not say its CPU architecture; `distributed.mixed_arch: true` does not ask for it",
    )


def wants_one_arch(job: JobSpec) -> bool:
    """Tell whether a job goes to several hosts that must be of one CPU architecture."""
    return isinstance(job, DistributedJob) and job.distributed.nodes > 1 and not job.distributed.mixed_arch


def arch_of(site: Site) -> str | None:
    """Return a host's CPU architecture in one word: what macOS calls arm64 is aarch64 on Linux."""
    return "arm64" if site.facts.arch == "aarch64" else site.facts.arch


# Rules of a host under one accelerator.


def framework(job: JobSpec, accelerator: Accelerator, site: Site) -> Refusal | None:
    """`framework` demands its capability on the accelerator; of several, one suffices."""
    wanted = demanded(job.framework, accelerator)
    if not wanted or site.facts.capabilities.intersection(wanted):
        return None
    return _lacking(wanted, {"any_of": list(wanted)}, site, accelerator)


def backend(job: JobSpec, accelerator: Accelerator, site: Site) -> Refusal | None:
    """Gangs of torch need its collective backend shown; one that names no framework is asked for none."""
    if not isinstance(job, DistributedJob) or job.framework is None:
        return None
    wanted = backend_capability(job.backend_on(accelerator))
    return None if wanted in site.facts.capabilities else _lacking([wanted], {"all_of": [wanted]}, site, accelerator)


def gpu_count(job: JobSpec, accelerator: Accelerator, site: Site) -> Refusal | None:
    """Jobs on a GPU take at least one device and jobs on cpu take none; nobody gets more than there are."""
    needed = gpus_of(job, accelerator)
    if accelerator is Accelerator.CPU:
        found, fits, fix = 0, needed == 0, "leave `resources.gpus` out, or leave `cpu` out of `accelerator`"
    else:
        found = len(site.devices[accelerator])
        fits = 1 <= needed <= found
        asked = "resources.gpus" if job.resources.gpus is not None else "distributed.processes_per_node"
        fix = f"lower `{asked}`, or add a host with more devices"
        if needed == 0:
            fix = f"a job on {accelerator} takes at least one device: leave `resources.gpus` out, or use `cpu`"
    if fits:
        return None
    return Refusal(code=Code.GPU_COUNT, kind=Kind.JOB, accelerator=accelerator, needed=needed, found=found, fix=fix)


def memory(job: JobSpec, accelerator: Accelerator, site: Site) -> Refusal | None:
    """`memory_gb` compares with the host's memory, in which GPU memory counts too where it is unified."""
    needed, found = memory_taken(job, accelerator, site), site.memory
    one = size(job.resources.gpu_memory_gb or 0)
    if job.resources.memory_gb is None and (found is None or one > (site.facts.memory_bytes or found)):
        return None  # memory of GPUs alone is demanded, and not one of them has as much: `gpu_memory` says so
    if found is None:
        return undecided(
            Code.MEMORY, accelerator=accelerator, needed=needed, fix="the host does not say how much memory it has"
        )
    if needed <= found:
        return None
    return Refusal(
        code=Code.MEMORY,
        kind=Kind.JOB,
        accelerator=accelerator,
        needed=needed,
        found=found,
        memory_kind=MemoryKind.UNIFIED if _is_unified(accelerator, site) else None,
        fix="lower `resources.memory_gb`, or add a host with more memory",
    )


# Rules of one device.


def health(_job: JobSpec, accelerator: Accelerator, device: Device, _site: Site) -> Refusal | None:
    """Devices that the probe found unusable take no job; doubtful ones do, with a warning."""
    if device.health != "unusable":
        return None
    return Refusal(
        code=Code.HEALTH,
        kind=Kind.HOST,
        accelerator=accelerator,
        device=device.id,
        found=device.health,
        fix="see the host's notes with `gpulayer probe`",
    )


def memory_kind(job: JobSpec, accelerator: Accelerator, device: Device, _site: Site) -> Refusal | None:
    """`gpu_memory_kind` excludes the other kind, and every device whose kind is not known."""
    needed = job.resources.gpu_memory_kind
    if needed is None or device.memory_kind == needed:
        return None
    return Refusal(
        code=Code.MEMORY_KIND,
        kind=Kind.JOB,
        accelerator=accelerator,
        device=device.id,
        needed=needed,
        found=device.memory_kind,
        memory_kind=device.memory_kind,
        fix="leave `resources.gpu_memory_kind` out if the program runs with either kind",
    )


def gpu_memory(job: JobSpec, accelerator: Accelerator, device: Device, _site: Site) -> Refusal | None:
    """`gpu_memory_gb` compares with what a workload can really get, where that is known.

    Where it is not, a total below the demand decides, and a total above it decides nothing.
    """
    if job.resources.gpu_memory_gb is None:
        return None
    needed = size(job.resources.gpu_memory_gb)
    if accelerator is Accelerator.CPU:
        fix = "leave `resources.gpu_memory_gb` out, or leave `cpu` out of `accelerator` (`memory_gb` is the host's)"
        return Refusal(code=Code.GPU_MEMORY, kind=Kind.JOB, accelerator=accelerator, needed=needed, fix=fix)
    usable, total = device.usable_bytes, device.memory_bytes
    if usable is not None and usable >= needed:
        return None
    found = usable if usable is not None else total
    if found is not None and found < needed:
        return Refusal(
            code=Code.GPU_MEMORY,
            kind=Kind.JOB,
            accelerator=accelerator,
            device=device.id,
            needed=needed,
            found=found,
            memory_kind=device.memory_kind,
            fix="lower `resources.gpu_memory_gb`, or add a device with more memory",
        )
    return undecided(
        Code.GPU_MEMORY,
        accelerator=accelerator,
        device=device,
        needed=needed,
        fix="what a workload can get of this device is not known: install the job's framework there, which can tell",
    )


def compute_capability(job: JobSpec, accelerator: Accelerator, device: Device, _site: Site) -> Refusal | None:
    """`compute_capability` is a minimum that only CUDA devices have."""
    needed, found = job.resources.compute_capability, device.compute_capability
    if needed is None or (found is not None and found >= needed):
        return None
    word = f">={needed[0]}.{needed[1]}"
    if found is None and accelerator is Accelerator.CUDA:
        fix = "the driver does not tell the compute capability of this device: see its notes with `gpulayer probe`"
        return undecided(Code.COMPUTE_CAPABILITY, accelerator=accelerator, device=device, needed=word, fix=fix)
    return Refusal(
        code=Code.COMPUTE_CAPABILITY,
        kind=Kind.JOB,
        accelerator=accelerator,
        device=device.id,
        needed=word,
        found=f"{found[0]}.{found[1]}" if found else None,
        fix="lower `resources.compute_capability`, or add a newer CUDA device",
    )


def dtype(job: JobSpec, accelerator: Accelerator, device: Device, site: Site) -> Refusal | None:
    """Metal has no double (PyTorch's MPS page; MLX alike); other dtypes count as there until the device failed them."""
    if not job.resources.dtypes:
        return None
    never = sorted(NEVER_DTYPES.get(accelerator, frozenset()).intersection(job.resources.dtypes))
    if never:
        return Refusal(
            code=Code.DTYPE,
            kind=Kind.NEVER,
            accelerator=accelerator,
            device=device.id,
            needed=never,
            fix=NO_DOUBLE,
        )
    fact = site.facts.frameworks.get(job.framework) if job.framework else None
    if fact is None or not _tried_on(device, fact, site.facts):
        return None
    failed = {name: fact.ops[name] for name in sorted(job.resources.dtypes) if fact.ops.get(name) in FAILED_OPS}
    if not failed:
        return None
    return Refusal(
        code=Code.DTYPE,
        kind=Kind.HOST,
        accelerator=accelerator,
        device=device.id,
        needed=sorted(failed),
        found=", ".join(f"{name} {result}" for name, result in failed.items()),
        fix="a newer version of the framework may have it (`gpulayer probe --deep` tries again); or use another dtype",
    )


HostRule = Callable[[JobSpec, Host], Refusal | None]
SiteRule = Callable[[JobSpec, Site], Refusal | None]
AcceleratorRule = Callable[[JobSpec, Accelerator, Site], Refusal | None]
DeviceRule = Callable[[JobSpec, Accelerator, Device, Site], Refusal | None]

# `where` and `disk` stand apart: they look at what each host has for itself, its name and its free disk.
HOST_RULES: Final[tuple[HostRule, ...]] = (labels, drain)
SITE_RULES: Final[tuple[SiteRule, ...]] = (expect, cpus, capabilities, architecture)
ACCELERATOR_RULES: Final[tuple[AcceleratorRule, ...]] = (framework, backend, gpu_count, memory)
DEVICE_RULES: Final[tuple[DeviceRule, ...]] = (health, memory_kind, gpu_memory, compute_capability, dtype)


def _tried_on(device: Device, fact: FrameworkFact, facts: HostFacts) -> bool:
    """Say whether `ops` were tried on this device or on one of its model; where no device is told, on any GPU."""
    if fact.ops_device is None:
        return device.accelerator != Accelerator.CPU
    tried = next((one for one in facts.devices if one.id == fact.ops_device), None)
    return tried is not None and _model(tried) == _model(device)


def _model(device: Device) -> tuple[object, ...]:
    return device.accelerator, device.name, device.compute_capability, device.virtual


def _is_unified(accelerator: Accelerator, site: Site) -> bool:
    devices = site.devices[accelerator]
    return accelerator is not Accelerator.CPU and any(device.memory_kind == MemoryKind.UNIFIED for device in devices)


def _lacking(
    missing: list[str] | tuple[str, ...], needed: object, site: Site, accelerator: Accelerator | None
) -> Refusal:
    """Say that a capability was not shown: absent, or unknown where its framework's child did not come to an end."""
    names = {name.partition(".")[0] for name in missing}
    seen = site.facts.frameworks
    statuses = {name: seen[name].status for name in sorted(names) if name in seen}
    if any(status in UNDECIDED_STATUS for status in statuses.values()):
        fix = "the probe of the framework did not finish: `gpulayer plan --fresh` asks again"
        if site.facts.python is None:
            fix = "the interpreter (`python`) gave no answer there: name one that is on the host before the job's setup"
        return undecided(Code.CAPABILITY, accelerator=accelerator, needed=needed, found=statuses, fix=fix)
    return Refusal(
        code=Code.CAPABILITY,
        kind=Kind.HOST,
        accelerator=accelerator,
        needed=needed,
        found=statuses or None,
        fix="install it for the host's interpreter, or name an interpreter that has it (`python`)",
    )


def undecided(
    about: Code,
    *,
    needed: object,
    fix: str,
    accelerator: Accelerator | None = None,
    device: Device | None = None,
    found: object = None,
) -> Refusal:
    """Return the refusal of a question that the facts leave open."""
    return Refusal(
        code=Code.UNKNOWN,
        kind=Kind.HOST,
        about=about,
        accelerator=accelerator,
        device=device.id if device else None,
        needed=needed,
        found=found,
        fix=fix,
    )
