"""How events look to a person, and that no text of a host or job reaches a terminal raw."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gpulayer.cli.live import Live
from gpulayer.cli.screen import Screen
from gpulayer.errors import ExitCode
from gpulayer.run.events import Event

EVIL = "\x1b]0;pwn\x07\u202e\nother: exited 0\n::set-env name=X::1"
OTHER = {"pid": 1, "name": EVIL, "user": EVIL, "memory_bytes": None, "device": "x"}


def event(
    word: str, *, job: str | None = "train", host: str | None = "h200", data: bytes = b"", **detail: Any
) -> Event:
    run = f"{job}-000000000000-a1" if job else None
    return Event(event=word, at="2026-01-01T00:00:00Z", job=job, run=run, host=host, data=data, detail=detail)


STORY = [
    event("launching", devices=["GPU-1"], attempt=1),
    event("synced", job=None, files=3, bytes=3000, sent_files=1, sent_bytes=1000),
    event("launched", new=True),
    event("running", devices=["GPU-1"]),
    event("output", offset=0, data=b"one\ntw"),
    event("link_lost", job=None, error="h200: connect: no answer"),
    event("link_back", job=None),
    event("output", offset=6, data=b"o\n::error::x\nlast"),
    event("exited", code=3),
    event("fetched", files=2, bytes=2**21, skipped=[["a\x1b", "is a link"]], path=".gpulayer/runs/x/outputs"),
    event("queued", job="flaky", host=None, attempt=2, last_attempt=3),
    event("queued", job="eval", host=None, reason="h200 is busy: somebody"),
    event("signaled", job="eval", signal=9),
    event("exited", job="old", code=0, up_to_date=True),
    event("warning", job=None, message="disk is nearly full", fix="free space"),
    event("summary", job=None, host=None, counts={"failed": 2, "up_to_date": 1}, exit_code=1),
]


def tell(
    story: list[Event], capfd: pytest.CaptureFixture[str], *, machine: bool = False, cancelling: bool = False
) -> tuple[str, str, ExitCode]:
    screen = Screen(machine=machine, color=False)
    screen.hide(["hunter22", "line-one\nline-two"])
    live = Live(screen, cancelling=cancelling)
    for moment in story:
        live.show(moment)
    live.end()
    out, err = capfd.readouterr()
    return out, err, live.exit_code


def test_a_story_reads_well(capfd: pytest.CaptureFixture[str]) -> None:
    out, err, code = tell(STORY, capfd)
    assert code == ExitCode.JOB_FAILED
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[:4] == ["train | one", "train | two", "train | ::error::x", "train | last"]
    assert lines[5:] == [
        "JOB    HOST  END",
        "train  h200  exited 3",
        "eval   h200  killed by SIGKILL, probably for memory",
        "ended: 2 failed, 1 up to date",
    ]
    assert err.splitlines() == [
        "h200: code is there: 3 files, 2.9 KiB; sent: 1 file, 1000 B",
        "train: started on h200 (GPU-1)",
        "h200: connect: no answer",
        "  the jobs there go on; trying again",
        "h200: is back",
        "train: exited 3",
        "train: fetched 2 files, 2 MiB, into .gpulayer/runs/x/outputs",
        "train: not fetched: a\\x1b: is a link",
        "flaky: is tried again (2 of 3)",
        "eval: queued (h200 is busy: somebody)",
        "eval: killed by SIGKILL, probably for memory",
        "h200: disk is nearly full",
        "  fix: free space",
    ]


def test_a_cancelled_job_is_no_failure_of_who_cancels(capfd: pytest.CaptureFixture[str]) -> None:
    story = [event("cancelled"), event("summary", job=None, host=None, counts={"cancelled": 1}, exit_code=1)]
    assert tell(story, capfd, cancelling=True) == ("done: 1 cancelled\n", "train: cancelled\n", ExitCode.OK)
    out, _, code = tell(story, capfd)
    assert "ended: 1 cancelled" in out
    assert code == ExitCode.JOB_FAILED
    out, _, code = tell(story, capfd, machine=True, cancelling=True)
    assert (json.loads(out.splitlines()[-1])["exit_code"], code) == (0, ExitCode.OK)


def test_nothing_to_do_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    out, _, _ = tell([event("summary", job=None, host=None, counts={}, exit_code=0)], capfd)
    assert out == "done: nothing runs or waits\n"


def test_what_a_host_refuses_is_told_with_what_to_do_about_it(capfd: pytest.CaptureFixture[str]) -> None:
    _, err, _ = tell([event("failed_to_start", reason="h200: no way", fix="make one")], capfd)
    assert err == "train: failed to start (h200: no way)\n  fix: make one\n"


def test_what_goes_on_has_not_ended(capfd: pytest.CaptureFixture[str]) -> None:
    summary = event("summary", job=None, host=None, counts={"unreachable": 1, "running": 1}, exit_code=4)
    assert tell([summary], capfd)[0] == "so far: 1 unreachable, 1 running\n"


def test_json_is_one_object_a_line_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    out, err, _ = tell(STORY, capfd, machine=True)
    assert [json.loads(line)["event"] for line in out.splitlines()] == [moment.event for moment in STORY]
    assert err == ""


@pytest.mark.parametrize("machine", [False, True])
def test_text_of_others_is_escaped_everywhere(capfd: pytest.CaptureFixture[str], machine: bool) -> None:
    story = [
        event("launching", devices=[EVIL]),
        event("launched", new=True),
        event("output", offset=0, data=EVIL.encode() + b"\x9b\n"),
        event("foreign_process", processes=[OTHER]),
        event("link_lost", job=None, error=EVIL),
        event("failed_to_start", reason=EVIL, fix=EVIL),
        event("fetched", files=1, bytes=1, skipped=[[EVIL, EVIL]], path=EVIL),
        event("warning", message=EVIL, fix=EVIL),
        event("summary", job=None, counts={"failed": 1}, exit_code=1),
    ]
    out, err, _ = tell(story, capfd, machine=machine)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    assert "pwn" in out
    assert not re.search("^(other|::)", out + err, re.MULTILINE)


def test_secrets_are_masked_in_what_people_see(capfd: pytest.CaptureFixture[str]) -> None:
    told = "line-two, hunter22"
    story = [
        event("output", offset=0, data=b"key hunter22\n"),
        event("link_lost", job=None, error=told),
        event("warning", message=told, fix=told),
        event("fetched", files=1, bytes=1, skipped=[[told, told]], path=told),
        event("failed_to_start", reason=told),
        event("summary", job=None, host=None, counts={"failed": 1}, exit_code=1),
    ]
    out, err, _ = tell(story, capfd)
    assert out.startswith("train | key ***\n")
    assert out.count("***, ***") == 1
    assert err.count("***, ***") == 7
    for shown in (out + err, tell(story, capfd, machine=True)[0]):
        assert "hunter22" not in shown
        assert "line-two" not in shown


def test_a_secret_that_is_a_word_changes_none_that_programs_go_by(capfd: pytest.CaptureFixture[str]) -> None:
    screen = Screen(machine=True, color=False)
    screen.hide(["exited", "train", "h200"])
    Live(screen).show(event("exited", code=0, reason="train exited"))
    told = json.loads(capfd.readouterr().out)
    assert (told["event"], told["job"], told["host"]) == ("exited", "train", "h200")
    assert told["reason"] == "*** ***"


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_secret_in_json_is_masked_wherever_its_bytes_are_cut(capfd: pytest.CaptureFixture[str], cut: int) -> None:
    data = b"a hunter22, line-one\nline-two hunt"
    pieces = [data[start : start + cut] for start in range(0, len(data), cut)]
    story = [event("output", offset=nth * cut, data=piece) for nth, piece in enumerate(pieces)]
    out, _, _ = tell([*story, event("exited", code=0)], capfd, machine=True)
    shown = [json.loads(line) for line in out.splitlines()]
    text = ""
    for one in shown[:-1]:
        assert one["offset"] == len(text)
        text += one["text"]
    assert text == "a ********, ***************** hunt"
    assert shown[-1]["event"] == "exited"
