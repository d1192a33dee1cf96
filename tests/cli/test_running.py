"""apply and all that comes after it, on this machine: jobs, their supervisors and agents are real processes."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
from typing import IO, Any

import pytest

from gpulayer.cli.live import HINTS
from tests.cli.command import Commander
from tests.cli.test_planning import holds

JOBS = """\
version: 1
name: story
jobs:
  good: {accelerator: cpu, command: "echo one; printf two", outputs: ["*.txt"]}
  bad: {accelerator: cpu, command: "echo '::error::no'; exit 3"}
  late:
    accelerator: cpu
    command: |
      echo ready
      while [ ! -e "$GO" ]; do sleep 0.05; done
      echo gone
    env: {GO: GOFILE}
"""


@pytest.fixture
def story(gpulayer: Commander) -> Commander:
    """A project whose job `late` ends when the file `go` is there; four slots that nobody else takes."""
    leases = gpulayer.home / "leases"
    gpulayer.write(
        "inventory.yaml", f"version: 1\nhosts:\n  here: {{transport: local, max_jobs: 4, lease_dir: {leases}}}\n"
    )
    gpulayer.write("jobs.yaml", JOBS.replace("GOFILE", str(gpulayer.folder / "go")))
    return gpulayer


def go(story: Commander) -> None:
    (story.folder / "go").touch()


def wait_for(stream: IO[bytes], text: bytes) -> bytes:
    """Read lines until one holds `text`; the stream's end before that is a failure."""
    seen = b""
    for line in iter(stream.readline, b""):
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came, but {seen!r}")


def statuses(story: Commander) -> dict[str, Any]:
    document = story("status", "--json").json()
    holds(document, "status")
    return {run["job"]: (run["status"], run["code"]) for run in document["runs"]}


def test_a_story_from_plan_to_fetch(story: Commander) -> None:
    go(story)
    assert story("plan").code == 0
    applied = story("apply")
    assert applied.code == 1
    assert {"good | one", "good | two", "bad | ::error::no", "late | ready", "late | gone"} <= set(
        applied.out.splitlines()
    )
    assert "bad  here  exited 3" in applied.out
    assert "ended: 2 succeeded, 1 failed" in applied.out
    assert statuses(story) == {"good": ("exited", 0), "bad": ("exited", 3), "late": ("exited", 0)}

    again = story("apply")
    assert again.code == 1
    assert "started" not in again.err
    assert "ended: 2 up to date, 1 failed" in again.out

    (story.folder / "deeper").mkdir()
    story.folder /= "deeper"  # commands after the fact look upward
    assert story("logs", "good").out == "good | one\ngood | two\n"
    assert story("logs", "good", "--raw").out == "one\ntwo"
    events = story("logs", "good", "--json").events()
    assert "".join(event["text"] for event in events if event["event"] == "output") == "one\ntwo"
    assert "exited 3" in story("status").out
    fetched = story("fetch", "good")
    assert (fetched.code, fetched.out) == (0, "")  # files are brought here, the log is not shown
    assert "fetched 0 files" in fetched.err
    assert "declares no outputs" in story("fetch", "late").err
    reader = story.start("logs", "good", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert reader.stdout
    assert reader.stderr
    reader.stdout.close()  # it has seen enough: nothing is followed, and nothing was interrupted
    assert reader.stderr.read() == b""
    reader.stderr.close()
    assert reader.wait(timeout=30) == 0
    assert "slots taken" in story("status", "--hosts").out
    assert story("status", "--hosts", "--json").json()["hosts"][0]["name"] == "here"
    assert story("logs", "nobody").code == 2
    assert "(did you mean 'good'?)" in story("logs", "godo").err
    assert "good has no rank 1: it is no distributed job" in story("logs", "good", "--rank", "1").err
    ended = story("cancel", "good")
    assert (ended.code, "good: it had ended before: nothing was cancelled" in ended.err) == (0, True)


def test_a_plan_that_is_saved_beside_the_code_can_be_applied_and_changes_no_code(story: Commander) -> None:
    story.write("jobs.yaml", "version: 1\nname: saved\njobs:\n  a: {accelerator: cpu, workdir: ., command: ls}\n")
    assert story("plan", "-o", "friday.json").code == 0
    applied = story("apply", "friday.json")
    assert applied.code == 0, applied.err
    assert [job["action"] for job in story("plan", "--json").json()["jobs"]] == ["up_to_date"]


def test_where_nothing_was_applied_hosts_are_asked(story: Commander) -> None:
    assert "slots taken" in story("status", "--hosts").out
    assert story("status").out == "story: nothing was applied yet\n"
    (story.folder / "jobs.yaml").unlink()
    shutil.rmtree(story.folder / ".gpulayer")
    assert "slots taken" in story("status", "--hosts").out
    nowhere = story("status")
    assert (nowhere.code, nowhere.out) == (2, "")
    assert "nothing was applied here" in nowhere.err


def test_names_of_one_machine_are_told(story: Commander) -> None:
    one, two = (
        f"{{transport: local, lease_dir: {story.home}/leases, state_dir: {story.home}/{name}}}" for name in ("1", "2")
    )
    story.write("inventory.yaml", f"version: 1\nhosts:\n  one: {one}\n  two: {two}\n")
    told = "info: one, two: These are names of one machine, which share its devices and slots."
    assert told in story("status", "--hosts").out
    assert told in story("probe", "--framework", "torch").out


def test_json_of_apply_is_one_event_a_line_and_nothing_else(story: Commander) -> None:
    go(story)
    result = story("apply", "jobs.yaml", "--yes", "--json")
    assert result.code == 1
    for event in result.events():
        holds(event, "event")
    assert result.events()[-1]["event"] == "summary"
    assert result.events()[-1]["exit_code"] == 1


def test_without_a_terminal_nothing_is_asked_and_nothing_started(story: Commander) -> None:
    result = story("apply", "jobs.yaml")
    assert result.code == 2
    assert "--yes" in result.err
    assert statuses(story) == {}


def test_the_question_is_answered_on_a_terminal(story: Commander) -> None:
    go(story)
    refused = story.on_terminal("apply", "jobs.yaml", typed="n\n")
    assert refused.code == 6
    assert "[y/N]" in refused.out
    assert statuses(story) == {}
    agreed = story.on_terminal("apply", "jobs.yaml", typed="y\n")
    assert agreed.code == 1
    assert statuses(story)["good"] == ("exited", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interruption_detaches_and_attach_goes_on(story: Commander, number: signal.Signals) -> None:
    process = story.start("apply", "jobs.yaml", "--yes", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    wait_for(process.stdout, b"late | ready")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert HINTS in err.decode()
    assert "Traceback" not in err.decode()
    assert statuses(story)["late"] == ("running", None)
    go(story)
    attached = story("attach")
    assert "late | gone" in attached.out
    assert statuses(story)["late"] == ("exited", 0)
    log = next((story.folder / ".gpulayer" / "runs").glob("late-*/output.log"))
    assert log.read_bytes() == b"ready\ngone\n"


def test_a_reader_that_leaves_detaches_without_a_trace(story: Commander) -> None:
    process = story.start("apply", "jobs.yaml", "--yes", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    wait_for(process.stdout, b"late | ready")
    process.stdout.close()
    go(story)
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=30) == 130
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert story("attach").code in {0, 1}
    assert statuses(story)["late"] == ("exited", 0)


def test_detach_returns_and_cancel_ends_what_runs(story: Commander) -> None:
    detached = story("apply", "jobs.yaml", "--yes", "--detach")
    assert detached.code == 0
    assert "gpulayer attach" in detached.err
    story.write("jobs.yaml", "version: 1\njobs: {")  # being edited
    cancelled = story("cancel", "late")
    assert cancelled.code == 0
    assert "late: cancelled" in cancelled.err
    assert "had ended before" not in cancelled.err
    assert cancelled.out.endswith("done: 1 cancelled\n")
    assert statuses(story)["late"] == ("cancelled", None)
    assert story("cancel").code == 2
    assert story("cancel", "--all").code == 0


def test_logs_follow_to_the_end(story: Commander) -> None:
    assert story("apply", "jobs.yaml", "--yes", "--detach").code == 0
    process = story.start("logs", "late", "-f", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    wait_for(process.stdout, b"late | ready")
    go(story)
    out, _ = process.communicate(timeout=30)
    assert out == b"late | gone\n"
    assert process.returncode == 0


def test_a_changed_document_makes_the_plan_stale(story: Commander) -> None:
    assert story("plan").code == 0
    story.write("jobs.yaml", (story.folder / "jobs.yaml").read_text(encoding="utf-8") + "# changed\n")
    result = story("apply")
    assert result.code == 5
    assert "jobs.yaml: was changed" in result.err
    assert statuses(story) == {}


def test_what_cannot_be_placed_starts_nothing_unless_partial(story: Commander) -> None:
    go(story)
    text = (story.folder / "jobs.yaml").read_text(encoding="utf-8")
    story.write("jobs.yaml", f"{text}  big: {{accelerator: cpu, resources: {{cpus: 9999}}, command: 'true'}}\n")
    result = story("apply", "jobs.yaml", "--yes")
    assert result.code == 3
    assert "nothing was started" in result.err
    assert statuses(story) == {}
    again = story("apply")
    assert again.code == 3
    assert "nothing was started: big cannot be placed\n  fix: `gpulayer plan` shows why; --partial" in again.err
    assert "ended: 1 refused, 3 not started" in again.out
    assert statuses(story) == {}
    story.write("jobs.yaml", text)  # what kept the plan from being carried out is mended: it is stale before all else
    stale = story("apply")
    assert stale.code == 5
    assert "jobs.yaml: was changed" in stale.err
    story.write("jobs.yaml", f"{text}  big: {{accelerator: cpu, resources: {{cpus: 9999}}, command: 'true'}}\n")
    partial = story("apply", "jobs.yaml", "--yes", "--partial")
    assert partial.code == 3
    assert "1 refused" in partial.out
    assert statuses(story)["good"] == ("exited", 0)


def test_failed_jobs_run_again_only_when_asked(story: Commander) -> None:
    go(story)
    assert story("apply", "jobs.yaml", "--yes").code == 1
    assert "only with --retry-failed" in story("plan").out
    again = story("apply", "--retry-failed", "--yes")
    assert again.code == 1
    assert "bad: started on here" in again.err
    assert "good: started" not in again.err
    assert "name the jobs file" in story("apply", ".gpulayer/plan.json", "--retry-failed").err


def test_secrets_are_masked_on_the_screen_and_must_be_set(story: Commander) -> None:
    story.write(
        "jobs.yaml", "version: 1\njobs:\n  leak: {accelerator: cpu, secrets: [TOKEN], command: 'echo \"<$TOKEN>\"'}\n"
    )
    unset = story("apply", "jobs.yaml", "--yes")
    assert (unset.code, unset.out) == (2, "")  # before anything connects
    assert "export TOKEN" in unset.err
    story.extra["TOKEN"] = "s3cr3t-value"  # noqa: S105 - it guards nothing
    applied = story("apply", "jobs.yaml", "--yes")
    assert applied.code == 0
    assert "leak | <***>" in applied.out
    assert "s3cr3t" not in applied.out + applied.err
    assert story("logs", "leak").out == "leak | <***>\n"


@pytest.mark.parametrize("damage", ["truncated", "random", "newer"])
def test_a_damaged_database_starts_nothing_and_names_the_way_out(story: Commander, damage: str) -> None:
    go(story)
    assert story("apply", "jobs.yaml", "--yes").code == 1
    path = story.folder / ".gpulayer" / "state.db"
    runs = sorted(folder.name for folder in (story.folder / ".gpulayer" / "runs").iterdir())
    if damage == "newer":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 999")
        database.close()
    else:
        path.write_bytes(path.read_bytes()[:6000] if damage == "truncated" else os.urandom(20_000))
    for words in (
        ["apply"],
        ["apply", "jobs.yaml", "--yes"],
        ["status"],
        ["attach"],
        ["logs", "good"],
        ["cancel", "--all"],
    ):
        result = story(*words)
        assert (result.code, "Traceback" in result.err) == (2, False), words
        assert f"mv {path} {path}." in result.err
        assert "gpulayer attach" in result.err
    path.rename(path.with_name("state.db.broken"))  # as the way out says
    assert story("attach").code == 1
    assert statuses(story) == {"good": ("exited", 0), "bad": ("exited", 3), "late": ("exited", 0)}
    assert sorted(folder.name for folder in (story.folder / ".gpulayer" / "runs").iterdir()) == runs  # none anew


def test_a_broken_plan_or_none_is_said(story: Commander) -> None:
    result = story("apply")
    assert result.code == 2
    assert "fix:" in result.err
    story("plan")
    for text, word in (('{"schema": "gpulayer.plan/1"}', "attach"), ("{", "apply"), ("", "status")):
        (story.folder / ".gpulayer" / "plan.json").write_text(text, encoding="utf-8")
        result = story(word)
        assert (result.code, result.out) == (2, "")
        assert result.err.count(".gpulayer/plan.json") == 1
        assert "make it again with `gpulayer plan`" in result.err
