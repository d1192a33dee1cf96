"""Sentences of refusals: the one place where typed reasons become words, for people and for JSON's `message`.

Text in them that came from a host (an error, a holder) is raw: whoever shows it on a terminal escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gpulayer.placement.plan import Code, Refusal
from gpulayer.placement.rules import GIB
from gpulayer.spec.support import MemoryKind

SHARED: Final = "unified memory shared with the CPU"


def sentence(refusal: Refusal) -> str:
    """Return what is in the way, in one sentence without a full stop, the accelerator first where it matters."""
    text = _SENTENCES[refusal.code](refusal)
    return f"{refusal.accelerator}: {text}" if refusal.accelerator else text


def gib(size: float) -> str:
    """Return bytes as GiB with up to two places: `143 GiB`, `10.67 GiB`."""
    return f"{round(size / GIB, 2):g} GiB" if size >= GIB / 100 else f"{size / 2**20:.3g} MiB"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return "none" if value is None else str(value)


def _found(value: object, one: Callable[[Any], str] = _plain, either: str = " or ") -> str:
    """Words for `found`, which is one value or covers several hosts (see `GroupedRefusal`)."""
    if isinstance(value, Mapping) and value.keys() == {"from", "to"}:
        return f"{one(value['from'])} to {one(value['to'])}"
    if isinstance(value, Mapping) and "any_of" in value:
        more = f" and {value['more']} others" if "more" in value else ""
        return either.join(one(item) for item in value["any_of"]) + more
    return one(value)


def _unreachable(refusal: Refusal) -> str:
    return f"the host cannot be reached ({_found(refusal.found)})"


def _accelerator(refusal: Refusal) -> str:
    return f"needs {' or '.join(refusal.needed)}, and the host has {_found(refusal.found, ' and '.join, ', or ')}"


def _capability(refusal: Refusal) -> str:
    status = f" ({_found(refusal.found)})" if refusal.found else ""
    return f"needs {_names(refusal.needed)}, which was not shown to work there{status}"


def _names(needed: Mapping[str, list[str]]) -> str:
    return " or ".join(needed["any_of"]) if "any_of" in needed else " and ".join(needed["all_of"])


def _gpu_count(refusal: Refusal) -> str:
    return f"needs {refusal.needed} devices, and the host has {_found(refusal.found)}"


def _gpu_memory(refusal: Refusal) -> str:
    if refusal.found is None:
        return f"needs {gib(refusal.needed)} of GPU memory, and a CPU has none"
    return f"needs {gib(refusal.needed)} of GPU memory, and {_found(refusal.found, gib)}{_kind(refusal)} can be used"


def _kind(refusal: Refusal) -> str:
    if refusal.memory_kind == MemoryKind.UNIFIED.value:
        return f" of {SHARED}"
    return f" of {refusal.memory_kind} memory" if refusal.memory_kind else ""


def _memory_kind(refusal: Refusal) -> str:
    if refusal.memory_kind == MemoryKind.UNIFIED.value:
        return f"needs {refusal.needed} GPU memory, and this is {SHARED}"
    return f"needs {refusal.needed} GPU memory, and its kind is {_found(refusal.found or 'not known')}"


def _compute_capability(refusal: Refusal) -> str:
    found = _found(refusal.found) if refusal.found else "none, which only CUDA devices have"
    return f"needs compute capability {refusal.needed}, and the device has {found}"


def _dtype(refusal: Refusal) -> str:
    if refusal.found is None:
        return f"{' and '.join(refusal.needed)} cannot be used: Metal has no double-precision type"
    return f"{' and '.join(refusal.needed)} failed when it was tried there ({_found(refusal.found)})"


def _cpus(refusal: Refusal) -> str:
    return f"needs {refusal.needed} CPUs, and the host has {_found(refusal.found)}"


def _memory(refusal: Refusal) -> str:
    what = f"memory, GPU memory included ({SHARED})" if refusal.memory_kind else "memory"
    return f"needs {gib(refusal.needed)} of {what}, and the host has {_found(refusal.found, gib)}"


def _disk(refusal: Refusal) -> str:
    return f"needs {gib(refusal.needed)} of free disk, and the host has {_found(refusal.found, gib)}"


def _labels(refusal: Refusal) -> str:
    return f"needs the labels {_plain(refusal.needed)}, and the host has {_found(refusal.found)}"


def _where(refusal: Refusal) -> str:
    if "hosts" in refusal.needed:
        return f"the job's `where` names other hosts ({_plain(refusal.needed['hosts'])})"
    return "the job's `where` excludes the host"


def _drain(_refusal: Refusal) -> str:
    return "the host takes no new jobs (`drain`)"


def _health(refusal: Refusal) -> str:
    return f"the device is {_found(refusal.found)}"


def _expect(refusal: Refusal) -> str:
    word, count = refusal.needed["accelerator"] or "GPU", refusal.needed["count"]
    wanted = f"{word} devices" if count is None else f"{count} {word} device{'' if count == 1 else 's'}"
    return f"the inventory expects {wanted}, and the probe found {_found(refusal.found or 'none')}"


def _busy(refusal: Refusal) -> str:
    return f"busy: held by {_found(refusal.found, _holder)}"


def _holder(found: object) -> str:
    """Words for a device's holder, or for the slots of a host."""
    if isinstance(found, Mapping):
        return f"jobs in {found['slots_held']} of {found['slots']} CPU slots"
    return str(found)


def _distributed(refusal: Refusal) -> str:
    if isinstance(refusal.found, Mapping):
        fitting = f"these fit: {_found(refusal.found)}"
        return f"needs {refusal.needed} hosts of one CPU architecture at once, and {fitting}"
    return f"needs {refusal.needed} hosts at once, and {refusal.found} fit{'s' if refusal.found == 1 else ''}"


def _unknown(refusal: Refusal) -> str:
    questions: dict[Code, Callable[[], str]] = {
        Code.ACCELERATOR: lambda: "has such a device",
        Code.CAPABILITY: lambda: f"has {_names(refusal.needed)} ({_found(refusal.found)})",
        Code.GPU_MEMORY: lambda: f"offers {gib(refusal.needed)} of GPU memory",
        Code.COMPUTE_CAPABILITY: lambda: f"has compute capability {refusal.needed}",
        Code.DISTRIBUTED: lambda: "has the CPU architecture of the gang's other hosts",
        Code.CPUS: lambda: f"has {refusal.needed} CPUs",
        Code.MEMORY: lambda: f"has {gib(refusal.needed)} of memory",
        Code.DISK: lambda: f"has {gib(refusal.needed)} of free disk",
    }
    return f"it is not known whether the host {questions[refusal.about or Code.ACCELERATOR]()}"


_SENTENCES: Final[Mapping[Code, Callable[[Refusal], str]]] = {
    Code.UNREACHABLE: _unreachable,
    Code.ACCELERATOR: _accelerator,
    Code.CAPABILITY: _capability,
    Code.GPU_COUNT: _gpu_count,
    Code.GPU_MEMORY: _gpu_memory,
    Code.MEMORY_KIND: _memory_kind,
    Code.COMPUTE_CAPABILITY: _compute_capability,
    Code.DTYPE: _dtype,
    Code.CPUS: _cpus,
    Code.MEMORY: _memory,
    Code.DISK: _disk,
    Code.LABELS: _labels,
    Code.WHERE: _where,
    Code.DRAIN: _drain,
    Code.HEALTH: _health,
    Code.EXPECT: _expect,
    Code.BUSY: _busy,
    Code.DISTRIBUTED: _distributed,
    Code.UNKNOWN: _unknown,
}
