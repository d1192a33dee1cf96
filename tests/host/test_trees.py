"""Whatever a job turns into, nothing of it is left when it has ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer.remote import processes
from tests.cgroups import control_group
from tests.host.agent_client import AgentClient, new_spec
from tests.host.test_crashes import wait_until

# What a job may do to get away; each writes the pids of what it started to its output and lives for long.
ESCAPES = {
    "plain child": "sleep 1000 & echo $!; wait",
    "ignores TERM": "trap '' TERM; echo $$; while :; do sleep 0.1; done",
    "own session": "import os; os.setsid(); print(os.getpid(), flush=True); os.execlp('sleep', 'sleep', '1000')",
    "daemon": "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n{go}",
    "daemon without environment and files": (
        "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        "print(os.getpid(), flush=True)\nos.closerange(0, 64)\nos.execve('/bin/sleep', ['sleep', '1000'], {})"
    ),
    "daemon without environment": (
        "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
        "print(os.getpid(), flush=True)\nos.execve('/bin/sleep', ['sleep', '1000'], {})"
    ),
    "respawner": (
        "import subprocess, time\nwhile True: subprocess.Popen(['setsid', 'sleep', '1000']); time.sleep(0.005)"
    ),
    "stopped": "import os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)",
}
GO = "print(os.getpid(), flush=True)\nos.execlp('sleep', 'sleep', '1000')"


def command(name: str) -> list[str]:
    """The escape as a child of a leader that waits, so that a shell is there to hear TERM."""
    text = ESCAPES[name].replace("{go}", GO)
    if "import" in text or "os." in text:
        return ["/bin/sh", "-c", 'python3 -c "$0" & sleep 1000', f"import os\n{text}"]
    return ["/bin/sh", "-c", text]


def of_job(spec_run: str) -> set[int]:
    """The living processes that were started with the run's name in their environment."""
    return {pid for pid in processes.living() if processes.variable(pid, "GPULAYER_RUN_ID") == spec_run}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_cancel_leaves_nothing_behind(agent: AgentClient, name: str) -> None:
    spec = new_spec(command(name), key=os.urandom(32).hex())
    agent.launch(spec)
    if name == "respawner":
        give_up = time.monotonic() + 20
        while len(of_job(spec["run"])) < 10:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        written: list[int] = []
    else:
        agent.wait_for(spec["run"], b"\n")
        written = [int(word) for word in (agent.run_folder(spec["run"]) / "output.log").read_text().split()]
        assert all(processes.start_of(pid) is not None for pid in written)
    begun = time.monotonic()
    agent.ask("cancel", run=spec["run"], grace=0.3, by="me")
    state, _ = agent.follow(spec["run"])
    assert (state["status"], state["reason"]) == ("cancelled", "me")
    assert state["left"] == {"tree": "empty", "devices": {}, "processes": []}
    assert time.monotonic() - begun < 10
    assert of_job(spec["run"]) == set()
    assert [pid for pid in written if processes.start_of(pid) is not None] == []


# Many watch one, and whoever sees that it has died makes a new one and new watchers. Where no control group says how
# many there may be, a pipe holds so many permits.
HYDRA = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
permits, more = os.pipe()
os.set_blocking(permits, False)
os.write(more, b"x" * int(sys.argv[1]))

def child():
    os.read(permits, 1)
    return os.fork() == 0

while True:
    ended, alive = os.pipe()
    try:
        if child():
            time.sleep(1000)
        os.close(alive)
        for _ in range(30):
            if child():
                break
    except OSError:
        pass
    os.read(ended, 1)
    os.close(ended)
"""


def test_a_fork_bomb_is_cancelled_whole(agent: AgentClient) -> None:
    """F39: none heeds TERM, and each death that is seen brings more of them to life."""
    limits = {"pids.max": 300}
    with control_group("pids", limits, limits) as members:
        join, permits = (f"echo $$ > {members}; ", 60_000) if members else ("", 300)
        spec = new_spec(["/bin/sh", "-c", f'{join}exec python3 -c "$0" {permits}', HYDRA], key=os.urandom(32).hex())
        agent.launch(spec)
        wait_until(lambda: len(of_job(spec["run"])) > 30)
        agent.ask("cancel", run=spec["run"], grace=0.1, by="me")
        state, _ = agent.follow(spec["run"])
        assert (state["status"], state["left"]["tree"]) == ("cancelled", "empty")
        assert of_job(spec["run"]) == set()


@pytest.mark.parametrize(
    "name", ["plain child", "ignores TERM", "own session", "daemon", "daemon without environment", "stopped"]
)
def test_without_a_subreaper_all_that_left_a_trace_is_found(agents: Callable[..., AgentClient], name: str) -> None:
    """As on macOS: what has cleared its environment and closed its files besides cannot be found."""
    agent = agents(env={"GL_FAIL": "subreaper:error:1"})
    spec = new_spec(command(name), key=os.urandom(32).hex())
    agent.launch(spec)
    agent.wait_for(spec["run"], b"\n")
    written = [int(word) for word in (agent.run_folder(spec["run"]) / "output.log").read_text().split()]
    agent.ask("cancel", run=spec["run"], grace=0.3, by="me")
    state, _ = agent.follow(spec["run"])
    assert (state["status"], state["left"]["tree"]) == ("cancelled", "best_effort")
    assert of_job(spec["run"]) == set()
    assert [pid for pid in written if processes.start_of(pid) is not None] == []


@pytest.mark.parametrize("then", ["while :; do sleep 0.05; done", "kill -STOP $$"], ids=["busy", "stopped"])
def test_term_comes_first_and_the_grace_is_kept(agent: AgentClient, then: str) -> None:
    spec = new_spec(f"trap 'echo saving; sleep 0.3; echo saved; exit 0' TERM; echo begun; {then}")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    agent.ask("cancel", run=spec["run"], grace=10, by="me")
    state, log = agent.follow(spec["run"])
    assert state["status"] == "cancelled"
    assert log.endswith(b"saving\nsaved\n")


def test_a_run_that_is_being_stopped_says_so_and_a_second_cancel_changes_nothing(agent: AgentClient) -> None:
    spec = new_spec("trap '' TERM; echo begun; while :; do sleep 0.05; done")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    frames = agent.frames(agent.send("follow", run=spec["run"], offset=0, tail=None))
    states = [next(frames)[0]["state"]]
    agent.ask("cancel", run=spec["run"], grace=0.5, by="first")
    agent.ask("cancel", run=spec["run"], grace=100, by="second")
    states += [header["state"] for header, _ in frames if "state" in header]
    assert [state["status"] for state in states] == ["running", "stopping", "cancelled"]
    assert states[-1]["reason"] == "first"
    assert agent.ask("cancel", run=spec["run"], grace=None, by="late")[0]["state"]["status"] == "cancelled"


def test_what_a_leader_leaves_behind_is_drained_and_its_late_words_are_kept(agent: AgentClient) -> None:
    spec = new_spec("(sleep 0.3; echo late) & echo first")
    agent.launch(spec)
    state, log = agent.follow(spec["run"])
    assert (state["status"], state["code"]) == ("exited", 0)
    assert log == b"first\nlate\n"


def test_what_a_leader_leaves_behind_for_good_is_killed(agent: AgentClient, tmp_path: Path) -> None:
    spec = new_spec(f"setsid sleep 1000 & echo $! > {tmp_path}/pid; exit 3")
    begun = time.monotonic()
    agent.launch(spec)
    state, _ = agent.follow(spec["run"])
    assert (state["status"], state["code"]) == ("exited", 3)
    assert 4 < time.monotonic() - begun < 15
    assert processes.start_of(int((tmp_path / "pid").read_text())) is None


def test_a_signal_never_reaches_a_process_that_took_over_a_pid(agent: AgentClient) -> None:
    spec = new_spec("trap 'echo wrong' USR1; trap 'exit 7' USR2; echo $$; while :; do sleep 0.02; done")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"\n")
    pid = int((agent.run_folder(spec["run"]) / "output.log").read_text())
    start = processes.start_of(pid)
    assert start is not None
    processes.send(pid, start - 1, signal.SIGUSR1)
    processes.send(pid, start, signal.SIGUSR2)
    state, log = agent.follow(spec["run"])
    assert (state["code"], log) == (7, b"%d\n" % pid)
