"""The nodes' runs of a gang are one run, and what speaks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulayer.placement.gangs import together
from gpulayer.placement.plan import FirstFailure, KnownRun
from gpulayer.spec.identity import gang_run, node_run, run_id
from gpulayer.spec.jobs import slug
from tests.fleets import a_run

KEY = "f" * 64
GANG = a_run("job", KEY, "h0", "running", nodes=3)


def node(number: int, status: str, **fields: Any) -> KnownRun:
    return replace(
        GANG, run=node_run(GANG.run, number), node=number, host=f"h{number}", devices=(f"GPU-{number}",),
        status=status, **fields,
    )  # fmt: skip


def one(*runs: KnownRun) -> KnownRun:
    (run,) = together(runs)
    return run


def test_a_nodes_run_id_is_an_id_and_leads_back_to_the_gang() -> None:
    longest = run_id(slug("x" * 80), KEY, 9_999)
    assert len(node_run(longest, 99)) == 63
    assert gang_run(node_run(longest, 99), 99) == longest


def test_a_gang_is_one_run_with_its_nodes_in_order_and_others_are_left_alone() -> None:
    other = a_run("other", KEY, "h0", "running")
    nodes = [node(number, "running", started_at=f"2026-11-30T10:00:0{3 - number}Z") for number in (2, 0, 1)]
    gang, same = together([nodes[0], other, *nodes[1:]])
    assert same is other
    assert gang.members == (nodes[1], nodes[2], nodes[0])
    assert (gang.run, gang.node, gang.nodes, gang.host) == (GANG.run, None, 3, "h0")
    assert (gang.devices, gang.started_at, gang.ended_at) == (("GPU-0",), "2026-11-30T10:00:01Z", None)
    assert together([]) == []


def test_the_nodes_come_before_a_record_of_the_whole() -> None:
    nodes = [node(number, "running") for number in range(3)]
    assert one(replace(GANG, status="launching"), *nodes) == one(*nodes, GANG) == one(*nodes)
    assert together([GANG]) == [GANG]


FAILED = FirstFailure(rank=5, host="h1", code=7)
CUT = FirstFailure(rank=None, host="h2")
OK = {"status": "exited", "code": 0}
ENDS: dict[str, tuple[list[dict[str, Any] | None], tuple[str, int | None, str | None]]] = {
    "all well": ([OK, OK, OK], ("exited", 0, None)),
    "a host that does not answer": (
        [OK, {"status": "unknown", "reason": "h1 does not answer"}, {"status": "lost"}],
        ("unknown", None, "h1 does not answer"),
    ),
    "the first to fail speaks": (
        [
            {"status": "cancelled", "reason": "stopped because rank 5 on h1 failed", "first_failure": FAILED},
            {"status": "exited", "code": 7, "first_failure": FAILED},
            {"status": "timed_out"},
        ],
        ("exited", 7, None),
    ),
    "the first to fail has another name elsewhere": (
        [
            {"status": "cancelled", "first_failure": replace(FAILED, host="other")},
            {"status": "exited", "code": 7},
            OK,
        ],
        ("exited", 7, None),
    ),
    "hosts that lost each other": (
        [
            {"status": "cancelled", "first_failure": CUT},
            {"status": "cancelled", "first_failure": CUT},
            {"status": "cancelled", "first_failure": replace(CUT, host="h0")},
        ],
        ("lost", None, "h2 was lost"),
    ),
    "a node that was lost and that nobody knows": (
        [{"status": "cancelled", "first_failure": CUT}, OK, None],
        ("lost", None, "h2 was lost"),
    ),
    "a node that failed by itself": (
        [
            {"status": "cancelled", "first_failure": replace(CUT, code=1)},
            OK,
            {"status": "failed_to_start", "reason": "no torch"},
        ],
        ("failed_to_start", None, "no torch"),
    ),
    "a lost node": (
        [{"status": "cancelled", "reason": "stopped because h2 was lost"}, OK, {"status": "lost", "reason": "reboot"}],
        ("lost", None, "reboot"),
    ),
    "a time limit": ([OK, {"status": "timed_out"}, {"status": "cancelled"}], ("timed_out", None, None)),
    "a code where nobody says who was first": ([OK, {"status": "exited", "code": 3}, OK], ("exited", 3, None)),
    "a node that nobody knows is no success": ([OK, None, OK], ("lost", None, "no host knows how node 1 ended")),
    "the others say how a gang ended that lacks a node": (
        [{"status": "cancelled", "reason": "asked to"}, OK, None],
        ("cancelled", None, "asked to"),
    ),
    "all begin": ([{"status": "launching"}] * 3, ("launching", None, None)),
    "some begin": ([{"status": "running"}, {"status": "launching"}, None], ("launching", None, None)),
    "all run": ([{"status": "running"}] * 3, ("running", None, None)),
    "one is done early": ([{"status": "running"}, OK, {"status": "running"}], ("running", None, None)),
    "one failed and the others still end": (
        [{"status": "running"}, {"status": "exited", "code": 7}, {"status": "running"}],
        ("stopping", None, None),
    ),
    "one stops": ([{"status": "running"}, OK, {"status": "stopping"}], ("stopping", None, None)),
    "one is orphaned": ([{"status": "running"}, OK, {"status": "orphaned"}], ("stopping", None, None)),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_speaks_for_the_gang(name: str) -> None:
    entries, expected = ENDS[name]
    gang = one(*(node(number, **entry) for number, entry in enumerate(entries) if entry))
    assert (gang.status, gang.code, gang.reason) == expected


def test_an_end_is_the_last_nodes_and_names_who_failed_first() -> None:
    ends = [{"ended_at": f"2026-11-30T10:00:0{number}Z", "first_failure": FAILED} for number in range(3)]
    gang = one(*(node(number, "cancelled", **end) for number, end in enumerate(ends)))
    assert (gang.ended_at, gang.first_failure) == ("2026-11-30T10:00:02Z", FAILED)
