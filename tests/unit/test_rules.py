"""Each rule by itself: what it refuses, why, how near that is to a yes, and what it leaves undecided."""

from __future__ import annotations

from typing import Any

import pytest

from gpulayer.placement.explain import sentence
from gpulayer.placement.plan import Code, Kind, Refusal
from gpulayer.placement.verdicts import Fits, verdict
from tests.fleets import a_cuda, a_mac, device, document_of, fleet_of, framework, gang, jobs_of, report, views_of
from tests.oracle import Known

MAC, BOX, PLAIN = a_mac(32, 21, "torch", "torch.mps"), a_cuda(24, 2, "torch", "torch.cuda"), report()
UNSIZED = report(device("cuda", usable=None, memory=24), device("cuda", 1, usable=None, memory=24))


def refusals(job: dict[str, Any], one: dict[str, Any] | None, **known: Any) -> tuple[Refusal, ...]:
    """Why a job does not fit on a host with this report; () where it fits."""
    spec = jobs_of(document_of(job=job)).jobs["job"]
    found = verdict(spec, views_of(fleet_of({"host": one}), {"host": Known(**known)})[0])
    return () if isinstance(found, Fits) else found.refusals


def only(job: dict[str, Any], one: dict[str, Any] | None, **known: Any) -> Refusal:
    found = refusals(job, one, **known)
    assert len({refusal.code for refusal in found}) == 1
    return found[0]


def on(accelerator: str | list[str], *, framework: str | None = None, **resources: Any) -> dict[str, Any]:
    job: dict[str, Any] = {"accelerator": accelerator, "resources": resources}
    return job | ({"framework": framework} if framework else {})


def tried(result: str, where: str, *devices: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A host where PyTorch's int64 was tried on the device `where`."""
    torch = framework("torch", ops={"int64": result, "float32": "ok"}, ops_device=where)
    return report(*devices, frameworks=(torch,), **{"capabilities": ("torch.cuda",), **facts})


OWN = "~/venv/bin/python"


def of_its_own(job: dict[str, Any], python: str = OWN) -> dict[str, Any]:
    return job | {"python": python}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], Code, Kind]] = {
    "no answer": (on("cpu"), None, {}, Code.UNREACHABLE, Kind.HOST),
    "drained": (on("cpu"), PLAIN, {"drain": True}, Code.DRAIN, Kind.HOST),
    "labels": (on("cpu") | {"where": {"labels": {"a": "b"}}}, PLAIN, {"labels": {"a": "c"}}, Code.LABELS, Kind.HOST),
    "other hosts": (on("cpu") | {"where": {"hosts": ["other"]}}, PLAIN, {}, Code.WHERE, Kind.JOB),
    "not this host": (on("cpu") | {"where": {"not_hosts": ["host"]}}, PLAIN, {}, Code.WHERE, Kind.JOB),
    "a GPU went": (on("cpu"), BOX, {"expect": {"accelerator": "cuda", "count": 4}}, Code.EXPECT, Kind.HOST),
    "all GPUs went": (on("cpu"), PLAIN, {"expect": {"accelerator": "mps"}}, Code.EXPECT, Kind.HOST),
    "mps on CUDA": (on("mps"), BOX, {}, Code.ACCELERATOR, Kind.NEVER),
    "cuda on a Mac": (on("cuda"), MAC, {}, Code.ACCELERATOR, Kind.NEVER),
    "cuda on ROCm": (on("cuda"), report(device("rocm", memory=48)), {}, Code.ACCELERATOR, Kind.NEVER),
    "no torch there": (on("mps", framework="torch"), a_mac(), {}, Code.CAPABILITY, Kind.HOST),
    "torch, in the other interpreter": (
        of_its_own(on("mps", framework="torch")),
        MAC,
        {"pythons": {OWN: a_mac()}},
        Code.CAPABILITY,
        Kind.HOST,
    ),
    "a capability of the other interpreter": (
        of_its_own(on("cpu", capabilities=["torch"])),
        MAC,
        {"pythons": {OWN: a_mac()}},
        Code.CAPABILITY,
        Kind.HOST,
    ),
    "an interpreter that was not asked": (of_its_own(on("mps", framework="torch")), MAC, {}, Code.UNKNOWN, Kind.HOST),
    "no MLX there": (on("mps", framework="mlx"), MAC, {}, Code.CAPABILITY, Kind.HOST),
    "a capability": (on("cpu", capabilities=["mlx"]), MAC, {}, Code.CAPABILITY, Kind.HOST),
    "too many GPUs": (on("cuda", gpus=3), BOX, {}, Code.GPU_COUNT, Kind.JOB),
    "two Apple GPUs": (on("mps", gpus=2), MAC, {}, Code.GPU_COUNT, Kind.JOB),
    "GPUs of a CPU": (on(["mps", "cpu"], gpus=1), BOX, {}, Code.GPU_COUNT, Kind.JOB),
    "GPU memory": (on("cuda", gpu_memory_gb=25), BOX, {}, Code.GPU_MEMORY, Kind.JOB),
    "usable memory": (on("mps", gpu_memory_gb=22), MAC, {}, Code.GPU_MEMORY, Kind.JOB),
    "GPU memory of a CPU": (on(["mps", "cpu"], gpu_memory_gb=1), BOX, {}, Code.GPU_MEMORY, Kind.JOB),
    "total below": (on("cuda", gpu_memory_gb=25), UNSIZED, {}, Code.GPU_MEMORY, Kind.JOB),
    "total above": (on("cuda", gpu_memory_gb=1), UNSIZED, {}, Code.UNKNOWN, Kind.HOST),
    "dedicated on a Mac": (on("mps", gpu_memory_kind="dedicated"), MAC, {}, Code.MEMORY_KIND, Kind.JOB),
    "unified on CUDA": (on("cuda", gpu_memory_kind="unified"), BOX, {}, Code.MEMORY_KIND, Kind.JOB),
    "kind not known": (
        on("cuda", gpu_memory_kind="dedicated"),
        report(device("cuda", memory_kind=None)),
        {},
        Code.MEMORY_KIND,
        Kind.JOB,
    ),
    "an older GPU": (on("cuda", compute_capability=">=9.0"), BOX, {}, Code.COMPUTE_CAPABILITY, Kind.JOB),
    "no CUDA at all": (on("mps", compute_capability=">=8.0"), MAC, {}, Code.COMPUTE_CAPABILITY, Kind.JOB),
    "age not known": (on("cuda", compute_capability=">=8.0"), UNSIZED, {}, Code.UNKNOWN, Kind.HOST),
    "double on mps": (on("mps", dtypes=["float64"]), MAC, {}, Code.DTYPE, Kind.NEVER),
    "complex double on mps": (on("mps", dtypes=["float32", "complex128"]), MAC, {}, Code.DTYPE, Kind.NEVER),
    "a dtype that was tried": (
        on("cuda", framework="torch", dtypes=["bfloat16"]),
        report(
            device("cuda"),
            capabilities=("torch.cuda",),
            frameworks=(framework("torch", ops={"bfloat16": "unsupported"}),),
        ),
        {},
        Code.DTYPE,
        Kind.HOST,
    ),
    "a dtype that was wrong on this device": (
        on("cuda", framework="torch", dtypes=["int64"]),
        tried("wrong", "GPU-0", device("cuda")),
        {},
        Code.DTYPE,
        Kind.HOST,
    ),
    "a dtype that crashed on another device of its model": (
        on("cuda", framework="torch", dtypes=["int64"], gpus=2),
        tried("crashed", "GPU-0", device("cuda", name="A"), device("cuda", 1, name="A")),
        {},
        Code.DTYPE,
        Kind.HOST,
    ),
    "a dtype that the CPU lacks": (
        on("cpu", framework="torch", dtypes=["int64"]),
        tried("unsupported", "cpu:0", capabilities=("torch",)),
        {},
        Code.DTYPE,
        Kind.HOST,
    ),
    "CPUs": (on("cpu", cpus=9), PLAIN, {}, Code.CPUS, Kind.JOB),
    "more CPUs than there are": (on("cpu", cpus=9), PLAIN, {"max_jobs": 100}, Code.CPUS, Kind.JOB),
    "CPUs not known": (on("cpu", cpus=1), report(cpus=None), {}, Code.UNKNOWN, Kind.HOST),
    "memory": (on("cpu", memory_gb=65), PLAIN, {}, Code.MEMORY, Kind.JOB),
    "a limit": (on("cpu", memory_gb=8), report(limit=4), {}, Code.MEMORY, Kind.JOB),
    "memory not known": (on("cpu", memory_gb=1), report(memory=None), {}, Code.UNKNOWN, Kind.HOST),
    "unified memory twice": (on("mps", gpu_memory_gb=20, memory_gb=16), MAC, {}, Code.MEMORY, Kind.JOB),
    "disk": (on("cpu", disk_gb=101), PLAIN, {}, Code.DISK, Kind.HOST),
    "disk not known": (on("cpu", disk_gb=1), report(disk=None), {}, Code.UNKNOWN, Kind.HOST),
    "unusable": (on("mps"), report(device("mps", health="unusable")), {}, Code.HEALTH, Kind.HOST),
    "torch hung": (
        on("cpu", framework="torch"),
        report(frameworks=(framework("torch", status="timeout"),)),
        {},
        Code.UNKNOWN,
        Kind.HOST,
    ),
    "nvidia-smi hung": (on("cuda"), report(notes=("nvidia_smi_timeout",)), {}, Code.UNKNOWN, Kind.HOST),
    "an architecture that is not known": (gang(on("cpu")), report(arch=None), {}, Code.UNKNOWN, Kind.HOST),
    "torch without its collective backend": (
        gang(on("cpu", framework="torch")),
        report(capabilities=("torch",)),
        {},
        Code.CAPABILITY,
        Kind.HOST,
    ),
    "another collective backend": (
        gang(on("cuda", framework="torch"), backend="gloo"),
        a_cuda(24, 2, "torch.cuda", "torch.distributed.nccl"),
        {},
        Code.CAPABILITY,
        Kind.HOST,
    ),
    "more processes than GPUs": (gang(on("cuda"), processes_per_node=3), BOX, {}, Code.GPU_COUNT, Kind.JOB),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    job, one, known, code, kind = CASES[name]
    refusal = only(job, one, **known)
    assert (refusal.code, refusal.kind) == (code, kind)
    assert refusal.fix
    assert sentence(refusal)


def test_every_code_has_a_case() -> None:
    of_many = {Code.BUSY, Code.DISTRIBUTED}
    assert {code for _, _, _, code, _ in CASES.values()} == set(Code) - of_many


FITS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "torch, in its own interpreter": (
        of_its_own(on("mps", framework="torch")),
        a_mac(),
        {"pythons": {OWN: MAC}},
    ),
    "nothing that depends on the interpreter": (of_its_own(on("mps")), a_mac(), {}),
    "any framework on a Mac": (on("mps"), a_mac(), {}),
    "double on a CPU": (on("cpu", dtypes=["float64"]), MAC, {}),
    "double on CUDA": (on("cuda", dtypes=["float64"]), BOX, {}),
    "a dtype that nobody tried": (on("mps", dtypes=["bfloat16"]), MAC, {}),
    "a dtype that another model of GPU lacks": (
        on("cuda", framework="torch", dtypes=["int64"]),
        tried("unsupported", "GPU-0", device("cuda", name="A"), device("cuda", 1, name="B")),
        {},
    ),
    "a dtype that the CPU lacks, on a GPU": (
        on("cuda", framework="torch", dtypes=["int64"]),
        tried("unsupported", "cpu:0", device("cuda")),
        {},
    ),
    "a dtype whose trial failed for some other reason": (
        on("cuda", framework="torch", dtypes=["int64"]),
        tried("error", "GPU-0", device("cuda")),
        {},
    ),
    "one of a list": (on(["cuda", "mps"]), MAC, {}),
    "exactly enough": (on("cuda", gpu_memory_gb=24, gpus=2), BOX, {}),
    "dedicated": (on("cuda", gpu_memory_kind="dedicated"), BOX, {}),
    "one good GPU of two": (on("cuda"), report(device("cuda", health="unusable"), device("cuda", 1)), {}),
    "degraded": (on("mps"), report(device("mps", health="degraded")), {}),
    "health not known": (on("mps"), report(device("mps", health="unknown")), {}),
    "unified GPU memory alone": (on("mps", gpu_memory_gb=21), MAC, {}),
    "the parts of a split GPU": (
        on("cuda", gpus=2),
        report(device("cuda"), *(device("cuda", index, parent_id="GPU-0") for index in (1, 2))),
        {},
    ),
    "as expected": (on("mps"), MAC, {"expect": {"accelerator": "mps", "count": 1}}),
    "labelled": (on("cpu") | {"where": {"labels": {"a": "b"}}}, PLAIN, {"labels": {"a": "b", "c": "d"}}),
    "nothing is demanded, nothing is known": (on("cpu"), report(memory=None, cpus=None, disk=None), {}),
    "held": (on("mps"), MAC, {"held": ["apple:0"]}),
    "a gang of one host": (gang(on("cpu"), nodes=1), report(arch=None), {}),
    "a gang of any architectures": (gang(on("cpu"), mixed_arch=True), report(arch=None), {}),
    "a gang that says nothing of torch": (gang(on("cpu")), PLAIN, {}),
    "a gang with a GPU for each process": (gang(on("cuda"), processes_per_node=2), BOX, {}),
    "a gang whose processes share a GPU": (
        gang(on("cuda", gpus=1, framework="torch"), processes_per_node=4, backend="gloo"),
        a_cuda(24, 2, "torch.cuda", "torch.distributed.gloo"),
        {},
    ),
    "one of three runtimes": (
        on("mps", framework="executorch"),
        report(device("mps"), capabilities=("executorch.mlx",)),
        {},
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_fits(name: str) -> None:
    job, one, known = FITS[name]
    assert refusals(job, one, **known) == ()


def test_a_split_gpu_is_not_used_whole() -> None:
    one = report(device("cuda"), *(device("cuda", index, parent_id="GPU-0") for index in (1, 2)))
    assert only(on("cuda", gpus=3), one).found == 2


def test_all_reasons_are_shown() -> None:
    job = on("mps", framework="mlx", gpu_memory_gb=30, gpu_memory_kind="dedicated", dtypes=["float64"], cpus=99)
    job["where"] = {"hosts": ["other"], "labels": {"a": "b"}}
    codes = {refusal.code for refusal in refusals(job, MAC, drain=True)}
    assert codes == {
        *(Code.WHERE, Code.LABELS, Code.DRAIN, Code.CPUS, Code.CAPABILITY, Code.GPU_MEMORY, Code.MEMORY_KIND),
        Code.DTYPE,
    }


def test_reasons_are_given_under_each_accelerator_that_the_host_has() -> None:
    both = report(device("cuda", memory=8, usable=8), device("rocm", memory=16, usable=16))
    found = refusals(on(["cuda", "rocm", "mps"], gpu_memory_gb=20), both)
    assert {(refusal.accelerator, refusal.code) for refusal in found} == {
        ("cuda", Code.GPU_MEMORY),
        ("rocm", Code.GPU_MEMORY),
    }


SENTENCES = {
    "usable memory": ("mps: needs 22 GiB of GPU memory, and 21 GiB of unified memory shared with the CPU can be used"),
    "GPU memory": "cuda: needs 25 GiB of GPU memory, and 24 GiB of dedicated memory can be used",
    "dedicated on a Mac": "mps: needs dedicated GPU memory, and this is unified memory shared with the CPU",
    "unified memory twice": (
        "mps: needs 36 GiB of memory, GPU memory included (unified memory shared with the CPU), and the host has 32 GiB"
    ),
    "double on mps": "mps: float64 cannot be used: Metal has no double-precision type",
    "mps on CUDA": "needs mps, and the host has cpu and cuda",
    "no answer": "the host cannot be reached (connect: connection refused)",
    "a GPU went": "the inventory expects 4 cuda devices, and the probe found 2",
    "total above": "cuda: it is not known whether the host offers 1 GiB of GPU memory",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentence(name: str) -> None:
    job, one, known, _, _ = CASES[name]
    assert sentence(refusals(job, one, **known)[0]) == SENTENCES[name]


def test_no_host_is_advised_for_a_double_that_none_of_the_jobs_accelerators_has() -> None:
    assert "accelerator: cpu" in (only(on("mps", dtypes=["float64"]), BOX).fix or "")
    assert "add a host" in (only(on("mps", dtypes=["float32"]), BOX).fix or "")
    assert "add a host" in (only(on(["mps", "rocm"], dtypes=["float64"]), BOX).fix or "")


def test_memory_refusals_on_unified_devices_say_so_and_the_fix_of_double_names_the_cpu() -> None:
    for name, (job, one, known, code, _) in CASES.items():
        refusal = refusals(job, one, **known)[0]
        if "mps" in job["accelerator"] and one is MAC and code in {Code.GPU_MEMORY, Code.MEMORY, Code.MEMORY_KIND}:
            assert "unified memory shared with the CPU" in sentence(refusal), name
        if code is Code.DTYPE and refusal.kind is Kind.NEVER:
            assert "accelerator: cpu" in (refusal.fix or "")
