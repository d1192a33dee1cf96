from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.host.agent_client import AgentClient, AgentError, new_spec

NASTY = ["'\"\\ $ ! * \n\t", "", "-n", "$(id)", "`id`", "äöü \udcff\udc80", "a\\", "%s", "{a,b}"]


def run(agent: AgentClient, command: list[str] | str, **fields: Any) -> tuple[dict[str, Any], bytes]:
    """Launch, and follow to the end."""
    secrets = fields.pop("secret_values", {})
    spec = new_spec(command, **fields)
    answer = agent.launch(spec, secrets)
    assert answer["new"] is True
    assert answer["state"]["status"] == "running"
    return agent.follow(spec["run"])


def test_a_job_runs_and_its_output_and_exit_code_come_back(agent: AgentClient) -> None:
    state, log = run(agent, "echo out; echo err >&2; exit 3")
    assert (state["status"], state["code"], state["signal"], state["reason"]) == ("exited", 3, None, None)
    assert log == b"out\nerr\n"
    assert state["log_size"] == len(log)
    assert state["started_at"] <= state["ended_at"]


def test_a_signal_is_reported_as_such(agent: AgentClient) -> None:
    state, _ = run(agent, "kill -SEGV $$")
    assert (state["status"], state["code"], state["signal"]) == ("signaled", None, 11)


def test_arguments_and_environment_arrive_byte_for_byte(agent: AgentClient) -> None:
    show = "import os, sys;sys.stdout.buffer.write(b'|'.join([*map(os.fsencode, sys.argv[1:]), os.environb[b'X']]))"
    for number, word in enumerate(NASTY):
        state, log = run(agent, ["python", "-c", show, word, *NASTY], job=f"job-{number}", env={"X": word})
        assert state["code"] == 0
        raw = [os.fsencode(item) for item in (word, *NASTY, word)]
        assert log == b"|".join(raw)


def test_a_string_stops_at_the_first_failure(agent: AgentClient) -> None:
    state, log = run(agent, "echo one\nfalse\necho two")
    assert (state["code"], log) == (1, b"one\n")


def test_python_is_the_jobs_interpreter_in_lists_and_strings(agent: AgentClient, tmp_path: Path) -> None:
    show = "import sys; print(sys.argv[1])"
    interpreter = tmp_path / "it's here" / "python3.99"
    interpreter.parent.mkdir()
    interpreter.write_text(f'#!/bin/sh\nWHICH=mine exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    python = str(interpreter)
    state, log = run(agent, ["python3", "-c", "import os; print(os.environ['WHICH'])"], job="list", python=python)
    assert (state["reason"], log) == (None, b"mine\n")
    text = f"python -c '{show}' $(python3 -c 'import os; print(os.environ[\"WHICH\"])')"
    assert run(agent, text, job="string", python=python)[1] == b"mine\n"
    assert run(agent, "command -v python", job="path", python=sys.executable)[1].decode().strip() == str(
        Path(sys.executable).parent / "python"
    )


@pytest.mark.parametrize("name", ["python", "python3"])
def test_an_interpreter_that_is_not_there_is_no_other_one(agent: AgentClient, name: str) -> None:
    state, log = run(agent, f"echo begun; {name} -c 'print(1)'", python="/no/such/python3.99")
    assert (state["status"], state["code"]) == ("exited", 127)
    assert log.startswith(b"begun\n")
    assert b"/no/such/python3.99: not found" in log.replace(b"No such file or directory", b"not found")


def test_the_environment_is_the_contracts(agent: AgentClient) -> None:
    show = ["python", "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    _, log = run(
        agent, show, env={"EPOCHS": "3", "PATH": "/mine"}, secrets=["TOKEN"], secret_values={"TOKEN": "s3cr3t"}
    )
    found = json.loads(log)
    wanted = {
        "GPULAYER_ACCELERATOR": "cpu",
        "GPULAYER_JOB": "job",
        "GPULAYER_RUN_ID": "job-kkkkkkkkkkkk-a1",
        "GPULAYER_HOST": "here",
        "GPULAYER_DEVICES": "",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "EPOCHS": "3",
        "TOKEN": "s3cr3t",
        "PATH": f"{Path(sys.executable).parent}:/mine",
        "VIRTUAL_ENV": str(Path(sys.executable).parents[1]),
    }
    assert {name: found.get(name) for name in wanted} == wanted
    _, log = run(
        agent, show, job="gpu", accelerator="cuda", devices=["GPU-b", "GPU-a"], slots=None, env={"PYTHONUNBUFFERED": ""}
    )
    found = json.loads(log)
    assert found["CUDA_VISIBLE_DEVICES"] == found["GPULAYER_DEVICES"] == "GPU-b,GPU-a"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert found["PYTHONUNBUFFERED"] == ""
    assert "HIP_VISIBLE_DEVICES" not in found


def test_variables_that_change_programs_reach_the_job_alone(agents: Callable[..., AgentClient], tmp_path: Path) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    mark = evil / "mark"
    for name in ("json", "os", "signal", "sitecustomize", "usercustomize"):
        (evil / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (evil / "rc").write_text(f"touch {mark}\n")
    given = {
        "PYTHONPATH": str(evil),
        "PYTHONSTARTUP": str(evil / "os.py"),
        "BASH_ENV": str(evil / "rc"),
        "ENV": str(evil / "rc"),
        "LD_PRELOAD": "/no/such.so",
        "DYLD_INSERT_LIBRARIES": "/no/such.dylib",
        "LD_LIBRARY_PATH": str(evil),
        "PATH": "",
    }
    # The account itself may have some of them; the agent and all that it starts for itself are deaf to them.
    agent = agents(env={"PYTHONPATH": str(evil), "BASH_ENV": str(evil / "rc"), "ENV": str(evil / "rc")})
    spec = new_spec(f"/usr/bin/env; until test -e {evil}/go; do /bin/sleep 0.02; done", env=given)
    agent.launch(spec)
    agent.wait_for(spec["run"], b"GPULAYER_JOB=job\n")
    supervisor, _ = agent.record(spec["run"])["supervisor"]
    its = Path(f"/proc/{supervisor}/environ").read_bytes().split(b"\0") if sys.platform == "linux" else []
    (evil / "go").touch()
    state, log = agent.follow(spec["run"])
    assert state["code"] == 0
    folder = Path(sys.executable).parent
    seen = dict(line.split("=", 1) for line in log.decode().splitlines() if "=" in line)
    assert {name: seen.get(name) for name in given} == {**given, "PATH": f"{folder}:{os.defpath}"}
    assert [line for line in its if b"/no/such" in line or line.startswith(b"LD_LIBRARY_PATH")] == []
    assert not mark.exists()


def test_a_job_begins_with_a_clean_slate(agents: Callable[..., AgentClient]) -> None:
    agent = agents(prelude="import signal; [signal.signal(number, signal.SIG_IGN) for number in (1, 2, 3, 15)];")
    show = (
        "import json, os, re\n"
        "status = open('/proc/self/status').read()\n"
        "ignored = [int(re.search(name + r':\\s+(\\w+)', status)[1], 16) for name in ('SigIgn', 'SigBlk')]\n"
        "os.chdir('/proc/self/fd')\n"
        "files = {name: os.readlink(name) for name in os.listdir() if os.path.exists(name)}\n"
        "own = os.getsid(0) == os.getpid() == os.getpgrp()\n"
        "print(json.dumps([ignored, files, own, open('/proc/self/oom_score_adj').read().strip()]))\n"
    )
    python = ["/bin/sh", "-c", 'exec python -c "$0"', show]  # sh, since Python ignores SIGPIPE by itself
    _, log = run(agent, python, devices=["GPU-a"], slots=None)
    (ignored, blocked), files, own, score = json.loads(log)
    # The Python that looks ignores two.
    assert named(ignored) <= {signal.SIGPIPE, signal.SIGXFSZ}
    assert blocked == 0
    assert own is True
    assert int(score) >= 500
    folder = str(agent.run_folder("job-kkkkkkkkkkkk-a1"))
    assert files.pop("0") == "/dev/null"
    assert files.pop("1") == files.pop("2") == f"{folder}/output.log"
    assert [path for path in files.values() if not path.startswith(("/proc/", str(agent.folder / "leases")))] == []
    assert any(path.endswith("device-GPU-a") for path in files.values())
    _, log = run(agent, "grep SigIgn /proc/self/status", job="sigpipe")
    assert named(int(log.split()[1], 16)) == set()


def named(signals: int) -> set[int]:
    """The signals of a mask of /proc; some are the C library's own (what make starts ignores them), nobody's to set."""
    return {number for number in signal.valid_signals() if signals >> (number - 1) & 1}


def test_secrets_are_nowhere_on_the_disk(agent: AgentClient, tmp_path: Path) -> None:
    state, _ = run(agent, "test ${#TOKEN} = 12", secrets=["TOKEN"], secret_values={"TOKEN": "s3cr3t-value"})
    assert state["code"] == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 5
    assert [path for path in files if b"s3cr3t" in path.read_bytes()] == []


def test_state_is_private(agent: AgentClient, tmp_path: Path) -> None:
    run(agent, "umask; touch made")
    run_folder = next((tmp_path / "state").glob("*/runs/*"))
    assert {
        path.stat().st_mode & 0o077 for path in (run_folder, run_folder / "spec.json", run_folder / "output.log")
    } == {0}
    assert (run_folder / "output.log").read_text().strip() == "0022"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"command": ["no-such-command"]}, "command not found: no-such-command"),
        ({"command": ["/etc/passwd"]}, "/etc/passwd cannot be executed"),
        ({"command": ["./missing"]}, "command not found: ./missing"),
        ({"command": ["python"], "python": "/no/python"}, "command not found: /no/python"),
        ({"command": "true", "setup": "echo oops; exit 7"}, "setup exited with 7"),
        ({"command": "true", "setup": "kill -9 $$"}, "setup was ended by signal 9"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_start_says_why(agent: AgentClient, fields: dict[str, Any], reason: str) -> None:
    state, log = run(agent, **fields)
    assert state["status"] == "failed_to_start"
    assert state["reason"].startswith(reason)
    assert log == (b"oops\n" if "oops" in str(fields) else b"")


def test_a_run_is_launched_once(agent: AgentClient, agents: Callable[..., AgentClient], tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    spec = new_spec(f"echo started >> {journal}; until test -e {journal}.go; do sleep 0.02; done")
    others = [agents() for _ in range(3)]
    asked = [(other, other.send("launch", b"{}", spec=spec)) for other in (agent, *others)]
    answers = [other.answer(request)[0] for other, request in asked]
    assert sorted(answer["new"] for answer in answers) == [False, False, False, True]
    assert {answer["state"]["status"] for answer in answers} == {"running"}
    Path(f"{journal}.go").touch()
    assert agent.follow(spec["run"])[0]["code"] == 0
    again = agent.launch(spec)
    assert (again["new"], again["state"]["status"]) == (False, "exited")
    assert journal.read_text() == "started\n"
    with pytest.raises(AgentError) as caught:
        agent.launch({**spec, "key": "x" * 64})
    assert caught.value.code == "conflict"


def test_a_timeout_is_kept_on_the_host(agent: AgentClient, agents: Callable[..., AgentClient]) -> None:
    spec = new_spec("echo begun; sleep 1000", timeout=0.4)
    agent.launch(spec)
    agent.close()
    state, log = agents().follow(spec["run"])
    assert (state["status"], log) == ("timed_out", b"begun\n")


@pytest.mark.parametrize("days", [1, -1])
def test_a_wall_clock_that_is_set_changes_no_limit(
    agents: Callable[..., AgentClient], tmp_path: Path, days: int
) -> None:  # fmt: skip
    """F36: limits are kept in the time since boot, which nobody sets."""
    shift = tmp_path / "shift"
    shift.write_text("0")
    agent = agents(
        prelude=f"import time; real = time.time; time.time = lambda: real() + float(open({str(shift)!r}).read());"
    )
    hasty = new_spec("echo begun; sleep 1000", job="hasty", timeout=1)
    patient = new_spec(f"echo begun; until test -e {tmp_path}/gate; do sleep 0.02; done", job="patient", timeout=1000)
    for spec in (hasty, patient):
        agent.launch(spec)
    shift.write_text(str(days * 86400))
    late, _ = agent.follow(hasty["run"])
    assert (late["status"], late["started_at"][:10] == late["ended_at"][:10]) == ("timed_out", False)
    assert (agent.status(patient["run"]) or {})["status"] == "running"
    (tmp_path / "gate").touch()
    assert agent.follow(patient["run"])[0]["status"] == "exited"


def test_a_timeout_covers_the_setup(agent: AgentClient) -> None:
    begun = time.monotonic()
    state, _ = run(agent, "true", setup="sleep 1000", timeout=0.2)
    assert state["status"] == "timed_out"
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "change",
    [
        {"command": []},
        {"command": [1]},
        {"env": {"A": 1}},
        {"secrets": ["X"]},
        {"run": "../x"},
        {"slots": None},
        {"timeout": "1"},
        {"grace": None},
        {"schema": "gpulayer.spec/2"},
    ],
    ids=str,
)
def test_a_wrong_spec_is_refused(agent: AgentClient, change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AgentError) as caught:
        agent.launch({**new_spec("true"), **change})
    assert caught.value.code == "request"
    assert list((tmp_path / "state").glob("*/runs/*")) == []
