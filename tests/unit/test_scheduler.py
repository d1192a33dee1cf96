"""Plans hold before an independent judge, over random fleets and jobs; and ADR-0006's own cases by name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpulayer.placement.document import from_json
from gpulayer.placement.matching import Matcher
from gpulayer.placement.plan import Code, HostView
from gpulayer.placement.verdicts import Fits, Option, Refused, verdict
from gpulayer.spec.jobs import JobSet
from tests import oracle
from tests.fleets import (
    NOW,
    a_cuda,
    a_mac,
    a_run,
    document_of,
    fleet_of,
    gang,
    jobs_of,
    keys_of,
    plan_json,
    report,
    views_of,
)
from tests.oracle import Known, judge
from tests.random_fleets import random_document, random_fleet


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), hosts=st.integers(1, 6), jobs=st.integers(1, 12))
@example(
    seed=315, hosts=2, jobs=1
)  # several GPUs, each with enough unified memory, and all together more than there is
def test_plans_hold_before_the_judge(seed: int, hosts: int, jobs: int) -> None:
    fleet, known = random_fleet(seed, hosts)
    document = random_document(seed, jobs)
    declared, views = jobs_of(document), views_of(fleet, known)
    assert judge(plan_json(declared, views), fleet, document, known) == []
    equals_job_by_job_and_host_by_host(declared, views)


def equals_job_by_job_and_host_by_host(jobs: JobSet, views: list[HostView]) -> None:
    """Judging by shape and class changes nothing, but that a gang's hosts need company."""
    matcher = Matcher(views)
    for job in jobs.jobs.values():
        match = matcher.match(job)
        found = [verdict(job, view) for view in views]
        alone = [(index, option) for index, one in enumerate(found) if isinstance(one, Fits) for option in one.options]
        company = Counter((option.accelerator, match.team.kinds[index]) for index, option in alone)
        ways: dict[int, list[Option]] = {index: [] for index in range(len(views))}
        for index, option in alone:
            if company[option.accelerator, match.team.kinds[index]] >= match.team.nodes:
                ways[index].append(option)
        for index, (view, one) in enumerate(zip(views, found, strict=True)):
            expected = {refusal.code for refusal in one.refusals} if isinstance(one, Refused) else set()
            expected |= {Code.DISTRIBUTED} if isinstance(one, Fits) and not ways[index] else set()
            codes = {entry.refusal.code for entry in match.verdict.refusals if view.host.name in entry.hosts}
            assert [options[index] for options in match.ways.values() if index in options] == ways[index]
            assert codes - {Code.BUSY} == expected


def test_the_judge_knows_the_rules_by_itself() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [module for module in modules if module and module.startswith("gpulayer")]


# One plan that the judge accepts, and what each way of spoiling it must make him say.

FLEET = fleet_of(
    {"mac": a_mac(32, 21, "torch", "torch.mps"), "box": a_cuda(24, 2, "torch", "torch.cuda"), "plain": report(cpus=1)}
)
JOBS = document_of(
    on_mac={"accelerator": "mps", "framework": "torch"},
    on_cuda={"accelerator": "cuda", "resources": {"gpu_memory_gb": 20}},
    both={"accelerator": ["cuda", "mps"]},
    waits={"accelerator": "cuda"},
    never={"accelerator": "mps", "resources": {"gpu_memory_kind": "dedicated"}},
    small={"where": {"hosts": ["plain"]}},
    small_too={"where": {"hosts": ["plain"]}},
)


def line(plan: dict[str, Any], job: str) -> dict[str, Any]:
    found: dict[str, Any] = next(line for line in plan["jobs"] if line["job"] == job)
    return found


def give(job: str, host: str, devices: list[str]) -> Callable[[dict[str, Any]], None]:
    def spoil(plan: dict[str, Any]) -> None:
        line(plan, job)["placement"] = {"host": host, "devices": devices}

    return spoil


def start(job: str, accelerator: str, host: str, devices: list[str]) -> Callable[[dict[str, Any]], None]:
    def spoil(plan: dict[str, Any]) -> None:
        entry = line(plan, job)
        plan["summary"][entry["action"]] -= 1
        plan["summary"]["run"] += 1
        entry |= {"action": "run", "accelerator": accelerator, "position": None}
        entry["placement"] = {"host": host, "devices": devices}
        for position, other in enumerate([one for one in plan["jobs"] if one["action"] == "queue"], 1):
            other["position"] = position

    return spoil


def wait(job: str) -> Callable[[dict[str, Any]], None]:
    def spoil(plan: dict[str, Any]) -> None:
        plan["summary"]["run"] -= 1
        plan["summary"]["queue"] += 1
        line(plan, job).update(action="queue", placement=None)
        for position, entry in enumerate([one for one in plan["jobs"] if one["action"] == "queue"], 1):
            entry["position"] = position

    return spoil


def no_reasons(plan: dict[str, Any]) -> None:
    plan["shapes"][line(plan, "never")["shape"]]["refusals"] = []


def a_false_reason(plan: dict[str, Any]) -> None:
    reasons = plan["shapes"][line(plan, "never")["shape"]]["refusals"]
    reasons[0]["code"] = "drain"


def fits_too_much(plan: dict[str, Any]) -> None:
    plan["shapes"][line(plan, "on-mac")["shape"]]["fits"].append("box")


def a_refused_fit(plan: dict[str, Any]) -> None:
    verdict = plan["shapes"][line(plan, "on-mac")["shape"]]
    verdict["refusals"][0]["hosts"].append("mac")


def a_lost_job(plan: dict[str, Any]) -> None:
    plan["jobs"].pop()


def a_false_position(plan: dict[str, Any]) -> None:
    line(plan, "waits")["position"] = 7


def a_false_summary(plan: dict[str, Any]) -> None:
    plan["summary"]["run"] += 1


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a device twice": (give("both", "box", ["GPU-0"]), "not all of them are free"),
    "a device that is not there": (give("on-cuda", "box", ["GPU-7"]), "does not fit"),
    "a CUDA job on a Mac": (start("waits", "mps", "mac", ["apple:0"]), "under mps"),
    "another accelerator's device": (give("on-mac", "box", ["GPU-1"]), "does not fit"),
    "too many devices": (give("on-cuda", "box", ["GPU-0", "GPU-1"]), "asked for 1"),
    "a demand unmet": (start("never", "mps", "mac", ["apple:0"]), "does not fit"),
    "more CPU jobs than slots": (start("small-too", "cpu", "plain", []), "more jobs than it can hold"),
    "one who waits for nothing": (wait("on-mac"), "has a free place"),
    "a refusal without reasons": (no_reasons, "does not fit and its reasons are []"),
    "a false reason": (a_false_reason, "does not hold"),
    "a host that does not fit": (fits_too_much, "should fit"),
    "a host that fits and is refused": (a_refused_fit, "fits and its reasons"),
    "a job forgotten": (a_lost_job, "are not the document's"),
    "a hole in the queue": (a_false_position, "positions"),
    "a false count": (a_false_summary, "summary"),
}


def test_the_judge_accepts_the_plan_that_is_spoiled_below() -> None:
    plan = plan_json(jobs_of(JOBS), views_of(FLEET))
    assert judge(plan, FLEET, JOBS) == []
    assert {one["job"]: one["action"] for one in plan["jobs"]} == {
        "on-mac": "run",
        "on-cuda": "run",
        "both": "run",
        "waits": "queue",
        "never": "refuse",
        "small": "run",
        "small-too": "queue",
    }


@pytest.mark.parametrize("name", SPOILED)
def test_the_judge_sees(name: str) -> None:
    spoil, complaint = SPOILED[name]
    plan = plan_json(jobs_of(JOBS), views_of(FLEET))
    spoil(plan)
    assert any(complaint in wrong for wrong in judge(plan, FLEET, JOBS))


GANG_FLEET = fleet_of({"a": a_cuda(), "b": a_cuda(), "c": report(), "mac": a_mac(), "twin": a_mac()})
GANG_KNOWN = {name: Known(machine="m") for name in ("mac", "twin")}
GANG_JOBS = document_of(
    gpus=gang({"accelerator": "cuda"}),
    waits=gang({"accelerator": "cuda"}),
    cpus=gang({}, 3),
    few=gang({"where": {"hosts": ["c", "mac", "twin"]}}),
)
SPOILED_GANGS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a node less": (lambda plan: line(plan, "cpus")["placement"].pop(), "do not go together"),
    "two names of one machine": (lambda plan: put_hosts(plan, "cpus", "a", "mac", "twin"), "do not go together"),
    "two architectures": (lambda plan: put_hosts(plan, "cpus", "a", "b", "mac"), "do not go together"),
    "nodes in another order": (lambda plan: put_hosts(plan, "cpus", "b", "a", "c"), "not in the inventory's order"),
    "a host without a GPU": (lambda plan: put_hosts(plan, "gpus", "a", "c"), "which does not fit"),
    "one who waits for nothing": (wait("gpus"), "has a free place"),
    "another number of hosts": (lambda plan: line(plan, "cpus").update(nodes=2), "takes 2 hosts"),
    "one place": (lambda plan: line(plan, "gpus").update(placement={"host": "a", "devices": []}), "are a list"),
    "a false count": (lambda plan: reasons(plan, "few")[0].update(found=2), "does not hold"),
    "a fit without company": (lambda plan: verdict_of(plan, "few")["fits"].append("c"), "should fit"),
}


def put_hosts(plan: dict[str, Any], job: str, *hosts: str) -> None:
    line(plan, job)["placement"] = [{"host": host, "devices": []} for host in hosts]


def verdict_of(plan: dict[str, Any], job: str) -> dict[str, Any]:
    found: dict[str, Any] = plan["shapes"][line(plan, job)["shape"]]
    return found


def reasons(plan: dict[str, Any], job: str) -> list[dict[str, Any]]:
    return [reason for reason in verdict_of(plan, job)["refusals"] if reason["code"] == "distributed"]


def test_the_judge_accepts_the_gangs_that_are_spoiled_below() -> None:
    plan = plan_json(jobs_of(GANG_JOBS), views_of(GANG_FLEET, GANG_KNOWN))
    assert judge(plan, GANG_FLEET, GANG_JOBS, GANG_KNOWN) == []
    assert [one["action"] for one in plan["jobs"]] == ["run", "queue", "run", "refuse"]


@pytest.mark.parametrize("name", SPOILED_GANGS)
def test_the_judge_sees_of_a_gang(name: str) -> None:
    spoil, complaint = SPOILED_GANGS[name]
    plan = plan_json(jobs_of(GANG_JOBS), views_of(GANG_FLEET, GANG_KNOWN))
    spoil(plan)
    assert any(complaint in wrong for wrong in judge(plan, GANG_FLEET, GANG_JOBS, GANG_KNOWN))


def test_the_judge_sees_that_a_lesser_choice_was_taken() -> None:
    jobs = document_of(choosy={"accelerator": ["cuda", "mps"]})
    plan = plan_json(jobs_of(jobs), views_of(FLEET))
    start("choosy", "mps", "mac", ["apple:0"])(plan)
    assert judge(plan, FLEET, jobs) == ["choosy: is run, and box has a free place under cuda"]


def test_the_judge_sees_that_a_later_equal_job_was_preferred() -> None:
    jobs = document_of(first={"accelerator": "mps"}, second={"accelerator": "mps"})
    plan = plan_json(jobs_of(jobs), views_of(FLEET))
    start("second", "mps", "mac", ["apple:0"])(plan)
    wait("first")(plan)
    assert any("before an earlier job" in wrong for wrong in judge(plan, FLEET, jobs))


# ADR-0006's own cases.


def codes_of(plan: dict[str, Any], job: str, host: str) -> set[str]:
    verdict = plan["shapes"][line(plan, job)["shape"]]
    return {refusal["code"] for refusal in verdict["refusals"] if host in refusal["hosts"]}


def message_of(plan: dict[str, Any], job: str, code: str) -> str:
    verdict = plan["shapes"][line(plan, job)["shape"]]
    return " / ".join(refusal["message"] for refusal in verdict["refusals"] if refusal["code"] == code)


def test_mps_and_cuda_jobs_never_meet_each_others_devices() -> None:
    plan = plan_json(jobs_of(JOBS), views_of(FLEET))
    assert line(plan, "on-mac")["placement"] == {"host": "mac", "devices": ["apple:0"]}
    assert line(plan, "on-cuda")["placement"]["host"] == "box"
    assert codes_of(plan, "on-mac", "box") == {"accelerator"}
    assert codes_of(plan, "on-cuda", "mac") == {"accelerator"}


def test_unified_memory_is_never_taken_for_dedicated() -> None:
    plan = plan_json(jobs_of(JOBS), views_of(FLEET))
    assert codes_of(plan, "never", "mac") == {"memory-kind"}
    assert "unified memory shared with the CPU" in message_of(plan, "never", "memory-kind")


def test_unified_memory_is_compared_with_what_is_usable() -> None:
    jobs = document_of(big={"accelerator": "mps", "resources": {"gpu_memory_gb": 28}})
    plan = plan_json(jobs_of(jobs), views_of(FLEET))
    assert line(plan, "big")["action"] == "refuse"
    assert message_of(plan, "big", "gpu-memory") == (
        "mps: needs 28 GiB of GPU memory, and 21 GiB of unified memory shared with the CPU can be used"
    )


def test_unified_gpu_memory_counts_in_the_hosts_memory() -> None:
    jobs = document_of(
        gpu={"accelerator": "mps", "resources": {"gpu_memory_gb": 20}},
        cpu={"accelerator": "cpu", "resources": {"memory_gb": 16}},
        less={"accelerator": "cpu", "resources": {"memory_gb": 12}},
    )
    fleet = fleet_of({"mac": a_mac(32, 21)})
    plan = plan_json(jobs_of(jobs), views_of(fleet))
    assert [one["action"] for one in plan["jobs"]] == ["run", "queue", "run"]
    assert judge(plan, fleet, jobs) == []


def test_two_names_of_one_machine_are_packed_once() -> None:
    fleet = fleet_of({"desk": a_mac(), "alias": a_mac()})
    known = {name: Known(machine="m") for name in ("desk", "alias")}
    jobs = document_of(one={"accelerator": "mps"}, two={"accelerator": "mps"})
    plan = plan_json(jobs_of(jobs), views_of(fleet, known))
    assert [one["action"] for one in plan["jobs"]] == ["run", "queue"]
    assert judge(plan, fleet, jobs, known) == []


def test_wide_jobs_and_whole_hosts_are_not_cut_up() -> None:
    fleet = fleet_of({"wide": a_cuda(24, 4), "narrow": a_cuda(24, 1)})
    jobs = document_of(one={"accelerator": "cuda"}, four={"accelerator": "cuda", "resources": {"gpus": 4}})
    plan = plan_json(jobs_of(jobs), views_of(fleet))
    assert [one["placement"]["host"] for one in plan["jobs"]] == ["narrow", "wide"]


def test_cpu_jobs_spread_over_the_hosts() -> None:
    fleet = fleet_of({f"h{number}": report() for number in range(3)})
    jobs = document_of(**{f"j{number}": {"resources": {"cpus": 1 + number % 2}} for number in range(6)})
    plan = plan_json(jobs_of(jobs), views_of(fleet))
    assert sorted(one["placement"]["host"] for one in plan["jobs"]) == ["h0", "h0", "h1", "h1", "h2", "h2"]


# Wanted jobs against known runs.


@pytest.mark.parametrize(
    ("status", "code", "retry", "action"),
    [
        ("running", None, False, "follow"),
        ("orphaned", None, True, "follow"),
        ("unknown", None, True, "follow"),
        ("exited", 0, False, "up_to_date"),
        ("exited", 0, True, "up_to_date"),
        ("exited", 3, False, "failed"),
        ("exited", 3, True, "retry"),
        ("timed_out", None, False, "failed"),
        ("cancelled", None, True, "retry"),
        ("lost", None, False, "failed"),
    ],
)
def test_known_runs_decide(status: str, code: int | None, retry: bool, action: str) -> None:
    jobs = jobs_of(document_of(job={"accelerator": "mps"}))
    view = views_of(fleet_of({"mac": a_mac()}))[0]
    run = a_run("job", keys_of(jobs)["job"], "mac", status, code=code, devices=("apple:0",))
    held = {"apple:0": run.run} if action == "follow" else {}
    plan = plan_json(jobs, [replace(view, runs=(run,), holders=held)], retry_failed=retry)
    entry = line(plan, "job")
    assert entry["action"] == action
    assert entry["attempt"] == (2 if action == "retry" else 1)
    assert entry["run"] == (run.run if action != "retry" else run.run.removesuffix("1") + "2")
    assert entry["placement"] == ({"host": "mac", "devices": ["apple:0"]} if action in {"follow", "retry"} else None)


def test_a_changed_job_runs_again() -> None:
    jobs = jobs_of(document_of(job={"accelerator": "cpu"}))
    view = views_of(fleet_of({"box": report()}))[0]
    plan = plan_json(jobs, [replace(view, runs=(a_run("job", "f" * 64, "box", "exited", code=0),))])
    entry = line(plan, "job")
    assert (entry["action"], entry["attempt"], entry["changed"], entry["still_running"]) == ("run", 1, True, [])


def test_the_earlier_run_of_a_changed_job_is_named_while_it_goes_on() -> None:
    jobs = jobs_of(document_of(job={"accelerator": "cpu"}))
    view = views_of(fleet_of({"box": report()}))[0]
    earlier = a_run("job", "f" * 64, "box", "running")
    plan = plan_json(jobs, [replace(view, runs=(earlier,))])
    assert line(plan, "job")["still_running"] == [earlier.run]


def test_a_followed_run_keeps_its_device_and_slot() -> None:
    jobs = jobs_of(document_of(gpu={"accelerator": "mps"}, next={"accelerator": "mps"}, cpu={}, cpu2={}))
    view = views_of(fleet_of({"mac": a_mac()}), {"mac": Known(max_jobs=1, slots_held=1)})[0]
    keys = keys_of(jobs)
    runs = (
        a_run("gpu", keys["gpu"], "mac", "running", devices=("apple:0",)),
        a_run("cpu", keys["cpu"], "mac", "running"),
    )
    plan = plan_json(jobs, [replace(view, runs=runs, holders={"apple:0": runs[0].run})])
    assert {one["job"]: one["action"] for one in plan["jobs"]} == {
        "gpu": "follow",
        "next": "queue",
        "cpu": "follow",
        "cpu2": "queue",
    }
    assert codes_of(plan, "next", "mac") == {"busy"}


def test_a_run_on_a_host_that_does_not_answer_is_followed() -> None:
    jobs = jobs_of(document_of(job={"accelerator": "cpu"}))
    gone, box = views_of(fleet_of({"gone": None, "box": report()}))
    run = a_run("job", keys_of(jobs)["job"], "gone", "unknown")
    plan = plan_json(jobs, [replace(gone, runs=(run,)), box])
    assert line(plan, "job")["action"] == "follow"
    assert line(plan, "job")["placement"] == {"host": "gone", "devices": []}
    assert line(plan_json(jobs, [gone, box], history=[run]), "job") == line(plan, "job")


@pytest.mark.parametrize(
    ("host", "status", "began", "action"),
    [
        ("left", "running", True, "follow"),  # its host has left the inventory: what it does cannot be known
        ("left", "launching", False, "follow"),
        ("left", "exited", True, "up_to_date"),
        ("left", "lost", True, "failed"),
        ("box", "running", True, "follow"),  # its host answers and has lost its records
        ("box", "exited", True, "up_to_date"),
        ("box", "launching", False, "run"),  # the launch never arrived
        ("box", "failed_to_start", False, "run"),  # the host refused it, and wrote nothing
        ("", "queued", False, "run"),
    ],
)
def test_what_no_host_tells_of_is_known_from_the_history(host: str, status: str, began: bool, action: str) -> None:
    jobs = jobs_of(document_of(job={"accelerator": "cpu"}))
    code = 0 if status == "exited" else None
    run = a_run("job", keys_of(jobs)["job"], host, status, code=code, started_at=NOW if began else None)
    plan = plan_json(jobs, views_of(fleet_of({"box": report()})), history=[run])
    entry = line(plan, "job")
    assert entry["action"] == action
    assert from_json(plan).jobs[0].run == run.run
    assert (entry["placement"] or {}).get("host") == {"follow": host, "run": "box"}.get(action)


def test_what_a_host_tells_comes_before_the_history() -> None:
    jobs = jobs_of(document_of(job={"accelerator": "cpu"}))
    view = views_of(fleet_of({"box": report()}))[0]
    then = a_run("job", keys_of(jobs)["job"], "box", "running", started_at=NOW)
    plan = plan_json(jobs, [replace(view, runs=(replace(then, status="exited", code=0),))], history=[then])
    assert line(plan, "job")["action"] == "up_to_date"
