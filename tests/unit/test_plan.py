"""The plan as a document: its JSON form, its schema, what makes it stale, how equal refusals become one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from gpulayer.errors import StateError
from gpulayer.placement.document import from_json, to_json
from gpulayer.placement.explain import sentence
from gpulayer.placement.plan import SHOWN, Action, Code, Kind, Plan, stale
from gpulayer.placement.scheduler import make_plan
from gpulayer.run import planning
from gpulayer.spec.schemas import schema
from gpulayer.spec.support import Accelerator, MemoryKind
from tests.fleets import (
    NOW,
    a_cuda,
    a_mac,
    device,
    document_of,
    fleet_of,
    framework,
    gang,
    jobs_of,
    keys_of,
    report,
    views_of,
)
from tests.oracle import Known
from tests.random_fleets import random_document, random_fleet

TORCH = (framework("torch"),)
FLEET = fleet_of({"mac": a_mac(), "box": a_cuda(24, 2), "odd": report(device("mps", health="degraded")), "gone": None})
JOBS = document_of(
    one={"accelerator": "mps"},
    two={"accelerator": "cuda", "resources": {"gpus": 2}},
    three={"accelerator": "cuda"},
    four={"accelerator": "mps", "resources": {"gpu_memory_gb": 50}},
)


def plan_of(document: Any = JOBS, fleet: Any = FLEET, known: Any = None) -> Plan:
    jobs = jobs_of(document)
    trees = dict.fromkeys(jobs.jobs, "f" * 64)
    return make_plan(
        jobs, views_of(fleet, known), keys=keys_of(jobs), trees=trees, documents=[("jobs.yaml", "1")], now=NOW
    )


def as_text(plan: Plan) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(to_json(plan)))
    return read


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_holds_before_the_schema_and_is_read_as_it_was(seed: int) -> None:
    fleet, known = random_fleet(seed, 6)
    plan = plan_of(random_document(seed, 12), fleet, known)
    document = as_text(plan)
    jsonschema.Draft202012Validator(schema("plan")).validate(document)
    assert from_json(document) == plan


def test_the_schemas_words_are_the_codes_words() -> None:
    rules = schema("plan")
    definitions = rules["$defs"]
    job, refusal = definitions["job"]["properties"], definitions["refusal"]["properties"]
    assert job["action"]["enum"] == [action.value for action in Action]
    assert list(rules["properties"]["summary"]["properties"]) == [action.value for action in Action]
    assert job["accelerator"]["enum"] == [*(word.value for word in Accelerator), None]
    assert refusal["accelerator"]["enum"] == [*(word.value for word in Accelerator), None]
    assert refusal["code"]["enum"] == [code.value for code in Code]
    assert refusal["kind"]["enum"] == [kind.name.lower() for kind in Kind]
    assert refusal["memory_kind"]["enum"] == [*sorted(kind.value for kind in MemoryKind), None]
    assert set(refusal["about"]["enum"]) <= {*(code.value for code in Code), None}


def path_of(document: Any, *path: str | int) -> Any:
    for key in path:
        document = document[key]
    return document


def drop(*path: str | int) -> Callable[[Any], None]:
    return lambda document: path_of(document, *path[:-1]).pop(path[-1])


def put(value: object, *path: str | int) -> Callable[[Any], None]:
    def spoil(document: Any) -> None:
        path_of(document, *path[:-1])[path[-1]] = value

    return spoil


def repeat_a_job(document: Any) -> None:
    document["jobs"].append(document["jobs"][0])


CORRUPT: dict[str, tuple[Callable[[Any], None], str]] = {
    "another schema": (put("gpulayer.plan/2", "schema"), "plan.schema"),
    "a missing key": (drop("jobs", 0, "run"), "plan.jobs[0]"),
    "no list": (put({}, "jobs"), "plan.jobs"),
    "no text": (put(7, "jobs", 1, "job"), "plan.jobs[1].job"),
    "no object": (put([], "jobs", 1), "plan.jobs[1]"),
    "an unknown action": (put("explode", "jobs", 0, "action"), "plan.jobs[0].action"),
    "an unknown accelerator": (put("tpu", "jobs", 0, "accelerator"), "plan.jobs[0].accelerator"),
    "a place for one who waits": (
        put({"host": "mac", "devices": []}, "jobs", 2, "placement"),
        "plan.jobs[2].placement",
    ),
    "no place for one who runs": (put(None, "jobs", 0, "placement"), "plan.jobs[0].placement"),
    "a position for one who runs": (put(1, "jobs", 0, "position"), "plan.jobs[0].position"),
    "a position below 1": (put(0, "jobs", 2, "position"), "plan.jobs[2].position"),
    "a true position": (put(True, "jobs", 2, "position"), "plan.jobs[2].position"),
    "no run": (put(None, "jobs", 0, "run"), "plan.jobs[0].run"),
    "a run of something else": (put("one-000000000000-a1", "jobs", 0, "run"), "plan.jobs[0].run"),
    "another attempt": (put(2, "jobs", 0, "attempt"), "plan.jobs[0].run"),
    "a Mac for a CUDA job": (
        put({"host": "mac", "devices": ["apple:0"]}, "jobs", 1, "placement"),
        "plan.jobs[1].placement",
    ),
    "a device that was not seen": (put(["GPU-9"], "jobs", 1, "placement", "devices"), "plan.jobs[1].placement"),
    "a GPU job without a GPU": (put([], "jobs", 1, "placement", "devices"), "plan.jobs[1].placement"),
    "a CPU job with a GPU": (put("cpu", "jobs", 1, "accelerator"), "plan.jobs[1].placement"),
    "an unknown shape": (put("x", "jobs", 0, "shape"), "plan.jobs[0].shape"),
    "a strange host": (put("else", "jobs", 0, "placement", "host"), "plan.jobs[0].placement"),
    "a job twice": (repeat_a_job, "plan.jobs"),
    "a broken fingerprint": (put({"devices": "all"}, "hosts", 0, "fingerprint"), "plan.hosts[0].fingerprint"),
    "a flag as text": (put("yes", "applicable"), "plan.applicable"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_plan_is_refused_with_the_place_and_advice(name: str) -> None:
    spoil, place = CORRUPT[name]
    document = as_text(plan_of())
    spoil(document)
    with pytest.raises(StateError) as caught:
        from_json(document)
    assert caught.value.message.startswith(place)
    assert "gpulayer plan" in (caught.value.fix or "")


@pytest.mark.parametrize("document", [None, 7, "plan", [], {}])
def test_what_is_no_plan_is_refused(document: object) -> None:
    with pytest.raises(StateError):
        from_json(document)


def changed(**reports: dict[str, Any] | None) -> list[Any]:
    fleet = copy.deepcopy(FLEET)
    for entry in fleet["hosts"]:
        if entry["name"] in reports:
            entry["report"] = reports[entry["name"]]
            entry["reached"] = entry["report"] is not None
            entry["error"] = None if entry["reached"] else "connection refused"
    return views_of(fleet)


GANG_FLEET = fleet_of({"a": a_cuda(24, 2), "b": a_cuda(24, 2), "c": a_cuda(24, 2), "arm": report(arch="arm64")})
GANG = document_of(gang=gang({"accelerator": "cuda", "resources": {"gpus": 2}}), alone=gang({"accelerator": "cuda"}, 1))


def test_a_gangs_places_are_a_list_in_the_order_of_its_nodes() -> None:
    plan = plan_of(GANG, GANG_FLEET)
    two, one = (job for job in as_text(plan)["jobs"])
    both = ["GPU-0", "GPU-1"]
    assert (two["nodes"], two["placement"]) == (2, [{"host": "a", "devices": both}, {"host": "b", "devices": both}])
    assert (one["nodes"], one["placement"]) == (1, [{"host": "c", "devices": ["GPU-0"]}])
    jsonschema.Draft202012Validator(schema("plan")).validate(as_text(plan))
    assert from_json(as_text(plan)) == plan


CORRUPT_GANGS: dict[str, Callable[[Any], None]] = {
    "a node less": lambda document: document["jobs"][0]["placement"].pop(),
    "a node more": lambda document: document["jobs"][0]["placement"].append({"host": "c", "devices": ["GPU-0"]}),
    "two nodes on one host": put("a", "jobs", 0, "placement", 1, "host"),
    "one place": lambda document: document["jobs"][0].update(placement=document["jobs"][0]["placement"][0]),
    "no place": put([], "jobs", 0, "placement"),
    "a list for an independent job": put(None, "jobs", 1, "nodes"),
    "a host that does not fit": put("arm", "jobs", 0, "placement", 1, "host"),
    "devices of another host": put(["GPU-7", "GPU-8"], "jobs", 0, "placement", 1, "devices"),
}


@pytest.mark.parametrize("name", CORRUPT_GANGS)
def test_a_corrupt_gang_is_refused(name: str) -> None:
    document = as_text(plan_of(GANG, GANG_FLEET))
    CORRUPT_GANGS[name](document)
    with pytest.raises(StateError, match=r"plan\.jobs\[[01]\]\.placement"):
        from_json(document)


def test_a_gang_is_launched_as_large_as_it_is_declared() -> None:
    document = as_text(plan_of(GANG, GANG_FLEET))
    jobs = jobs_of(GANG)
    code = planning.Code(keys=keys_of(jobs), hashes=dict.fromkeys(jobs.jobs, "f" * 64), trees={})
    assert planning.changed_code(from_json(document), jobs, code) == []
    document["jobs"][0].update(nodes=1, placement=document["jobs"][0]["placement"][:1])
    assert planning.changed_code(from_json(document), jobs, code) == ["job gang: was changed"]


def test_a_plan_stands_on_every_host_of_a_gang() -> None:
    plan = plan_of(document_of(gang=gang({"accelerator": "cuda"})), GANG_FLEET)
    views = views_of(GANG_FLEET)
    assert stale(plan, views, DOCUMENTS) == []
    fleet = copy.deepcopy(GANG_FLEET)
    fleet["hosts"][1]["report"]["host"]["boot_id"] = fleet["hosts"][2]["report"]["host"]["boot_id"] = "other"
    assert stale(plan, views_of(fleet), DOCUMENTS) == ["b: boot_id was boot, is other"]
    assert stale(plan, [views[0], *views[2:]], DOCUMENTS) == ["b: is no longer in the inventory"]


def why(document: Any, fleet: Any, known: Any = None) -> list[tuple[tuple[str, ...], str, str]]:
    found = entries(plan_of(document, fleet, known), Code.DISTRIBUTED)
    return [(entry.hosts, sentence(entry.refusal), (entry.refusal.fix or "").partition(" (")[0]) for entry in found]


def test_a_gang_that_lacks_hosts_is_told_how_many() -> None:
    (reason,) = why(document_of(gang=gang({"accelerator": "cuda"}, 4)), GANG_FLEET)
    assert reason == (("a", "b", "c"), "cuda: needs 4 hosts at once, and 3 fit", "1 more host is needed")
    (reason,) = why(document_of(gang=gang({"accelerator": "cuda"}, 6, mixed_arch=True)), GANG_FLEET)
    assert reason[1:] == ("cuda: needs 6 hosts at once, and 3 fit", "3 more hosts are needed")
    known = {"b": Known(machine="m"), "c": Known(machine="m")}
    (reason,) = why(document_of(gang=gang({"accelerator": "cuda"}, 3)), GANG_FLEET, known)
    assert reason == (("a", "b", "c"), "cuda: needs 3 hosts at once, and 2 fit", "1 more host is needed")


def test_a_gang_that_lacks_hosts_of_one_architecture_is_told_of_mixed_arch_where_that_helps() -> None:
    few, one = "cpu: needs 4 hosts of one CPU architecture at once, and these fit: ", "`distributed.mixed_arch: true`"
    assert why(document_of(gang=gang({}, 4)), GANG_FLEET) == [
        (("a", "b", "c"), few + "x86_64: 3, arm64: 1", f"1 more x86_64 host is needed, or {one} {HELPS}"),
        (("arm",), few + "arm64: 1, x86_64: 3", f"3 more arm64 hosts are needed, or {one} {HELPS}"),
    ]
    found = why(document_of(gang=gang({}, 5)), GANG_FLEET)
    assert [fix for _, _, fix in found] == ["2 more x86_64 hosts are needed", "4 more arm64 hosts are needed"]
    assert [hosts for hosts, _, _ in why(document_of(gang=gang({}, 3)), GANG_FLEET)] == [("arm",)]


HELPS = "lets the ranks run on different CPU architectures"
DOCUMENTS = [("jobs.yaml", "1")]


def test_a_plan_holds_while_its_ground_does() -> None:
    assert stale(plan_of(), views_of(FLEET), DOCUMENTS) == []


def test_volatile_facts_and_hosts_without_placements_do_not_make_it_stale() -> None:
    mac = a_mac()
    mac["host"]["memory_available_bytes"], mac["host"]["disk_free_bytes"] = 1, 1
    assert stale(plan_of(), changed(mac=mac, gone=report()), DOCUMENTS) == []


def test_changes_are_told_in_words() -> None:
    rebooted = a_mac()
    rebooted["host"]["boot_id"] = "other"
    rebooted["host"]["python"]["version"] = "3.13.1"
    smaller = a_cuda(24, 1)
    smaller["frameworks"] = list(TORCH)
    assert stale(plan_of(), changed(mac=rebooted, box=smaller), DOCUMENTS) == [
        "mac: boot_id was boot, is other",
        "mac: python_version was 3.12.3, is 3.13.1",
        "box: device GPU-1 is gone",
        "box: torch was unknown, is 2.13.0",
    ]


def test_a_plan_stands_on_the_interpreters_of_its_jobs() -> None:
    own = "~/venv/bin/python"
    document = document_of(one={"accelerator": "mps", "framework": "torch", "python": own}, two={"accelerator": "mps"})
    fleet = fleet_of({"mac": a_mac()})
    told = [report(device("mps", memory=32, usable=21), capabilities=("torch.mps",), frameworks=TORCH)]
    told += [told[0] | {"frameworks": [framework("torch", version="2.14.0")]}]
    known = [{"mac": Known(pythons={own: seen})} for seen in told]
    plan = from_json(as_text(plan_of(document, fleet, known[0])))
    assert stale(plan, views_of(fleet, known[0]), DOCUMENTS) == []
    assert stale(plan, views_of(fleet, known[1]), DOCUMENTS) == [f"mac: torch of {own} was 2.13.0, is 2.14.0"]
    assert stale(plan_of(document_of(two=JOBS["jobs"]["one"]), fleet), views_of(fleet, known[1]), DOCUMENTS) == []


def test_a_host_that_is_gone_and_documents_that_changed_are_told() -> None:
    without = [view for view in views_of(FLEET) if view.host.name != "box"]
    assert stale(plan_of(), changed(mac=None), [("jobs.yaml", "2")])[:2] == [
        "jobs.yaml: was changed",
        "mac: cannot be reached now (connection refused)",
    ]
    assert stale(plan_of(), without, []) == [
        "jobs.yaml: is gone, or not what is used now",
        "box: is no longer in the inventory",
    ]


def test_doubtful_devices_are_warnings_of_their_host() -> None:
    odd = next(host for host in plan_of().hosts if host.name == "odd")
    assert [(doubt.device, doubt.health) for doubt in odd.doubts] == [("apple:0", "degraded")]


def entries(plan: Plan, code: Code) -> list[Any]:
    return [entry for verdict in plan.shapes.values() for entry in verdict.refusals if entry.refusal.code is code]


def test_equal_refusals_of_several_hosts_are_one_entry_with_a_range() -> None:
    fleet = fleet_of({"a": a_mac(16, 10), "b": a_mac(32, 21), "c": a_mac(64, 48)})
    plan = plan_of(document_of(big={"accelerator": "mps", "resources": {"gpu_memory_gb": 50}}), fleet)
    (entry,) = entries(plan, Code.GPU_MEMORY)
    assert entry.hosts == ("a", "b", "c")
    assert entry.refusal.device is None
    assert entry.refusal.found == {"from": 10 * 2**30, "to": 48 * 2**30}
    assert "10 GiB to 48 GiB of unified memory shared with the CPU" in sentence(entry.refusal)


def test_a_refusal_of_one_device_names_it() -> None:
    (entry,) = entries(plan_of(fleet=fleet_of({"mac": a_mac()})), Code.GPU_MEMORY)
    assert entry.refusal.device == "apple:0"


def test_the_holders_of_busy_devices_are_named_and_many_are_counted() -> None:
    fleet = fleet_of({f"h{number}": a_mac() for number in range(SHOWN + 4)})
    views = [replace(view, holders={"apple:0": f"user {number}"}) for number, view in enumerate(views_of(fleet))]
    jobs = jobs_of(document_of(one={"accelerator": "mps"}))
    plan = make_plan(jobs, views, keys=keys_of(jobs), trees={"one": None}, documents=[], now=NOW)
    (entry,) = entries(plan, Code.BUSY)
    assert len(entry.hosts) == SHOWN + 4
    assert sentence(entry.refusal).startswith("mps: busy: held by user 0 or user 1 or ")
    assert sentence(entry.refusal).endswith(" and 4 others")
    assert plan.summary["queue"] == 1


def test_the_nearest_reasons_come_first() -> None:
    known = {"box": Known(drain=True), "mac": Known(held=["apple:0"])}
    for verdict in plan_of(known=known).shapes.values():
        kinds = [entry.refusal.kind for entry in verdict.refusals]
        assert kinds == sorted(kinds)


def test_ten_thousand_jobs_on_a_thousand_hosts_stay_a_small_document() -> None:
    fleet = fleet_of({f"host-{number}": a_mac() if number % 2 else a_cuda() for number in range(1000)})
    shapes = [{"accelerator": "mps", "resources": {"gpu_memory_gb": 5 + number}} for number in range(40)]
    plan = plan_of(document_of(**{f"job-{number}": shapes[number % 40] for number in range(10_000)}), fleet)
    assert plan.summary["run"] + plan.summary["queue"] + plan.summary["refuse"] == 10_000
    assert len(json.dumps(to_json(plan))) < 10_000_000
