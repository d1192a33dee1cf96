"""What is to be done for a job: what hosts know comes first, what cannot be known is never run again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulayer.errors import ExitCode, HostError, Stage, UsageError
from gpulayer.fleet.session import AgentError
from gpulayer.placement.plan import (
    Action,
    Code,
    GroupedRefusal,
    HostView,
    Kind,
    KnownRun,
    Placement,
    Plan,
    PlannedJob,
    Refusal,
    ShapeVerdict,
)
from gpulayer.run.channel import WINDOW, Channel
from gpulayer.run.events import Event, now
from gpulayer.run.launch import check_secrets
from gpulayer.run.lock import launching
from gpulayer.run.paths import Paths
from gpulayer.run.replies import run_state
from gpulayer.run.work import Outcome, Step, Work, exit_code, exit_code_of_plan, needed_hosts, outcome_of, works_of
from gpulayer.spec.identity import run_id
from gpulayer.spec.inventory import Host
from gpulayer.spec.jobs import Cause, IndependentJob, JobSet, Retries

KEY = "0123456789abcdef"
JOBS = JobSet(project="p", jobs={"a": IndependentJob(name="a", command="true", retries=2)})


def plan_of(action: Action, host: str | None = "alpha", refusals: tuple[GroupedRefusal, ...] = ()) -> Plan:
    refused = action is Action.REFUSE
    placed = action in {Action.RUN, Action.RETRY, Action.FOLLOW} and host is not None
    planned = PlannedJob(
        job="a",
        key=KEY,
        shape="s",
        action=action,
        accelerator=None if refused else "cpu",
        placements=(Placement(host=host or "", devices=()),) if placed else (),
        position=1 if action is Action.QUEUE else None,
        run=None if refused else run_id("a", KEY, 1),
        attempt=None if refused else 1,
    )
    return Plan(
        created_at=now(),
        project="p",
        documents=(),
        hosts=(),
        jobs=(planned,),
        shapes={"s": ShapeVerdict(fits=("alpha", "beta"), refusals=refusals)},
        applicable=True,
    )


def known(status: str, *, attempt: int = 1, host: str = "alpha", code: int | None = None) -> KnownRun:
    return KnownRun(
        run=run_id("a", KEY, attempt), job="a", key=KEY, attempt=attempt, host=host, status=status, code=code
    )  # fmt: skip


def view(*runs: KnownRun, name: str = "alpha") -> dict[str, HostView]:
    return {name: HostView(host=Host(name=name), reached=True, runs=runs)}


def work(plan: Plan, views: dict[str, HostView], *history: KnownRun, resume: bool = False) -> Work:
    (found,) = works_of(plan, JOBS, views, history, resume=resume)
    return found


def refusal(code: Code, *hosts: str) -> GroupedRefusal:
    return GroupedRefusal(hosts=hosts, refusal=Refusal(code=code, kind=Kind.HOST))


def test_a_new_job_starts_where_it_was_planned() -> None:
    found = work(plan_of(Action.RUN), view())
    assert (found.step, found.outcome, found.run.run, found.last_attempt) == (Step.START, None, run_id("a", KEY, 1), 3)
    assert found.place is not None
    assert [place.host for place in found.place[1]] == ["alpha"]
    assert work(plan_of(Action.QUEUE), view()).step is Step.QUEUE


@pytest.mark.parametrize(
    ("status", "code", "step", "outcome"),
    [
        ("exited", 0, Step.NOTHING, Outcome.UP_TO_DATE),
        ("exited", 3, Step.NOTHING, Outcome.FAILED),
        ("lost", None, Step.NOTHING, Outcome.LOST),
        ("running", None, Step.FOLLOW, None),
        ("orphaned", None, Step.FOLLOW, None),
    ],
)
def test_a_run_that_a_host_knows_is_not_started_again(
    status: str, code: int | None, step: Step, outcome: Outcome | None
) -> None:
    for action in (Action.RUN, Action.QUEUE, Action.RETRY):
        found = work(plan_of(action), view(known(status, code=code)))
        assert (found.step, found.outcome) == (step, outcome)


def test_a_later_attempt_counts_and_an_earlier_one_does_not() -> None:
    plan = plan_of(Action.RUN)
    assert work(plan, view(known("exited", code=3), known("exited", attempt=2, code=0))).outcome is Outcome.UP_TO_DATE
    later = replace(plan, jobs=(replace(plan.jobs[0], attempt=2, run=run_id("a", KEY, 2), action=Action.RETRY),))
    assert work(later, view(known("exited", code=3))).step is Step.START


@pytest.mark.parametrize("status", ["launching", "running", "stopping", "orphaned", "unknown"])
def test_what_may_run_on_a_silent_host_is_unknown_and_stays_there(status: str) -> None:
    found = work(plan_of(Action.RUN, host="beta"), view(name="beta"), known(status, host="alpha"))
    assert (found.step, found.outcome, found.run.status) == (Step.NOTHING, Outcome.UNKNOWN, "unknown")
    assert found.run.host == "alpha"


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [("running", None, Outcome.UNKNOWN), ("exited", 0, Outcome.UP_TO_DATE), ("exited", 3, Outcome.FAILED)],
)
def test_what_began_on_a_host_that_has_forgotten_it_is_not_started_again(
    status: str, code: int | None, outcome: Outcome
) -> None:
    began = replace(known(status, code=code), started_at=now())
    for action in (Action.RUN, Action.QUEUE):
        found = work(plan_of(action), view(), began)
        assert (found.step, found.outcome) == (Step.NOTHING, outcome)


def test_an_end_that_was_seen_on_a_silent_host_holds() -> None:
    found = work(plan_of(Action.RUN, host="beta"), view(name="beta"), known("exited", host="alpha", code=0))
    assert found.outcome is Outcome.UP_TO_DATE


def test_a_launch_that_never_arrived_is_sent_again() -> None:
    assert work(plan_of(Action.RUN), view(), known("launching")).step is Step.START
    assert work(plan_of(Action.RUN), view(), known("launching"), resume=True).step is Step.QUEUE


def test_resuming_starts_only_what_was_left_in_the_queue() -> None:
    for action in (Action.RUN, Action.QUEUE):
        assert work(plan_of(action), view(), known("queued", host=""), resume=True).step is Step.QUEUE
        dropped = work(plan_of(action), view(), known("cancelled", host=""), resume=True)
        assert (dropped.step, dropped.outcome) == (Step.NOTHING, Outcome.CANCELLED)
        assert work(plan_of(action), view(), resume=True).outcome is Outcome.QUEUED
    again = work(plan_of(Action.RUN), view(), known("cancelled", host=""))
    assert again.step is Step.START


def test_a_waiting_retry_goes_on() -> None:
    found = work(plan_of(Action.RUN), view(known("exited", code=3)), known("queued", attempt=2, host=""), resume=True)
    assert (found.step, found.run.attempt, found.last_attempt) == (Step.QUEUE, 2, 3)


def test_an_end_that_the_plan_saw_needs_no_host() -> None:
    assert work(plan_of(Action.UP_TO_DATE), {}).outcome is Outcome.UP_TO_DATE
    assert work(plan_of(Action.FAILED), {}).outcome is Outcome.FAILED
    assert work(plan_of(Action.FOLLOW), {}).outcome is Outcome.UNKNOWN


def test_retries_are_counted() -> None:
    found = work(plan_of(Action.RUN), view())
    found.run = known("exited", code=1)
    assert found.may_retry
    found.next_attempt()
    assert (found.run.attempt, found.run.status, found.step, found.place) == (2, "queued", Step.QUEUE, None)
    for status, may in (("timed_out", True), ("signaled", True), ("cancelled", False), ("lost", False)):
        found.run = known(status, attempt=2)
        assert found.may_retry is may
    found.run = known("exited", attempt=3, code=1)
    assert not found.may_retry


@pytest.mark.parametrize("cause", list(Cause))
def test_only_the_named_causes_are_tried_again(cause: Cause) -> None:
    job = IndependentJob(name="a", command="true", retries=Retries(max=1, on=(cause,)))
    found = work(plan_of(Action.RUN), view())
    found.job = job
    ends = [("failed", known("exited", code=3)), ("timed_out", known("timed_out")), ("lost", known("lost"))]
    never = [known("cancelled"), known("exited", code=0), known("unknown"), known("running")]
    for word, end in (*ends, *(("", end) for end in never)):
        found.run = end
        assert found.may_retry is (word == cause)


def test_success_is_not_tried_again() -> None:
    found = work(plan_of(Action.RUN), view())
    found.run = known("exited", code=0)
    assert not found.may_retry


@pytest.mark.parametrize(
    ("refusals", "code"),
    [
        ((refusal(Code.GPU_MEMORY, "alpha"), refusal(Code.UNREACHABLE, "beta")), ExitCode.UNREACHABLE),
        ((refusal(Code.GPU_MEMORY, "alpha", "beta"),), ExitCode.REFUSED),
        ((refusal(Code.UNREACHABLE, "beta"), refusal(Code.WHERE, "beta")), ExitCode.REFUSED),
        ((refusal(Code.UNREACHABLE, "alpha", "beta"), refusal(Code.LABELS, "beta")), ExitCode.UNREACHABLE),
    ],
)
def test_a_refused_job_gives_3_or_4(refusals: tuple[GroupedRefusal, ...], code: ExitCode) -> None:
    assert exit_code_of_plan(plan_of(Action.REFUSE, refusals=refusals)) is code
    assert exit_code_of_plan(plan_of(Action.RUN)) is ExitCode.OK


def test_exit_codes_have_their_order() -> None:
    assert exit_code([]) is ExitCode.OK
    assert exit_code([Outcome.SUCCEEDED, Outcome.FAILED]) is ExitCode.JOB_FAILED
    assert exit_code([Outcome.FAILED, Outcome.REFUSED]) is ExitCode.REFUSED
    assert exit_code([Outcome.FAILED, Outcome.REFUSED, Outcome.UNKNOWN]) is ExitCode.UNREACHABLE
    assert outcome_of(known("exited", code=0)) is Outcome.SUCCEEDED
    assert outcome_of(known("exited")) is Outcome.FAILED


def test_needed_hosts() -> None:
    assert needed_hosts(plan_of(Action.RUN)) == ({"alpha"}, set())
    assert needed_hosts(plan_of(Action.QUEUE)) == (set(), {"alpha", "beta"})
    assert needed_hosts(plan_of(Action.UP_TO_DATE)) == (set(), set())


def rank(number: int) -> dict[str, Any]:
    return {"rank": number, "status": "running", "code": None, "signal": None, "reason": None, "log_size": 0}


@pytest.mark.parametrize(
    ("field", "gang", "ranks"),
    [
        ("ranks", {"node": 0, "nodes": 2}, [rank(number) for number in range(1025)]),
        ("ranks", {"node": 0, "nodes": 2}, [rank(1), rank(1)]),
        ("gang", {"node": 0, "nodes": 2**50}, []),
        ("gang", {"node": 2, "nodes": 2}, []),
    ],
)
def test_a_gang_beyond_all_bounds_is_refused(field: str, gang: dict[str, int], ranks: list[Any]) -> None:
    state = STATE | {"run": f"a-0123456789ab-a1-n{gang['node']}", "status": "running", "code": None}
    held = run_state("alpha", state | {"gang": {"node": gang["node"], "nodes": 4}, "ranks": [rank(0), rank(1)]})
    assert (held.run.node, len(held.run.ranks)) == (gang["node"], 2)
    with pytest.raises(HostError, match=f"'{field}'"):
        run_state("alpha", state | {"gang": gang, "ranks": ranks})


def test_a_state_of_another_run_is_no_answer() -> None:
    asked = run_state("alpha", STATE).run
    assert run_state("alpha", STATE, asked).run == asked
    for other in ({"run": "b-0123456789ab-a1"}, {"job": "b"}, {"key": "f" * 64}):
        with pytest.raises(HostError, match="'run'"):
            run_state("alpha", STATE | other, asked)


def test_what_a_host_says_is_cut_and_can_be_kept() -> None:
    reason = run_state("alpha", STATE | {"reason": "\ud800" + "x" * 60_000}).run.reason
    assert reason is not None
    assert reason.startswith("\\ud800x")
    assert len(reason.encode()) < 2100
    error = AgentError("alpha", {"error": {"code": "x", "message": "m" * 60_000, "fix": "\udfff"}})
    assert (len(error.message) < 2100, error.fix) == (True, "\\udfff")
    assert len(str(HostError("alpha", Stage.CONNECT, "x" * 60_000))) < 2100


def test_unset_secrets_are_named_all_at_once() -> None:
    jobs = [IndependentJob(name=name, command="true", secrets=("ONE", "TWO")) for name in ("a", "b")]
    check_secrets(jobs, {"ONE": "1", "TWO": ""})
    with pytest.raises(UsageError, match=r"ONE \(of a, b\), TWO \(of a, b\)") as caught:
        check_secrets(jobs, {})
    assert caught.value.fix == "export ONE TWO"


def test_one_process_launches_at_a_time(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    paths.create()
    program = (
        "import sys; from pathlib import Path; from gpulayer.run.lock import launching\n"
        "from gpulayer.run.paths import Paths\n"
        "with launching(Paths(Path(sys.argv[1])), 'p') as other: print(other, flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        with launching(paths, "p") as other:
            assert other == process.pid
        with launching(paths, "another") as other:
            assert other is None
        process.kill()
    with launching(paths, "p") as other:
        assert other is None


def output(data: bytes) -> Event:
    return Event(event="output", at=now(), job="a", run="r", host="h", data=data, detail={"offset": 0})


async def test_output_waits_for_its_reader_and_nothing_else_does() -> None:
    channel = Channel()
    await channel.put_output(output(b"x" * WINDOW))
    blocked = asyncio.create_task(channel.put_output(output(b"y")))
    await asyncio.sleep(0)
    channel.put(Event(event="running", at=now()))
    await asyncio.sleep(0)
    assert not blocked.done()
    reader = channel.read()
    assert [(await anext(reader)).event, (await anext(reader)).event] == ["output", "running"]
    await blocked
    channel.close()
    assert [event.data async for event in reader] == [b"y"]


STATE: dict[str, Any] = {
    "run": "a-0123456789ab-a1", "project": "p", "job": "a", "key": KEY, "attempt": 1, "host": "alpha",
    "accelerator": "cpu", "devices": [], "status": "exited", "code": 0, "signal": None, "reason": None,
    "started_at": None, "ended_at": None, "log_size": 3, "outputs": [],
}  # fmt: skip


def test_a_state_is_read() -> None:
    state = run_state("beta", STATE)
    assert (state.run.host, state.run.status, state.run.code, state.log_size) == ("beta", "exited", 0, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "../../x"), ("run", None), ("job", "A"), ("status", "queued"), ("status", "unknown"), ("status", []),
        ("code", "0"), ("code", True), ("code", -1), ("code", 1e300), ("attempt", None), ("devices", "GPU-1"),
        ("devices", [1]), ("reason", {}), ("log_size", -1), ("outputs", {}), ("key", "../k"),
        ("started_at", "yesterday"), ("ended_at", "2026-01-01T00:00:00"), ("started_at", 5),
        ("tree", {"left": {"tree": "gone", "devices": {}, "processes": []}}),
        ("devices", {"left": {"tree": "empty", "devices": {"cpu:0": "gone"}, "processes": []}}),
        ("processes", {"left": {"tree": "empty", "devices": {}, "processes": [{"pid": 1}] * 1001}}),
        ("pid", {"left": {"tree": "empty", "devices": {}, "processes": [{"pid": -1}]}}),
    ],
)  # fmt: skip
def test_a_state_that_does_not_hold_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(HostError, match=field):
        run_state("alpha", STATE | (value if isinstance(value, dict) and "left" in value else {field: value}))
    with pytest.raises(HostError):
        run_state("alpha", [STATE])
