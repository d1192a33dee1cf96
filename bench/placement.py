"""How long it takes to plan 10,000 jobs on 1,000 hosts (100 kinds of each), in CPU seconds.

    python bench/placement.py [--jobs 10000] [--hosts 1000] [--rounds 3]

Prints the plan's CPU time, that of judging every job against every host (of a sample of the jobs, scaled up; both in
this run, so that the ratio carries over to other machines), the growth when the jobs double, and the size of plan.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from gpulayer.gpu.facts import Device, FrameworkFact, HostFacts
from gpulayer.placement.document import to_json
from gpulayer.placement.plan import HostView, Plan
from gpulayer.placement.scheduler import make_plan
from gpulayer.placement.verdicts import verdict
from gpulayer.spec.inventory import Host
from gpulayer.spec.jobs import IndependentJob, JobSet, ResourceRequest, Where
from gpulayer.spec.support import Accelerator, Framework, MemoryKind

GIB = 2**30


def a_host(number: int, kind: int) -> HostView:
    """A host of one of 100 kinds: Macs, CUDA machines with 1 to 8 GPUs, unified CUDA machines, CPU hosts."""
    family, step = divmod(kind, 25)
    cpus, memory = 8 + 8 * (step % 5), (32 + 16 * step) * GIB
    kinds = ("torch", "torch.distributed.gloo")
    devices: list[Device] = []
    capabilities = set(kinds)
    if family == 0:
        devices.append(
            Device(
                id="apple:0",
                accelerator="mps",
                index=0,
                memory_kind="unified",
                memory_bytes=memory,
                usable_bytes=memory * 3 // 4,
                health="ok",
            )
        )
        capabilities |= {"torch.mps"} if step % 5 else set()
        capabilities |= {"mlx", "mlx.metal"} if step % 2 else set()
    elif family in (1, 2):
        unified = family == 2 and step % 5 == 0
        for index in range(1 if unified else (1, 2, 4, 8)[step % 4]):
            size = memory if unified else (16 + 8 * (step % 9)) * GIB
            devices.append(
                Device(
                    id=f"GPU-{number}-{index}",
                    accelerator="cuda",
                    index=index,
                    memory_bytes=size,
                    usable_bytes=size,
                    compute_capability=(7 + step % 3, step % 2),
                    memory_kind="unified" if unified else "dedicated",
                    health="ok",
                )
            )
        capabilities.add("torch.cuda")
    devices.append(Device(id="cpu:0", accelerator="cpu", index=0, memory_bytes=memory, health="ok"))
    facts = HostFacts(
        hostname=f"h{number}",
        os="darwin" if family == 0 else "linux",
        arch=None,
        boot_id=f"boot-{number}",
        machine_id=None,
        cpu_logical=cpus,
        memory_bytes=memory,
        memory_limit_bytes=None,
        memory_available_bytes=memory - number,
        disk_free_bytes=100 * GIB + number,
        python="/usr/bin/python3",
        python_version="3.12.3",
        driver_version=None,
        devices=tuple(devices),
        frameworks={"torch": FrameworkFact(name="torch", version="2.13.0", status="ok")},
        capabilities=frozenset(capabilities),
        notes=(),
        complete=True,
        probed_at="2026-11-30T10:00:00Z",
    )
    return HostView(host=Host(name=f"host-{number}", labels={"site": f"s{kind % 3}"}), reached=True, facts=facts)


def a_job(number: int, kind: int) -> IndependentJob:
    """A job of one of 100 kinds."""
    family, step = divmod(kind, 25)
    accelerators = (("mps",), ("cuda",), ("cuda", "mps", "cpu"), ("cpu",))[family]
    gpu = family in (0, 1)
    return IndependentJob(
        name=f"job-{number}",
        command=("python", "train.py"),
        accelerator=tuple(map(Accelerator, accelerators)),
        framework=Framework.TORCH if step % 2 else None,
        resources=ResourceRequest(
            gpus=(1, 2, 4)[step % 3] if family == 1 else None,
            gpu_memory_gb=4.0 * (step + 1) if gpu else None,
            gpu_memory_kind=MemoryKind.DEDICATED if family == 1 and step % 4 == 0 else None,
            compute_capability=(8, 0) if family == 1 and step % 5 == 0 else None,
            cpus=1 + step % 4,
            memory_gb=2.0 + step,
        ),
        where=Where(labels={"site": f"s{step % 3}"} if step % 6 == 0 else {}),
    )


def a_fleet(hosts: int) -> list[HostView]:
    """`hosts` hosts of 100 kinds, the kinds mixed."""
    return [a_host(number, number % 100) for number in range(hosts)]


def a_jobset(jobs: int) -> JobSet:
    """`jobs` jobs of 100 kinds, the kinds mixed."""
    return JobSet(project="bench", jobs={f"job-{number}": a_job(number, number % 100) for number in range(jobs)})


def plan_of(jobs: JobSet, views: list[HostView]) -> Plan:
    """The plan of a fresh project."""
    return make_plan(
        jobs,
        views,
        keys=dict.fromkeys(jobs.jobs, "0" * 64),
        trees=dict.fromkeys(jobs.jobs),
        documents=(),
        now="2026-11-30T10:00:00Z",
    )


def pairwise(jobs: JobSet, views: list[HostView], sample: int) -> None:
    """Every job of a sample against every host, the way that grouping replaces."""
    for job in list(jobs.jobs.values())[:sample]:
        for view in views:
            verdict(job, view)


def cpu_seconds(work: Callable[[], object], rounds: int) -> float:
    """The median CPU time."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--hosts", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    views, jobs = a_fleet(args.hosts), a_jobset(args.jobs)
    plan = plan_of(jobs, views)
    print(f"{args.jobs} jobs, {args.hosts} hosts, 100 kinds of each: {plan.summary}")
    grouped = cpu_seconds(lambda: plan_of(jobs, views), args.rounds)
    double = a_jobset(2 * args.jobs)
    growth = cpu_seconds(lambda: plan_of(double, views), args.rounds) / grouped
    sample = max(1, args.jobs // 100)
    pairs = cpu_seconds(lambda: pairwise(jobs, views, sample), 1) * args.jobs / sample
    document = json.dumps(to_json(plan))
    print(f"plan                      {grouped:8.3f} s CPU")
    print(f"every job x every host    {pairs:8.3f} s CPU (from {sample} jobs), {pairs / grouped:.0f} times as much")
    print(f"twice the jobs            {growth:8.2f} times the CPU")
    print(f"plan.json                 {len(document) / 1e6:8.2f} MB")


if __name__ == "__main__":
    main()
