"""Jobs: what the user declares, as typed values that hold by themselves."""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpulayer.errors import InvalidDocumentError, Problem
from gpulayer.spec import support
from gpulayer.spec.documents import Document, collector_paused, field_name, load, show
from gpulayer.spec.entries import Fault, located, merged, refuse
from gpulayer.spec.inventory import Inventory
from gpulayer.spec.schemas import sound, suggestion, unknown_word, validate
from gpulayer.spec.support import Accelerator, Backend, Framework, JobKind, MemoryKind

RESERVED_PREFIX: Final = "GPULAYER_"
RESERVED: Final = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        "ONEAPI_DEVICE_SELECTOR",
    }
)
"""Names by which a job is given its devices, and would take those of others."""
RESERVED_IN_GANGS: Final = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    }
)
"""Names that torchrun sets in each process, whatever they were (LocalElasticAgent of PyTorch)."""

_TORCHRUN: Final = (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"])

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_CAPABILITY: Final = re.compile(r">= ?([0-9]+)\.([0-9]+)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LONGEST: Final = 366 * _SECONDS["d"]
# What a launch carries in one frame (docs/protocol.md): characters of a text, and bytes of all texts as JSON.
_LONGEST_TEXT: Final = 64 * 1024
_MOST_TEXT: Final = 512 * 1024
_MOST_OUTPUTS: Final = 64 * 1024
_AMOUNTS: Final = ("gpus", "gpu_memory_gb", "cpus", "memory_gb", "disk_gb")
_MOST: Final = 2**20
# A node's run id has room for two digits; no host is known that would hold more ranks.
MOST_NODES: Final = 100
MOST_PROCESSES: Final = 1024
_GPU_DEMANDS: Final = ("gpus", "gpu_memory_gb", "gpu_memory_kind", "compute_capability")

# Without these nothing can be said of the rest of a job.
_DECISIVE: Final = ("accelerator", "command")


class InvalidJobError(InvalidDocumentError):
    """A job that cannot be; `faults` say at which of its fields."""

    def __init__(self, name: str, faults: Sequence[Fault]) -> None:
        """`faults` is not empty."""
        self.faults = tuple(faults)
        super().__init__(
            [
                Problem(path=f"job {name!r}", line=0, column=0, field=field_name(fault.pointer), message=fault.message)
                for fault in faults
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What a job demands of a device and its host. Sizes are GiB (2^30 bytes); None and () demand nothing.

    `gpus` None means the default of the chosen accelerator: 1 on a GPU, 0 on cpu.
    `compute_capability` is a minimum, `(8, 0)` for `">=8.0"`.
    """

    gpus: int | None = None
    gpu_memory_gb: float | None = None
    gpu_memory_kind: MemoryKind | None = None
    compute_capability: tuple[int, int] | None = None
    cpus: int | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None
    capabilities: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Which hosts a job may go to. Every label must match; an empty `hosts` allows all."""

    labels: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    not_hosts: tuple[str, ...] = ()


class Cause(enum.StrEnum):
    """A kind of end after which a job may be run again."""

    FAILED = "failed"  # a code other than 0, a signal, a start that failed
    TIMED_OUT = "timed_out"
    LOST = "lost"  # it may have done its work: only the user can say that a second time does no harm


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How many attempts may follow the first one, and after which ends."""

    max: int = 0
    on: tuple[Cause | str, ...] = (Cause.FAILED, Cause.TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """Shape of a gang: `nodes` distinct hosts with `processes_per_node` ranks each.

    The hosts are of one CPU architecture unless `mixed_arch` says that the ranks may run on several.
    """

    nodes: int = 1
    processes_per_node: int | None = None
    backend: Backend | None = None
    mixed_arch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentJob:
    """One process on one host. `command` as a tuple is executed, as a string run by /bin/sh.

    `accelerator` is given as a word or a sequence in the user's order of preference, and kept as a tuple.
    `timeout` and `grace` are seconds. `workdir` is a path on the controller, already resolved, or None. `retries` given
    as a number have the default causes.
    """

    name: str
    command: tuple[str, ...] | str
    accelerator: Accelerator | str | Sequence[Accelerator | str] = (Accelerator.CPU,)
    framework: Framework | None = None
    resources: ResourceRequest = field(default_factory=ResourceRequest)
    where: Where = field(default_factory=Where)
    python: str | None = None
    setup: str | None = None
    workdir: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    timeout: float | None = None
    grace: float = 10.0
    retries: Retries | int = Retries()  # a frozen value

    def __post_init__(self) -> None:
        """Bring all fields to one form and check them; raises InvalidJobError, as the document would."""
        put = functools.partial(object.__setattr__, self)
        try:
            given = self.accelerator
            put("accelerator", tuple(map(Accelerator, (given,) if isinstance(given, str) else given)))
            put("framework", self.framework and Framework(self.framework))
        except ValueError:
            raise InvalidJobError(self.name, tuple(_unknown_words(self))) from None
        if not isinstance(self.command, str):
            put("command", tuple(self.command))
        if not isinstance(self.retries, Retries):
            put("retries", Retries(max=self.retries))
        put("secrets", tuple(self.secrets))
        put("outputs", tuple(self.outputs))
        faults = tuple(dict.fromkeys(_faults(self)))
        if faults:
            raise InvalidJobError(self.name, faults)

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The accelerators in order of preference."""
        value: Any = self.accelerator
        return value  # type: ignore[no-any-return]  # __post_init__ made it a tuple

    @property
    def nodes(self) -> int | None:
        """How many hosts a gang takes at once; None: the job is no gang."""
        return None

    @property
    def retry(self) -> Retries:
        """What a number of `retries` means too."""
        value: Any = self.retries
        return value  # type: ignore[no-any-return]  # __post_init__ made it Retries


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedJob(IndependentJob):
    """A gang of ranks under one fate, launched with torchrun."""

    distributed: Distributed = field(default_factory=Distributed)

    @property
    def nodes(self) -> int | None:
        """How many hosts the gang takes at once."""
        return self.distributed.nodes

    @property
    def processes(self) -> int:
        """How many ranks a node has: as the job says, else one a GPU, else one."""
        return self.distributed.processes_per_node or self.resources.gpus or 1

    def backend_on(self, accelerator: Accelerator) -> Backend:
        """Return the collective backend under an accelerator: as the job says, else gloo on cpu and nccl on a GPU."""
        given = self.distributed.backend
        return Backend(given) if given else Backend.GLOO if accelerator is Accelerator.CPU else Backend.NCCL


JobSpec = IndependentJob | DistributedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSet:
    """All jobs of one document, in its order. `project` is the document's name, else its folder's."""

    project: str
    jobs: Mapping[str, JobSpec]
    path: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the jobs file, beside which `.gpulayer/` lies."""
        return (self.path.parent if self.path else Path()).resolve()


def load_jobs(path: Path) -> JobSet:
    """Return the jobs in the file at `path`. Raises InvalidDocumentError with all of its problems."""
    return parse_jobs(load(path))


def parse_jobs(document: Document) -> JobSet:
    """Return the jobs that `document` declares, defaults merged. Raises InvalidDocumentError with all problems.

    A default reaches every job that says nothing else, mappings key by key; `~` takes it away. `workdir` is resolved
    against the folder of the document's path.
    """
    with collector_paused():
        problems = validate(document, "jobs", advice=support.ADVICE)
        entries = sound(document, "jobs") if problems else document.value["jobs"]
        path = Path(document.path)
        folder = path.parent.resolve()
        # Many jobs, few folders: each costs several calls to the system.
        resolved = functools.cache(lambda workdir: (folder / workdir).resolve())
        jobs: dict[str, JobSpec] = {}
        defaults = document.value.get("defaults") or {} if entries else {}
        for name, own in entries.items():
            values = merged(defaults, own)
            if problems and any(key in document.value["jobs"][name] and key not in own for key in _DECISIVE):
                continue
            try:
                jobs[name] = _job(name, values, resolved)
            except InvalidJobError as error:
                problems += located(document, "jobs", name, error.faults)
        if problems:
            raise refuse(problems)
        return JobSet(project=document.value.get("name") or slug(folder.name), jobs=jobs, path=path)


def slug(folder: str) -> str:
    """Return a folder's name as a project's: `My Sweep` is `my-sweep`."""
    return re.sub(r"[^a-z0-9]+", "-", folder.lower())[:63].strip("-") or "jobs"


def _job(name: str, values: dict[str, Any], resolved: Callable[[str], Path]) -> JobSpec:
    """Return the job that `values` declare; the schema holds for them. Raises InvalidJobError."""
    values.setdefault("command", ())
    if "resources" in values:
        values["resources"] = _resources(values["resources"])
    if "where" in values:
        where = values["where"]
        values["where"] = Where(
            labels=where.get("labels", {}),
            hosts=tuple(where.get("hosts", ())),
            not_hosts=tuple(where.get("not_hosts", ())),
        )
    if "workdir" in values:
        values["workdir"] = resolved(values["workdir"])
    for key in ("timeout", "grace"):
        if key in values:
            text = values[key]
            values[key] = float(int(text[:-1]) * _SECONDS[text[-1]])
    if isinstance(retries := values.get("retries"), dict):
        values["retries"] = Retries(**{**retries, **({"on": tuple(retries["on"])} if "on" in retries else {})})
    if "distributed" not in values:
        return IndependentJob(name=name, **values)
    shape = values.pop("distributed")
    if "backend" in shape:
        shape["backend"] = Backend(shape["backend"])
    return DistributedJob(name=name, distributed=Distributed(**shape), **values)


def _resources(values: dict[str, Any]) -> ResourceRequest:
    if "gpu_memory_kind" in values:
        values["gpu_memory_kind"] = MemoryKind(values["gpu_memory_kind"])
    if "compute_capability" in values:
        found = _CAPABILITY.fullmatch(values["compute_capability"])
        values["compute_capability"] = (int(found[1]), int(found[2])) if found else None
    for key in ("capabilities", "dtypes"):
        if key in values:
            values[key] = tuple(values[key])
    return ResourceRequest(**values)


def check_hosts(jobs: JobSet, inventory: Inventory, document: Document) -> list[Problem]:
    """Return a problem for each host that a job's `where` names and the inventory does not have."""
    known = tuple(inventory.hosts)
    near = functools.cache(lambda host: suggestion(host, known))
    problems: dict[Problem, None] = {}
    for name, job in jobs.jobs.items():
        for key, hosts in (("hosts", job.where.hosts), ("not_hosts", job.where.not_hosts)):
            faults = [
                Fault(("where", key, nth), f"the inventory has no host {host!r}{near(host)}")
                for nth, host in enumerate(hosts)
                if host not in inventory.hosts
            ]
            problems.update(dict.fromkeys(located(document, "jobs", name, faults)))
    return list(problems)


def _unknown_words(job: IndependentJob) -> Iterator[Fault]:
    """Yield what no accelerator and no framework is called."""
    given = job.accelerator
    for words, key, allowed in (
        ((given,) if isinstance(given, str) else given, "accelerator", [*Accelerator]),
        ((job.framework,) if job.framework else (), "framework", [*Framework]),
    ):
        for word in words:
            if word not in allowed:
                yield Fault((key,), unknown_word(str(word), allowed, support.ADVICE))


def _faults(job: IndependentJob) -> Iterator[Fault]:
    """Yield all that is wrong with a job by itself. Documents have passed their schema before; the SDK's have not."""
    if not _NAME.fullmatch(job.name):
        message = f"{show(job.name)} is not valid: 1 to 63 of a-z, 0-9 and '-', starting with a letter or digit"
        yield Fault(("name",), message)
    yield from _program_faults(job)
    yield from _environment_faults(job)
    yield from _size_faults(job)
    yield from _placement_faults(job)
    for key, seconds, least in (("timeout", job.timeout, 1), ("grace", job.grace, 0)):
        if seconds is not None and not least <= seconds <= _LONGEST:
            yield Fault(
                (key,), f"is {seconds:,.0f} seconds; at least {least} and at most {_LONGEST:,} (366 days) are possible"
            )
    if job.retry.max < 0:
        yield Fault(("retries",), f"{job.retry.max} is below 0")
    for word in job.retry.on:
        if word not in [*Cause]:
            yield Fault(("retries", "on"), unknown_word(str(word), [*Cause], support.ADVICE))


def _program_faults(job: IndependentJob) -> Iterator[Fault]:
    command = job.command
    if not command:
        yield Fault(("command",), "'command' is missing: what the job runs")
    for nth, word in enumerate((command,) if isinstance(command, str) else command):
        if not _can_be_given(word):
            pointer = ("command",) if isinstance(command, str) else ("command", nth)
            yield Fault(pointer, f"{show(word)} is not text without NUL characters: no program can be given it")
    for key, text in (("python", job.python), ("setup", job.setup)):
        if text is not None and not (text and _can_be_given(text)):
            yield Fault((key,), f"{show(text)} is empty or holds a NUL character")
    for nth, pattern in enumerate(job.outputs):
        parts = pattern.split("/")
        if not pattern.strip() or pattern[0] in "/~" or ".." in parts or "." in parts or "\0" in pattern:
            message = f"{show(pattern)} is not valid: a pattern below the working directory, like checkpoints/**"
            yield Fault(("outputs", nth), f"{message}, without '.' and '..'")


def _can_be_given(value: object) -> bool:
    """Say whether a program can get a value as an argument or in its environment: text that has bytes, none a NUL.

    Bytes that are no UTF-8 are text to Python too, as `os.fsdecode` makes it; half a surrogate pair has no bytes.
    """
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _size_faults(job: IndependentJob) -> Iterator[Fault]:
    """Yield what would not fit into a launch. Texts are measured as JSON only where that could matter."""
    words = (job.command,) if isinstance(job.command, str) else job.command
    program = (*words, job.setup, job.python, *job.env, *job.env.values(), *job.secrets)
    for key, given, most in (("command", program, _MOST_TEXT), ("outputs", job.outputs, _MOST_OUTPUTS)):
        texts = [text for text in given if isinstance(text, str)]
        if sum(map(len, texts)) * len("\\ud83d\\ude00") <= most:
            continue
        if (size := len(json.dumps(texts))) > most or max(map(len, texts)) > _LONGEST_TEXT:
            what = "with setup and env it is" if key == "command" else "the patterns are"
            limits = f"{most:,} and {_LONGEST_TEXT:,} a text are possible"
            yield Fault((key,), f"{what} {size:,} bytes long; {limits}: put more into a file of the workdir")


def _environment_faults(job: IndependentJob) -> Iterator[Fault]:
    gang = isinstance(job, DistributedJob)
    for name, value in job.env.items():
        if not _can_be_given(value):
            yield Fault(("env", name), f"{show(value)} is not text without NUL characters")
        yield from _variable_faults(name, ("env", name), key=True, gang=gang)
    for nth, name in enumerate(job.secrets):
        yield from _variable_faults(name, ("secrets", nth), key=False, gang=gang)
        if name in job.env:
            yield Fault(("secrets", nth), f"{name} is in `env` too; keep one")


def _variable_faults(name: str, pointer: tuple[str | int, ...], *, key: bool, gang: bool) -> Iterator[Fault]:
    if not _VARIABLE.fullmatch(name):
        yield Fault(pointer, f"{show(name)} is not valid: letters, digits and '_', not starting with a digit", key)
    elif name in RESERVED or name.startswith(RESERVED_PREFIX):
        yield Fault(pointer, f"{name} is reserved: it tells the job its device; take it out", key)
    elif gang and name in RESERVED_IN_GANGS:
        yield Fault(pointer, f"{name} is reserved: torchrun sets it in each process of a gang; take it out", key)


def _placement_faults(job: IndependentJob) -> Iterator[Fault]:
    """Yield what no host could ever satisfy, whatever it has."""
    accelerators, where = job.accelerators, job.where
    if not accelerators or len(set(accelerators)) < len(accelerators):
        yield Fault(("accelerator",), "names no accelerator, or one twice; name each once, the best first")
    kind = JobKind.DISTRIBUTED if isinstance(job, DistributedJob) else JobKind.INDEPENDENT
    for nth, accelerator in enumerate(accelerators):
        row = support.row(accelerator, kind, job.framework)
        if not row.allowed and row.why == support.DISTRIBUTED_MPS:
            yield Fault(("accelerator", nth) if len(accelerators) > 1 else ("accelerator",), row.why)
        elif not row.allowed:
            yield Fault(("framework",), row.why)
    if isinstance(job, DistributedJob):
        yield from _gang_faults(job)
    yield from _resource_faults(job.resources, accelerators)
    if where.hosts and set(where.hosts) <= set(where.not_hosts):
        yield Fault(("where", "not_hosts"), "excludes every host that `hosts` names; nothing is left")


def _resource_faults(resources: ResourceRequest, accelerators: Sequence[Accelerator]) -> Iterator[Fault]:
    if accelerators == (Accelerator.CPU,):
        for demand in _GPU_DEMANDS:
            if getattr(resources, demand):
                message = "asks for a GPU, and the job's accelerator is cpu; name cuda, mps or rocm, or take this out"
                yield Fault(("resources", demand), message)
    elif resources.gpus == 0:
        message = "0 GPUs and a GPU accelerator contradict each other; leave gpus out, or write `accelerator: cpu`"
        yield Fault(("resources", "gpus"), message)
    for amount in _AMOUNTS:
        value = getattr(resources, amount)
        if value is not None and not 0 < value <= _MOST and (amount, value) != ("gpus", 0):
            yield Fault(("resources", amount), f"{value} is not an amount: above 0, at most {_MOST:,}")
    for key, words, known in (
        ("capabilities", resources.capabilities, support.CAPABILITIES),
        ("dtypes", resources.dtypes, support.DTYPES),
    ):
        for nth, word in enumerate(words):
            if word not in known:
                yield Fault(("resources", key, nth), unknown_word(word, known, support.ADVICE))


def _gang_faults(job: DistributedJob) -> Iterator[Fault]:
    distributed, gpus = job.distributed, job.resources.gpus
    words = [str(word) for word in (job.command.split() if isinstance(job.command, str) else job.command)]
    if words and (words[0].rpartition("/")[2] == "torchrun" or words[1:3] in _TORCHRUN):
        message = "starts torchrun, which is each rank's parent anyway; name the program alone: [python, train.py]"
        yield Fault(("command",), message)
    for key, count, most in (
        ("nodes", distributed.nodes, MOST_NODES),
        ("processes_per_node", distributed.processes_per_node, MOST_PROCESSES),
    ):
        if count is not None and not 1 <= count <= most:
            yield Fault(("distributed", key), f"{count} is not a number from 1 to {most:,}")
    if distributed.backend and distributed.backend not in [*Backend]:
        yield Fault(("distributed", "backend"), unknown_word(distributed.backend, [*Backend], support.ADVICE))
        return
    for accelerator in job.accelerators:
        backend = job.backend_on(accelerator)
        places = support.BACKEND_ACCELERATORS[backend]
        if accelerator is Accelerator.MPS:
            continue
        if accelerator not in places:
            message = f"{backend} does not run on {accelerator}, only on {' and '.join(places)}"
            yield Fault(("distributed", "backend"), f"{message}; use gloo")
        elif backend is Backend.NCCL and gpus is not None and job.processes > gpus:
            message = f"{job.processes} processes on {gpus} GPU{'' if gpus == 1 else 's'}: with nccl each takes its own"
            yield Fault(
                ("distributed", "processes_per_node"), f"{message}; lower it, raise resources.gpus, or use gloo"
            )
