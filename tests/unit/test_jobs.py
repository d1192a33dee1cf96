from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.errors import InvalidDocumentError
from gpulayer.gpu import facts
from gpulayer.spec.documents import Document, parse
from gpulayer.spec.identity import job_key, run_id, shape_of
from gpulayer.spec.inventory import Host, Inventory
from gpulayer.spec.jobs import (
    RESERVED,
    Cause,
    Distributed,
    DistributedJob,
    IndependentJob,
    JobSet,
    JobSpec,
    ResourceRequest,
    Retries,
    Where,
    check_hosts,
    load_jobs,
    parse_jobs,
)
from gpulayer.spec.support import DISTRIBUTED_MPS, Accelerator, Backend, Framework, MemoryKind

VALID = Path(__file__).parents[1] / "documents" / "valid"


def read(text: str, path: str = "project/jobs.yaml") -> Document:
    return parse(text.encode(), path)


def job_of(text: str) -> JobSpec:
    """The job `a` whose keys are given in flow style."""
    return parse_jobs(read(f"version: 1\njobs:\n  a: {{command: x, {text}}}\n")).jobs["a"]


def messages(work: Any, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidDocumentError) as caught:
        work(*args, **kwargs)
    return [(problem.field, problem.message) for problem in caught.value.problems]


# From document to values


def test_every_key_arrives() -> None:
    job = load_jobs(VALID / "jobs-every-key.yaml").jobs["matmul"]
    assert job == IndependentJob(
        name="matmul",
        accelerator="mps",
        framework=Framework.TORCH,
        resources=ResourceRequest(
            gpus=1,
            gpu_memory_gb=8,
            gpu_memory_kind=MemoryKind.DEDICATED,
            compute_capability=(8, 0),
            cpus=2,
            memory_gb=4,
            disk_gb=0.5,
            capabilities=("torch.mps",),
            dtypes=("float32",),
        ),
        where=Where(labels={"site": "desk"}, hosts=("mac-studio",)),
        python="~/venvs/torch/bin/python",
        setup="uv sync --frozen",
        command=("python", "train.py"),
        workdir=VALID.resolve(),
        env={"EPOCHS": "3", "EMPTY": ""},
        secrets=("HF_TOKEN",),
        outputs=("checkpoints/**",),
        timeout=7200.0,
        grace=10.0,
        retries=0,
    )


def test_distributed_makes_it_a_distributed_job() -> None:
    jobs = load_jobs(VALID / "jobs-every-key.yaml").jobs
    gang = jobs["gang"]
    assert isinstance(gang, DistributedJob)
    assert gang.distributed == Distributed(nodes=2, processes_per_node=1, backend=Backend.GLOO, mixed_arch=True)
    assert not isinstance(jobs["matmul"], DistributedJob)


def test_what_is_left_out_has_its_default() -> None:
    job = job_of("retries: 0")
    assert job == IndependentJob(name="a", command="x")
    assert job.accelerators == (Accelerator.CPU,)
    assert (job.workdir, job.timeout, job.grace, job.resources.gpus) == (None, None, 10.0, None)


@pytest.mark.parametrize(
    ("default", "own", "retries"),
    [
        ("2", "{max: 1, on: [lost]}", Retries(max=1, on=(Cause.LOST,))),
        ("{max: 2, on: [lost]}", "3", Retries(max=3)),
        ("{max: 2, on: [lost]}", "{max: 4}", Retries(max=4, on=(Cause.LOST,))),
        ("{max: 2}", "~", Retries()),
    ],
)
def test_retries_are_a_number_or_name_their_causes(default: str, own: str, retries: Retries) -> None:
    text = f"version: 1\ndefaults: {{retries: {default}}}\njobs: {{a: {{command: x, retries: {own}}}}}\n"
    assert parse_jobs(parse(text.encode(), "jobs.yaml")).jobs["a"].retries == retries


def test_defaults_are_merged_key_by_key_and_null_takes_them_away() -> None:
    jobs = load_jobs(VALID / "jobs-defaults-and-anchors.yaml").jobs
    first, second, third = jobs["first"], jobs["second"], jobs["third"]
    assert first.accelerators == (Accelerator.CUDA, Accelerator.MPS, Accelerator.CPU)
    assert first.timeout == 86_400.0
    assert isinstance(first.command, str)
    assert first.command.endswith("--country NO --at 22:22\n")
    assert second.timeout is None
    assert second.command == first.command
    assert second.resources == ResourceRequest(memory_gb=8, cpus=2)
    assert third.env == {"LANG": "no", "DATE": "2024-01-01"}
    assert third.command == ("python", "-c", "print('a b')", "", "-x", "0755")


def test_merging_goes_into_mappings_and_never_into_lists() -> None:
    text = """
version: 1
defaults:
  where: {labels: {site: desk, team: a}, hosts: [x, y]}
  resources: {cpus: 4, memory_gb: 8}
  distributed: {nodes: 2}
  env: {A: a}
jobs:
  a:
    command: x
    where: {labels: {team: b}, hosts: [z]}
    resources: {cpus: ~}
    distributed: ~
    env: ~
"""
    job = parse_jobs(read(text)).jobs["a"]
    assert job.where == Where(labels={"site": "desk", "team": "b"}, hosts=("z",))
    assert job.resources == ResourceRequest(memory_gb=8)
    assert type(job) is IndependentJob
    assert job.env == {}


@pytest.mark.parametrize(("written", "seconds"), [("30s", 30), ("15m", 900), ("2h", 7200), ("1d", 86_400)])
def test_durations(written: str, seconds: float) -> None:
    assert job_of(f"timeout: {written}").timeout == seconds
    assert job_of(f"grace: {written}").grace == seconds


@pytest.mark.parametrize("written", ["3600", "2 h", "1h30m", "-1s", "0s", "2H", "1.5h", "h", '""', "367d", "99999999d"])
def test_what_is_no_duration_is_refused(written: str) -> None:
    assert [field for field, _ in messages(job_of, f"timeout: {written}")] == ["timeout"]


def test_no_grace_is_a_grace() -> None:
    assert job_of("grace: 0s").grace == 0.0


def test_the_project_is_the_documents_name_or_its_folders(tmp_path: Path) -> None:
    text = "version: 1\n{}jobs: {{a: {{command: x}}}}\n"
    assert parse_jobs(read(text.format("name: nightly\n"))).project == "nightly"
    assert parse_jobs(read(text.format(""), str(tmp_path / "My Sweep (2)" / "jobs.yaml"))).project == "my-sweep-2"
    assert parse_jobs(read(text.format(""), "/jobs.yaml")).project == "jobs"


def test_workdir_is_resolved_against_the_documents_folder(tmp_path: Path) -> None:
    text = "version: 1\njobs: {a: {command: x, workdir: ../code}, b: {command: x, workdir: /x/./y}, c: {command: x}}"
    jobs = parse_jobs(read(text, str(tmp_path / "project" / "jobs.yaml"))).jobs
    assert jobs["a"].workdir == tmp_path.resolve() / "code"
    assert jobs["b"].workdir == Path("/x/y")
    assert jobs["c"].workdir is None


# What cannot be


def test_a_distributed_job_on_mps_is_the_same_error_from_a_document_and_from_code() -> None:
    from_document = messages(job_of, "accelerator: mps, distributed: {nodes: 2}")
    from_code = messages(DistributedJob, name="a", command="x", accelerator="mps")
    assert from_document == from_code == [("accelerator", DISTRIBUTED_MPS)]
    listed = messages(DistributedJob, name="a", command="x", accelerator=["cuda", "mps"])
    assert listed == messages(job_of, "accelerator: [cuda, mps], distributed: {nodes: 2}")
    assert listed == [("accelerator[1]", DISTRIBUTED_MPS)]


def test_a_number_for_distributed_is_told_its_keys() -> None:
    ((_, message),) = messages(job_of, "accelerator: cpu, distributed: 2")
    assert message == "2 is not a mapping; its keys are nodes, processes_per_node, backend, mixed_arch"


@pytest.mark.parametrize(
    "command",
    ["torchrun train.py", ("/opt/bin/torchrun", "train.py"), ("python3", "-m", "torch.distributed.run", "train.py")],
)
def test_a_distributed_job_names_its_program_and_not_torchrun(command: str | tuple[str, ...]) -> None:
    job: dict[str, Any] = {"name": "a", "command": command, "accelerator": "cpu"}
    ((field, message),) = messages(DistributedJob, **job)
    assert field == "command"
    assert message.endswith("name the program alone: [python, train.py]")
    IndependentJob(**job)
    DistributedJob(**job | {"command": ("python", "train.py", "torchrun")})


def test_an_error_from_code_names_the_job() -> None:
    with pytest.raises(InvalidDocumentError, match=r"^job 'a': accelerator: a distributed job cannot"):
        DistributedJob(name="a", command=("x",), accelerator=Accelerator.MPS)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("name", {"name": "A"}),
        ("name", {"name": "a\n"}),
        ("accelerator", {"accelerator": "mpss"}),
        ("accelerator", {"accelerator": ["cuda", "xpu"]}),
        ("accelerator", {"accelerator": []}),
        ("accelerator", {"accelerator": ["cuda", "cuda"]}),
        ("framework", {"framework": "pytorch"}),
        ("framework", {"framework": "mlx", "accelerator": "rocm"}),
        ("command", {"command": ""}),
        ("command", {"command": "a\0"}),
        ("command[1]", {"command": ["x", "\0"]}),
        ("command[1]", {"command": ["x", 3]}),
        ("command[1]", {"command": ["x", "\ud800"]}),
        ("setup", {"setup": "\udfff"}),
        ("env.A", {"env": {"A": "\ud800\udc00"}}),
        ("setup", {"setup": "\0"}),
        ("python", {"python": ""}),
        ("env.1A", {"env": {"1A": "x"}}),
        ("env.A", {"env": {"A": "\0"}}),
        ("env.A", {"env": {"A": 3}}),
        ("env.GPULAYER_X", {"env": {"GPULAYER_X": ""}}),
        ("env.CUDA_DEVICE_ORDER", {"env": {"CUDA_DEVICE_ORDER": ""}}),
        ("secrets[0]", {"secrets": ["CUDA_VISIBLE_DEVICES"]}),
        ("secrets[0]", {"secrets": ["A"], "env": {"A": ""}}),
        ("secrets[0]", {"secrets": ["A=B"]}),
        ("outputs[0]", {"outputs": ["../x"]}),
        ("outputs[0]", {"outputs": ["/x"]}),
        ("outputs[0]", {"outputs": [""]}),
        ("command", {"command": "x" * 70_000}),
        ("command", {"command": ["x" * 60_000] * 9}),
        ("command", {"env": {"A": "\U0001f600" * 60_000}}),
        ("outputs", {"outputs": ["x" * 4_000] * 20}),
        ("timeout", {"timeout": 0}),
        ("timeout", {"timeout": float("nan")}),
        ("grace", {"grace": -1.0}),
        ("retries", {"retries": -1}),
        ("retries.on", {"retries": Retries(max=1, on=("faild",))}),
        ("resources.gpus", {"resources": ResourceRequest(gpus=1)}),
        ("resources.gpus", {"resources": ResourceRequest(gpus=0), "accelerator": "cuda"}),
        ("resources.gpu_memory_gb", {"resources": ResourceRequest(gpu_memory_gb=1)}),
        ("resources.capabilities[0]", {"resources": ResourceRequest(capabilities=("executorch.mps",))}),
        ("resources.dtypes[0]", {"resources": ResourceRequest(dtypes=("float65",))}),
        ("resources.gpus", {"resources": ResourceRequest(gpus=-1), "accelerator": "cuda"}),
        ("resources.memory_gb", {"resources": ResourceRequest(memory_gb=0)}),
        ("resources.cpus", {"resources": ResourceRequest(cpus=-1)}),
        ("resources.disk_gb", {"resources": ResourceRequest(disk_gb=float("nan"))}),
        ("where.not_hosts", {"where": Where(hosts=("a",), not_hosts=("a", "b"))}),
    ],
)
def test_a_job_checks_itself(field: str, given: dict[str, Any]) -> None:
    whole = {"name": "a", "command": "x", **given}
    assert [name for name, _ in messages(IndependentJob, **whole)] == [field]


def test_bytes_that_are_no_text_can_be_given() -> None:
    word = os.fsdecode(b"\x80\xff")
    assert IndependentJob(name="a", command=("x", word), env={"A": word}, setup=word).command == ("x", word)


def test_what_selects_a_device_is_reserved() -> None:
    assert set(facts._SELECTORS) == RESERVED
    assert [messages(IndependentJob, name="a", command="x", env={name: "0"}) for name in RESERVED]


def test_float64_on_mps_is_a_matter_of_placement() -> None:
    job = IndependentJob(name="a", command="x", accelerator="mps", resources=ResourceRequest(dtypes=("float64",)))
    assert job.accelerators == (Accelerator.MPS,)


def test_values_from_code_are_brought_to_one_form() -> None:
    loose: Any = {"command": ["x"], "accelerator": ["cuda", Accelerator.CPU], "framework": "torch", "secrets": ["A"]}
    job = IndependentJob(name="a", **loose)
    assert job.command == ("x",)
    assert job.accelerators == (Accelerator.CUDA, Accelerator.CPU)
    assert job.framework is Framework.TORCH
    assert job.secrets == ("A",)


def test_a_fault_of_a_default_is_told_once_where_it_is_written() -> None:
    text = "version: 1\ndefaults: {outputs: [../x], command: x}\njobs: {a: {}, b: {}, c: {outputs: [ok]}}\n"
    with pytest.raises(InvalidDocumentError) as caught:
        parse_jobs(read(text))
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.field) == (2, 22, "defaults.outputs[0]")


def test_ten_thousand_bad_jobs_end_in_a_bounded_error() -> None:
    text = "version: 1\njobs:\n" + "".join(f"  j{nth}: {{command: x, gpuz: 1}}\n" for nth in range(3_000))
    assert len(messages(parse_jobs, read(text))) == 1_000


# Hosts


def test_unknown_hosts_are_told_with_the_nearest_name() -> None:
    document = read(
        "version: 1\ndefaults: {where: {not_hosts: [old]}}\n"
        "jobs:\n  a: {command: x, where: {hosts: [mac-studio, mac-mimi]}}\n  b: {command: x}\n"
    )
    inventory = Inventory(hosts={name: Host(name=name) for name in ("mac-studio", "mac-mini")})
    problems = check_hosts(parse_jobs(document), inventory, document)
    assert [(problem.line, problem.column, problem.message) for problem in problems] == [
        (4, 47, "the inventory has no host 'mac-mimi' (did you mean 'mac-mini'?)"),
        (2, 32, "the inventory has no host 'old'"),
    ]


# Keys, run ids, shapes


BASE = IndependentJob(
    name="a", command=("python", "x.py"), accelerator="cuda", framework=Framework.TORCH, env={"A": "1", "B": "2"}
)


@pytest.mark.parametrize(
    "change",
    [
        {"where": Where(hosts=("x",))},
        {"timeout": 60.0},
        {"grace": 1.0},
        {"retries": 3},
        {"outputs": ("x",)},
        {"workdir": Path("/elsewhere")},
        {"env": {"B": "2", "A": "1"}},
        {"resources": ResourceRequest()},
    ],
)
def test_what_does_not_change_the_work_keeps_the_key(change: dict[str, Any]) -> None:
    assert job_key(dataclasses.replace(BASE, **change), "p", None) == job_key(BASE, "p", None)


def test_what_changes_the_work_changes_the_key() -> None:
    changes: list[dict[str, Any]] = [
        {"name": "b"},
        {"command": "python x.py"},
        {"command": ("python", "x.py", "")},
        {"env": {"A": "1"}},
        {"secrets": ("T",)},
        {"accelerator": "mps"},
        {"accelerator": ("cuda", "mps")},
        {"accelerator": ("mps", "cuda")},
        {"framework": None},
        {"python": "python3"},
        {"setup": "x"},
        {"resources": ResourceRequest(gpus=1)},
        {"resources": ResourceRequest(gpu_memory_gb=1)},
    ]
    jobs: list[JobSpec] = [BASE, *(dataclasses.replace(BASE, **change) for change in changes)]
    shared: dict[str, Any] = {"name": "a", "command": ("python", "x.py"), "accelerator": "cuda", "framework": "torch"}
    jobs += [DistributedJob(**shared, env=BASE.env, distributed=Distributed(nodes=nodes)) for nodes in (1, 2)]
    jobs += [DistributedJob(**shared, env=BASE.env, distributed=Distributed(nodes=2, mixed_arch=True))]
    keys = {job_key(job, "p", None) for job in jobs}
    keys |= {job_key(BASE, "q", None), job_key(BASE, "p", "0" * 64)}
    assert len(keys) == len(jobs) + 2
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)


def test_a_key_is_stable() -> None:
    # A changed value here runs every finished job of every user again.
    assert job_key(BASE, "p", None) == "604fa3e96c101b87b01b3692126501ca93e461dccba47848d76a8bc8a3ef50f3"
    assert shape_of(BASE) == "81f0e478bf09"


def test_8_and_8_0_gib_are_one_demand() -> None:
    jobs = [dataclasses.replace(BASE, resources=ResourceRequest(gpu_memory_gb=size)) for size in (8, 8.0)]
    assert len({job_key(job, "p", None) for job in jobs}) == 1
    assert len({shape_of(job) for job in jobs}) == 1


@given(st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True), st.integers(1, 9_999))
def test_a_run_id_has_the_protocols_form(name: str, attempt: int) -> None:
    key = job_key(BASE, "p", None)
    run = run_id(name, key, attempt)
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", run)
    assert run.endswith(f"-{key[:12]}-a{attempt}")
    assert "--" not in run.removeprefix(name[:40].rstrip("-"))


def test_a_shape_is_what_placement_looks_at() -> None:
    same: list[dict[str, Any]] = [
        {"name": "b"},
        {"command": "y"},
        {"env": {}},
        {"timeout": 5.0},
        {"where": Where(labels={})},
    ]
    other: list[dict[str, Any]] = [
        {"accelerator": "rocm"},
        {"accelerator": ("cuda", "rocm")},
        {"framework": None},
        {"python": "x"},
        {"python": "y"},
        {"resources": ResourceRequest(cpus=1)},
        {"where": Where(labels={"a": "b"})},
        {"where": Where(hosts=("x",))},
        {"where": Where(not_hosts=("x",))},
    ]
    assert {shape_of(dataclasses.replace(BASE, **change)) for change in same} == {shape_of(BASE)}
    plain = dataclasses.replace(BASE, framework=None)  # asks nothing of its interpreter
    assert shape_of(dataclasses.replace(plain, python="x")) == shape_of(plain)
    shapes = {shape_of(dataclasses.replace(BASE, **change)) for change in other}
    shapes |= {
        shape_of(DistributedJob(name="a", command="x", accelerator="cuda", distributed=Distributed(nodes=nodes)))
        for nodes in (1, 2)
    }
    assert len(shapes | {shape_of(BASE)}) == len(other) + 3


@pytest.mark.parametrize(
    ("gpus", "given", "processes"), [(None, None, 1), (4, None, 4), (None, 2, 2), (4, 2, 2)], ids=str
)
def test_a_node_has_one_process_a_gpu_unless_the_job_says_otherwise(
    gpus: int | None, given: int | None, processes: int
) -> None:
    job = DistributedJob(
        name="a",
        command="x",
        accelerator="cuda",
        resources=ResourceRequest(gpus=gpus),
        distributed=Distributed(nodes=2, processes_per_node=given),
    )
    assert job.processes == processes


def test_the_backend_is_gloo_on_a_cpu_and_nccl_on_a_gpu_unless_the_job_says_otherwise() -> None:
    job = DistributedJob(name="a", command="x", accelerator=["cuda", "rocm", "cpu"])
    assert [job.backend_on(accelerator) for accelerator in job.accelerators] == ["nccl", "nccl", "gloo"]
    job = DistributedJob(name="a", command="x", accelerator="cuda", distributed=Distributed(backend=Backend.GLOO))
    assert job.backend_on(Accelerator.CUDA) is Backend.GLOO


def test_a_backend_that_does_not_exist_is_told_from_code_as_from_a_document() -> None:
    gang: Any = Distributed(backend="ncl")  # type: ignore[arg-type]
    (found,) = messages(DistributedJob, name="a", command="x", accelerator="cuda", distributed=gang)
    assert found == ("distributed.backend", "'ncl' is not one of 'gloo', 'nccl' (did you mean 'nccl'?)")


def test_the_order_of_hosts_and_labels_is_no_shape() -> None:
    one = dataclasses.replace(BASE, where=Where(labels={"a": "1", "b": "2"}, hosts=("x", "y")))
    two = dataclasses.replace(BASE, where=Where(labels={"b": "2", "a": "1"}, hosts=("y", "x")))
    assert shape_of(one) == shape_of(two)


def test_the_folder_of_a_job_set_is_its_files(tmp_path: Path) -> None:
    assert JobSet(project="p", jobs={}, path=tmp_path / "jobs.yaml").folder == tmp_path.resolve()
