"""Plan and apply on three real hosts: what runs, what is refused, what it leaves behind."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpulayer.errors import StalePlanError, UsageError
from gpulayer.fleet.session import AgentError, Reply, Session
from gpulayer.placement.plan import Action
from gpulayer.run.api import apply
from gpulayer.run.follow import Follower
from gpulayer.run.store import Store
from tests.run.project import STARTED, Project, output, summary, words

EVENT = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "schemas" / "event.schema.json").read_text())
)


async def test_twelve_jobs_run_and_then_all_is_up_to_date(project: Project) -> None:
    project.write({f"job-{n}": {"command": f"{STARTED}; seq {n} 400"} for n in range(12)})
    plan = await project.plan()
    assert {job.action for job in plan.jobs} == {Action.RUN, Action.QUEUE}  # twelve jobs, six slots
    events = await project.apply(plan)
    assert summary(events) == (0, {"succeeded": 12})
    assert set(project.starts().values()) == {1}
    assert len(project.starts()) == 12
    assert set(project.runs().values()) == set(project.hosts)
    assert project.logs_are_equal()
    for n in range(12):
        assert output(events, f"job-{n}") == "".join(f"{i}\n" for i in range(n, 401)).encode()
        assert words(events, f"job-{n}")[-1] == "exited"
    for event in events:
        EVENT.validate(event.to_json())

    again = await project.plan()
    assert {job.action for job in again.jobs} == {Action.UP_TO_DATE}
    assert summary(await project.apply(again)) == (0, {"up_to_date": 12})
    assert summary(await project.apply(plan)) == (0, {"up_to_date": 12})
    assert set(project.starts().values()) == {1}


async def test_who_plans_and_applies_at_once_looks_at_the_hosts_once(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    request = Session.request

    async def spy(session: Session, op: str, *words: Any, **fields: Any) -> Reply:
        asked.append((session.name, op))
        return await request(session, op, *words, **fields)

    monkeypatch.setattr(Session, "request", spy)
    project.write({"one": {"command": "true"}})
    assert summary(await project.apply(await project.plan())) == (0, {"succeeded": 1})
    assert sorted(host for host, op in asked if op == "probe") == sorted(project.hosts)
    monkeypatch.setattr("gpulayer.run.survey.RECENT", 0.0)
    await project.plan()
    assert sorted(host for host, op in asked if op == "probe") == sorted([*project.hosts] * 2)


async def test_what_another_controller_ran_is_up_to_date_and_brought_here(project: Project, tmp_path: Path) -> None:
    project.write({"one": {"command": f"{STARTED}; echo kept | tee result.txt", "outputs": ["*.txt"]}})
    assert summary(await project.apply()) == (0, {"succeeded": 1})
    (run,) = project.runs()
    elsewhere = tmp_path / "another-machine" / project.name
    elsewhere.mkdir(parents=True)
    for name in ("jobs.yaml", "inventory.yaml"):
        shutil.copy(project.folder / name, elsewhere)
    other = replace(project, folder=elsewhere)
    assert summary(await other.apply()) == (0, {"up_to_date": 1})
    assert project.starts() == {run: 1}
    assert (other.paths.outputs(run) / "result.txt").read_text() == "kept\n"
    assert other.logs_are_equal()


async def test_what_a_document_may_hold_arrives(project: Project) -> None:
    env = {"LONG": "é" * 60_000} | dict.fromkeys("AB", "x" * 36000)
    outputs = [f"{'x' * 250}-{number}" for number in range(240)]
    command = ["sh", "-c", 'printf %s "$LONG$A$B" | wc -c; printf %s "$1" | wc -c', "sh", "y" * 64_000]
    project.write({"a": {"command": command, "env": env, "outputs": outputs}})
    events = await project.apply()
    assert output(events, "a") == b"192000\n64000\n"
    assert summary(events) == (0, {"succeeded": 1})


async def test_a_job_that_exits_3_gives_1(project: Project) -> None:
    project.write({"good": {"command": ["true"]}, "bad": {"command": "exit 3"}})
    events = await project.apply()
    assert summary(events) == (1, {"succeeded": 1, "failed": 1})
    (end,) = [event for event in events if event.job == "bad" and event.event == "exited"]
    assert end.detail["code"] == 3
    plan = await project.plan()
    assert {job.job: job.action for job in plan.jobs} == {"good": Action.UP_TO_DATE, "bad": Action.FAILED}
    assert summary(await project.apply(plan)) == (1, {"up_to_date": 1, "failed": 1})
    retried = await project.plan(retry_failed=True)
    assert summary(await project.apply(retried)) == (1, {"up_to_date": 1, "failed": 1})
    assert sorted(run.removesuffix(run[-1]) for run in project.runs() if run.startswith("bad"))
    assert len([run for run in project.runs() if run.startswith("bad")]) == 2


async def test_a_job_that_fits_nowhere_gives_3_and_nothing_starts(project: Project) -> None:
    project.write({"good": {"command": STARTED}, "big": {"command": STARTED, "resources": {"memory_gb": 100000}}})
    plan = await project.plan()
    events = await project.apply(plan)
    assert summary(events)[0] == 3
    assert project.runs() == {}
    assert summary(await project.apply(plan, partial=True)) == (3, {"succeeded": 1, "refused": 1})
    assert set(project.starts().values()) == {1}


async def test_a_silent_host_gives_4_only_where_it_is_needed(project: Project) -> None:
    project.extra["run-two"] = {"port": 1}
    project.write({"free": {"command": STARTED, "where": {"hosts": ["run-one"]}}})
    assert summary(await project.apply()) == (0, {"succeeded": 1})
    project.write({
        "free": {"command": STARTED, "where": {"hosts": ["run-one"]}},
        "bound": {"command": STARTED, "where": {"hosts": ["run-two"]}},
    })  # fmt: skip
    assert summary(await project.apply())[0] == 4
    assert summary(await project.apply(partial=True)) == (4, {"up_to_date": 1, "unreachable": 1})


async def test_a_host_that_went_silent_after_the_plan_gives_4_and_nothing_starts(project: Project) -> None:
    jobs = {f"on-{name}": {"command": STARTED, "where": {"hosts": [name]}} for name in ("run-one", "run-two")}
    project.write(jobs)
    plan = await project.plan()
    project.hosts["run-two"].stop()
    try:
        assert summary(await project.apply(plan))[0] == 4
        assert project.starts() == {}
        assert summary(await project.apply(plan, partial=True)) == (4, {"succeeded": 1, "unreachable": 1})
    finally:
        project.hosts["run-two"].start()
    assert summary(await project.apply(plan)) == (0, {"succeeded": 1, "up_to_date": 1})


async def test_code_travels_and_outputs_come_back(project: Project) -> None:
    code = project.folder / "code"
    (code / "sub").mkdir(parents=True)
    (code / "sub" / "train.py").write_text("from pathlib import Path; Path('out.txt').write_text('learned')\n")
    job = {"command": ["python", "sub/train.py"], "workdir": "code", "outputs": ["*.txt"]}
    project.write({"a": job, "b": job | {"command": "python sub/train.py; exit 4"}})
    plan = await project.plan()
    events = await project.apply(plan)
    assert summary(events)[0] == 1  # outputs are fetched whatever the end
    for run in project.runs():
        assert (project.paths.outputs(run) / "out.txt").read_text() == "learned"
    synced = [event for event in events if event.event == "synced"]
    assert {event.detail["files"] for event in synced} == {1}
    assert len(synced) == len({event.host for event in synced})
    (code / "sub" / "train.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(StalePlanError, match="job a: its code was changed"):
        await project.apply(plan)


async def test_a_job_whose_outputs_the_host_refuses_is_no_success(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write({"a": {"command": "touch out.txt", "outputs": ["*.txt"]}})
    plan = await project.plan()

    async def refused(*_: object) -> None:
        raise AgentError("alpha", {"error": {"code": "quota", "message": "too many", "fix": "name fewer files"}})

    monkeypatch.setattr(Follower, "fetch", refused)
    events = await project.apply(plan)
    assert summary(events) == (1, {"failed": 1})
    (warning,) = [event for event in events if event.event == "warning"]
    assert warning.detail["fix"] == "name fewer files"


async def test_a_changed_document_makes_a_plan_stale(project: Project) -> None:
    project.write({"a": {"command": "true"}})
    plan = await project.plan()
    project.write({"a": {"command": "true", "timeout": "1h"}})
    with pytest.raises(StalePlanError, match=r"jobs\.yaml: was changed"):
        await project.apply(plan)
    assert project.runs() == {}


async def test_secrets_reach_the_job_and_nothing_else(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    told = 'printf %s "$TOKEN" | sha256sum | cut -c 1-12'
    project.write({"a": {"command": told, "secrets": ["TOKEN"]}})
    monkeypatch.delenv("TOKEN", raising=False)
    plan = await project.plan()
    with pytest.raises(UsageError, match="TOKEN"):
        await project.apply(plan)
    monkeypatch.setenv("TOKEN", "s3cr3t-value")
    events = await project.apply(plan)
    assert summary(events) == (0, {"succeeded": 1})
    assert output(events, "a") == b"1f3fa74b1208\n"
    places = [project.folder, *(host.home for host in project.hosts.values())]
    kept = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert any(path.name == "spec.json" for path in kept)
    assert [path for path in kept if b"s3cr3t-value" in path.read_bytes()] == []


async def test_retries_are_new_runs(project: Project) -> None:
    project.write({"flaky": {"command": f"{STARTED}; echo x >> ~/flaky-{project.name}; "
                             f"test $(wc -l < ~/flaky-{project.name}) = 2", "retries": 3,
                             "where": {"hosts": ["run-one"]}}})  # fmt: skip
    events = await project.apply()
    assert summary(events) == (0, {"succeeded": 1})
    assert [run[-3:] for run in project.runs()] == ["-a1", "-a2"]
    told = [(event.detail["attempt"], event.detail.get("last_attempt")) for event in events if event.event == "queued"]
    assert told == [(1, None), (2, 4)]
    assert set(project.starts().values()) == {1}
    assert {job.action for job in (await project.plan()).jobs} == {Action.UP_TO_DATE}


async def test_a_timeout_is_kept_on_the_host(project: Project) -> None:
    project.write({"slow": {"command": "echo begun; sleep 60", "timeout": "1s", "grace": "1s"}})
    events = await project.apply()
    assert summary(events)[0] == 1
    assert words(events, "slow")[-1] == "timed_out"
    assert output(events, "slow") == b"begun\n"


async def test_a_command_that_is_not_there_says_so(project: Project) -> None:
    project.write({"none": {"command": ["no-such-program"]}})
    events = await project.apply()
    (end,) = [event for event in events if event.event == "failed_to_start"]
    assert "no-such-program" in end.detail["reason"]
    assert summary(events)[0] == 1


async def test_an_intent_is_durable_before_its_launch_is_sent(project: Project) -> None:
    """When the host has started a run, the store has known for some time where it was going to be."""
    project.write({"a": {"command": STARTED}})
    plan = await project.plan()
    seen = []
    async for event in apply(plan, project.jobs, project.inventory, fleet=project.fleet):
        if event.event == "launching":
            with Store.open(project.folder) as store:
                seen += [(run.status, run.host) for run in store.runs(project.name)]
            assert project.starts() == {}
    assert seen == [("launching", next(iter(project.runs().values())))]
    with Store.open(project.folder) as store:
        spec = store.spec(next(iter(project.runs())))
    assert spec is not None
    assert spec["command"] == STARTED


async def test_plans_against_other_jobs_are_refused(project: Project) -> None:
    project.write({"a": {"command": "true"}})
    plan = await project.plan()
    (project.folder / "jobs.yaml").write_text(
        json.dumps({"version": 1, "name": "another", "jobs": {"a": {"accelerator": "cpu", "command": "true"}}})
    )
    with pytest.raises(UsageError, match="another"):
        await project.apply(plan)
