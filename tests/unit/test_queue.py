"""Devices come free and the queue goes on: in order, nobody in vain, nobody for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulayer.placement.packing import Packing
from gpulayer.placement.plan import Placement
from gpulayer.placement.queue import PATIENCE, Queue, Start
from gpulayer.spec.jobs import JobSpec
from gpulayer.spec.support import Accelerator
from tests.fleets import a_cuda, a_mac, document_of, fleet_of, gang, jobs_of, report, views_of
from tests.oracle import Known
from tests.random_fleets import Dice, random_document, random_fleet

MPS, CUDA, CPU = Accelerator.MPS, Accelerator.CUDA, Accelerator.CPU
GPU = {"accelerator": "cuda"}
WIDE = {"accelerator": "cuda", "resources": {"gpus": 2}}


def jobs(**entries: dict[str, Any]) -> dict[str, JobSpec]:
    return dict(jobs_of(document_of(**entries)).jobs)


def packing_of(known: Any = None, **reports: dict[str, Any] | None) -> Packing:
    return Packing(views_of(fleet_of(reports), known))


def queue_of(packing: Packing, declared: dict[str, JobSpec]) -> Queue:
    queue = Queue(packing)
    for position, job in enumerate(declared.values()):
        queue.add(job, position)
    return queue


def names(started: list[Start]) -> list[str]:
    return [start.job.name for start in started]


def test_place_looks_and_takes_nothing() -> None:
    packing, declared = packing_of(box=a_cuda()), jobs(a=GPU)
    place = packing.place(declared["a"])
    assert place == (CUDA, (Placement(host="box", devices=("GPU-0",)),))
    assert packing.place(declared["a"]) == place


def test_what_is_released_is_free_again() -> None:
    packing, declared = packing_of(box=a_cuda()), jobs(a=GPU, b=GPU)
    packing.occupy(declared["a"], CUDA, (Placement(host="box", devices=("GPU-0",)),))
    assert packing.place(declared["b"]) is None
    packing.release("a")
    assert packing.place(declared["b"]) is not None


def test_memory_that_a_host_calls_short_counts_until_something_changes_there() -> None:
    packing, declared = (
        packing_of(a=report(memory=8), b=report(memory=8)),
        jobs(**{name: {"resources": {"memory_gb": 5}} for name in "jk"}),
    )
    on_a = (Placement(host="a", devices=()),)
    packing.limit_memory("a", 4 * 2**30)
    assert packing.place(declared["j"]) == (CPU, (Placement(host="b", devices=()),))
    assert packing.place(declared["j"], frozenset({"a"})) is None
    packing.observe(replace(views_of(fleet_of({"a": report(memory=8)}))[0]))
    assert packing.place(declared["j"], frozenset({"a"})) == (CPU, on_a)
    packing.occupy(jobs(small={"resources": {"memory_gb": 1}})["small"], CPU, on_a)
    packing.limit_memory("a", 6 * 2**30)  # 1 GiB ours and 1 GiB others': 6 are left
    assert packing.place(declared["j"], frozenset({"a"})) == (CPU, on_a)
    packing.limit_memory("a", 4 * 2**30)
    assert packing.place(declared["k"], frozenset({"a"})) is None
    packing.release("small")
    assert packing.place(declared["k"], frozenset({"a"})) == (CPU, on_a)


def test_a_place_is_taken_once_and_given_back_once() -> None:
    packing, declared = packing_of(box=a_cuda(24, 2)), jobs(a=GPU)
    packing.occupy(declared["a"], CUDA, (Placement(host="box", devices=("GPU-0",)),))
    with pytest.raises(ValueError, match="has its place already"):
        packing.occupy(declared["a"], CUDA, (Placement(host="box", devices=("GPU-1",)),))
    packing.release("a")
    with pytest.raises(KeyError):
        packing.release("a")


def test_a_job_may_be_restricted_to_hosts() -> None:
    packing, declared = packing_of(one=a_mac(), two=a_mac()), jobs(a={"accelerator": "mps"})
    place = packing.place(declared["a"], frozenset({"two"}))
    assert place == (MPS, (Placement(host="two", devices=("apple:0",)),))
    assert packing.place(declared["a"], frozenset()) is None


def test_jobs_start_in_their_order_as_devices_come_free() -> None:
    packing, declared = packing_of(box=a_cuda()), jobs(a=GPU, b=GPU, c=GPU)
    queue = queue_of(packing, declared)
    order = names(queue.ready())
    while len(queue):
        packing.release(order[-1])
        order += names(queue.ready())
    assert order == ["a", "b", "c"]


def test_a_job_that_comes_back_keeps_its_position() -> None:
    packing, declared = packing_of(box=a_cuda()), jobs(a=GPU, b=GPU)
    queue = queue_of(packing, declared)
    assert names(queue.ready()) == ["a"]
    packing.release("a")
    queue.add(declared["a"], 0)
    assert names(queue.ready()) == ["a"]


def test_a_job_that_was_removed_does_not_start() -> None:
    packing, declared = packing_of(box=a_cuda()), jobs(a=GPU, b=GPU)
    queue = queue_of(packing, declared)
    queue.remove("a")
    assert "a" not in queue
    assert names(queue.ready()) == ["b"]
    with pytest.raises(KeyError):
        queue.remove("a")


def test_a_device_that_others_hold_is_used_when_they_let_go() -> None:
    known = {"box": Known(held=["GPU-0"])}
    packing, declared = packing_of(known, box=a_cuda()), jobs(a=GPU)
    queue = queue_of(packing, declared)
    assert queue.ready() == []
    packing.observe(views_of(fleet_of({"box": a_cuda()}))[0])
    assert names(queue.ready()) == ["a"]


def test_what_our_jobs_hold_is_not_taken_for_others() -> None:
    packing, declared = packing_of(mac=a_mac()), jobs(a={"accelerator": "mps"}, b={"accelerator": "mps"})
    packing.occupy(declared["a"], MPS, (Placement(host="mac", devices=("apple:0",)),))
    view = views_of(fleet_of({"mac": a_mac()}), {"mac": Known(held=["apple:0"], slots_held=0)})[0]
    packing.observe(view)
    packing.release("a")
    assert packing.place(declared["b"]) is not None


def test_a_device_that_others_took_first_is_left_for_one_that_is_free() -> None:
    packing, declared = packing_of(box=a_cuda(24, 2)), jobs(a=GPU)
    packing.occupy(declared["a"], CUDA, (Placement(host="box", devices=("GPU-0",)),))
    packing.release("a")
    packing.observe(views_of(fleet_of({"box": a_cuda(24, 2)}), {"box": Known(held=["GPU-0"])})[0])
    assert packing.place(declared["a"]) == (CUDA, (Placement(host="box", devices=("GPU-1",)),))


def test_an_adopted_run_gives_back_what_the_survey_saw_held() -> None:
    known = {"mac": Known(held=["apple:0"], slots_held=1, max_jobs=1)}
    packing, declared = packing_of(known, mac=a_mac()), jobs(a={"accelerator": "mps"}, b={}, c={})
    packing.adopt(declared["a"], MPS, (Placement(host="mac", devices=("apple:0",)),))
    packing.adopt(declared["b"], CPU, (Placement(host="mac", devices=()),))
    assert packing.place(declared["c"]) is None
    packing.release("b")
    assert packing.place(declared["c"]) is not None
    packing.release("a")
    assert packing.place(replace(declared["a"], name="d")) is not None


def test_a_wide_job_does_not_starve() -> None:
    """Two GPUs, one of them always in use by a narrow job: the wide one gets the host after `PATIENCE` passed it."""
    packing = packing_of(box=a_cuda(24, 2))
    declared = jobs(first=GPU, wide=WIDE, **{f"n{number}": GPU for number in range(3 * PATIENCE)})
    queue = queue_of(packing, declared)
    running = names(queue.ready())
    assert running == ["first", "n0"]
    before = 0
    while "wide" in queue:
        packing.release(running.pop(0))
        started = names(queue.ready())
        before += len(started)
        running += started
    assert running == ["wide"]
    assert before == PATIENCE + 1
    packing.release("wide")
    assert len(queue.ready()) == 2


def test_a_reservation_ends_with_its_job() -> None:
    packing = packing_of(box=a_cuda(24, 2))
    declared = jobs(first=GPU, wide=WIDE, **{f"n{number}": GPU for number in range(3 * PATIENCE)})
    queue = queue_of(packing, declared)
    running = started = names(queue.ready())
    while started:
        packing.release(running[0])
        started = names(queue.ready())
        running = running[1:] + started
    assert "wide" in queue
    queue.remove("wide")
    assert len(queue.ready()) == 1


def test_no_machine_is_kept_where_others_hold_too_much_of_it() -> None:
    packing = packing_of({"box": Known(held=["GPU-0"])}, box=a_cuda(24, 2))
    declared = jobs(first=GPU, wide=WIDE, **{f"n{number}": GPU for number in range(2 * PATIENCE)})
    queue = queue_of(packing, declared)
    running = names(queue.ready())
    while running:
        packing.release(running.pop())
        running += names(queue.ready())
    assert len(queue) == 1
    assert "wide" in queue


def hosts_of(place: Any) -> list[str]:
    return [one.host for one in place[1]] if place else []


def test_a_gang_takes_all_of_its_hosts_at_once_or_none() -> None:
    packing, declared = (
        packing_of(a=a_cuda(24, 2), b=a_cuda(24, 2), c=a_cuda()),
        jobs(gang=gang(WIDE), one=WIDE, two=WIDE),
    )
    place = packing.place(declared["gang"])
    both = ("GPU-0", "GPU-1")
    assert place == (CUDA, (Placement(host="a", devices=both), Placement(host="b", devices=both)))
    packing.occupy(declared["one"], CUDA, (Placement(host="b", devices=both),))
    assert packing.place(declared["gang"]) is None
    packing.release("one")
    packing.occupy(declared["gang"], *place)
    assert packing.place(declared["two"]) is None
    packing.release("gang")
    assert hosts_of(packing.place(declared["two"])) == ["a"]


def test_a_gangs_hosts_are_distinct_machines_in_the_order_of_the_inventory() -> None:
    known = {"a": Known(machine="m"), "b": Known(machine="m"), "c": Known(slots_held=1)}
    packing, declared = packing_of(known, **{name: report() for name in "cab"}), jobs(gang=gang({}), wide=gang({}, 3))
    assert hosts_of(packing.place(declared["gang"])) == ["c", "a"]
    assert packing.place(declared["wide"]) is None


def test_a_gang_is_of_one_architecture_unless_the_job_takes_any() -> None:
    packing = packing_of(a=report(), b=report(arch="arm64"), c=report(arch="aarch64"), d=report())
    declared = jobs(gang=gang({}), three=gang({}, 3), any=gang({}, 3, mixed_arch=True), first={}, second={})
    assert hosts_of(packing.place(declared["gang"])) == ["b", "c"]
    assert packing.place(declared["three"]) is None
    assert hosts_of(packing.place(declared["any"])) == ["a", "b", "c"]
    for name, host in (("first", "b"), ("second", "c")):
        packing.occupy(declared[name], CPU, (Placement(host=host, devices=()),))
    assert hosts_of(packing.place(declared["gang"])) == ["a", "d"]


def test_a_gang_takes_its_first_accelerator_under_which_all_hosts_are_free() -> None:
    declared = jobs(gang=gang({"accelerator": ["cuda", "cpu"]}), one=GPU)
    packing = packing_of(a=a_cuda(), b=a_cuda(), c=report(), d=report())
    assert hosts_of(packing.place(declared["gang"])) == ["a", "b"]
    packing.occupy(declared["one"], CUDA, (Placement(host="a", devices=("GPU-0",)),))
    place = packing.place(declared["gang"])
    assert place is not None
    assert (place[0], hosts_of(place)) == (CPU, ["c", "d"])


def test_an_adopted_gang_keeps_what_it_has_on_the_hosts_that_are_known() -> None:
    known = {name: Known(held=["GPU-0"]) for name in "ab"}
    packing, declared = packing_of(known, a=a_cuda(), b=a_cuda()), jobs(gang=gang(GPU, 3), other=gang(GPU))
    places = tuple(Placement(host=name, devices=("GPU-0",)) for name in ("a", "b", "gone"))
    packing.adopt(declared["gang"], CUDA, places)
    assert packing.place(declared["other"]) is None
    packing.release("gang")
    assert hosts_of(packing.place(declared["other"])) == ["a", "b"]


NARROW = {f"n{number}": GPU for number in range(6 * PATIENCE)}


def passed_by_before(queue: Queue, packing: Packing, wanted: set[str], running: list[str]) -> list[str]:
    """Let the oldest job end again and again; return the order in which the others start until all wanted have."""
    order: list[str] = []
    while wanted - set(order) and running:
        packing.release(running.pop(0))
        started = names(queue.ready())
        order += started
        running += started
    return order


def test_a_gang_does_not_starve() -> None:
    """Each of its hosts is always in use by a narrow job, until both are kept for it."""
    packing = packing_of(a=a_cuda(), b=a_cuda(), c=a_mac())
    queue = queue_of(packing, jobs(first=GPU, second=GPU, gang=gang(GPU), **NARROW))
    order = passed_by_before(queue, packing, {"gang"}, names(queue.ready()))
    assert order[-1] == "gang"
    assert len(order) == PATIENCE + 1


def test_two_gangs_do_not_starve_each_other() -> None:
    """They share a host, and neither ever holds it back from the other for ever."""
    packing = packing_of(a=a_cuda(), b=a_cuda(), c=a_cuda())
    left, right = gang(GPU) | {"where": {"hosts": ["a", "b"]}}, gang(GPU) | {"where": {"hosts": ["b", "c"]}}
    first = {f"f{number}": GPU for number in range(3)}
    queue = queue_of(packing, jobs(**first, left=left, right=right, **NARROW))
    order = passed_by_before(queue, packing, {"left", "right"}, names(queue.ready()))
    assert {"left", "right"} <= set(order)
    assert len(order) < 3 * PATIENCE


def test_machines_are_kept_all_or_none_and_others_than_those_that_somebody_else_took() -> None:
    packing = packing_of(a=a_cuda(), b=a_cuda(), c=a_cuda())
    declared = jobs(one=GPU, two=GPU, three=GPU, gang=gang(GPU), other=gang(GPU), narrow=GPU)
    for name, host in (("one", "a"), ("two", "b"), ("three", "c")):
        packing.occupy(declared[name], CUDA, (Placement(host=host, devices=("GPU-0",)),))
    packing.reserve(packing.search(declared["gang"]), "gang")  # a and b
    packing.reserve(packing.search(declared["other"]), "other")  # one host is left, which is too few
    packing.release("three")
    assert hosts_of(packing.place(declared["narrow"])) == ["c"]
    packing.release("one")
    packing.release("two")
    packing.observe(views_of(fleet_of({"a": a_cuda()}), {"a": Known(held=["GPU-0"])})[0])
    packing.reserve(packing.search(declared["gang"]), "gang")
    assert packing.place(declared["narrow"]) is None
    assert hosts_of(packing.place(declared["gang"])) == ["b", "c"]
    packing.forgo("gang")
    assert hosts_of(packing.place(declared["narrow"])) == ["b"]


def test_cpu_jobs_take_slots_and_cpus() -> None:
    packing = packing_of({"box": Known(max_jobs=2)}, box=report(cpus=4))
    declared = jobs(big={"resources": {"cpus": 3}}, big2={"resources": {"cpus": 3}}, a={}, b={})
    assert names(queue_of(packing, declared).ready()) == ["big", "a"]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), hosts=st.integers(1, 6), count=st.integers(1, 20))
def test_every_job_that_fits_runs_once_and_no_device_is_ever_shared(seed: int, hosts: int, count: int) -> None:
    """Jobs end in any order; at each moment nobody has what another has, and in the end all have run."""
    fleet, known = random_fleet(seed, hosts)
    views = views_of(fleet, {name: replace(one, held=[], slots_held=0) for name, one in known.items()})
    packing, dice = Packing(views), Dice(seed)
    declared = jobs_of(random_document(seed, count)).jobs
    fitting = [job for job in declared.values() if packing.search(job).hosts]
    queue = Queue(packing)
    for position, job in enumerate(fitting):
        queue.add(job, position)
    running: dict[str, tuple[Placement, ...]] = {}
    order: list[str] = []
    while True:
        for start in queue.ready():
            held = {(place.host, name) for places in running.values() for place in places for name in place.devices}
            assert not held & {(place.host, name) for place in start.placements for name in place.devices}
            running[start.job.name] = start.placements
            order.append(start.job.name)
        if not running:
            break
        ended = dice.choice(sorted(running))
        del running[ended]
        packing.release(ended)
    assert sorted(order) == sorted(job.name for job in fitting)
