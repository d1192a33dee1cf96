"""Numbers of processes that somebody else has by now: nothing is ever sent to them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulayer.remote import processes
from tests.host.agent_client import AgentClient, new_spec
from tests.host.test_crashes import wait_until

# Starts itself with the pid that it is told, says so, and tells every signal that it gets. Its own process, because
# the new one is a raw copy of it.
STRANGER = """
import ctypes, os, signal, struct, sys
pid = int(sys.argv[1])
number = ctypes.c_int(pid)
arguments = bytearray(struct.pack("<11Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(number), 1, 0))
raw = (ctypes.c_char * len(arguments)).from_buffer(arguments)
child = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(435), raw, ctypes.c_size_t(len(arguments)))
if child < 0:
    sys.exit(os.strerror(ctypes.get_errno()))
if child == 0:
    os.setsid()
    def tell(number, _frame):
        os.write(1, b"got %d\\n" % number)
    for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, tell)
    os.write(1, b"up\\n")
    while True:
        signal.pause()
os.waitpid(child, 0)
"""


@contextmanager
def stranger(pid: int) -> Iterator[Callable[[], bytes]]:
    """Somebody else's process with this pid; gives what it has said since it is up."""
    reading, writing = os.pipe()
    parent = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", STRANGER, str(pid)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)],
    )
    os.close(writing)
    try:
        assert os.read(reading, 3) == b"up\n"
        os.set_blocking(reading, False)

        def said() -> bytes:
            try:
                return os.read(reading, 4096)
            except BlockingIOError:
                return b""

        yield said
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(parent, 0)
        os.close(reading)


def gone(process: list[int]) -> None:
    """kill -9 of what a record names as [pid, start], and wait until its number is free."""
    processes.send(process[0], process[1], signal.SIGKILL)
    wait_until(lambda: processes.look(process[0]) is None)


@pytest.mark.parametrize("whose", ["leader", "supervisor"])
def test_a_stranger_with_the_pid_of_a_dead_process_of_a_run_gets_no_signal(
    agents: Callable[..., AgentClient], whose: str
) -> None:
    agent = agents()
    spec = new_spec("echo begun; setsid sleep 1000 & wait", key=os.urandom(32).hex())
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    record = agent.record(spec["run"])
    pid = record[whose][0]
    gone(record["supervisor"])
    if whose == "leader":
        gone(record["leader"])
    with stranger(pid) as said:
        state = agent.status(spec["run"])
        assert state is not None
        assert state["status"] in {"orphaned", "running"}  # the sleeper lives, and a caretaker is on its way
        agent.ask("cancel", run=spec["run"], grace=0.2, by="me")
        state, _ = agent.follow(spec["run"])
        end = "lost" if whose == "leader" else "cancelled"  # how the command ended nobody saw
        assert (state["status"], state["left"]["tree"]) == (end, "best_effort")
        assert said() == b""
        assert processes.start_of(pid) is not None


def test_a_signal_goes_to_the_process_that_was_meant_or_to_nobody(agent: AgentClient) -> None:
    spec = new_spec("echo $$; sleep 1000")
    agent.launch(spec)
    agent.wait_for(spec["run"], b"\n")
    pid, start = agent.record(spec["run"])["leader"]
    processes.send(pid, start, signal.SIGKILL)
    agent.follow(spec["run"])
    wait_until(lambda: processes.look(pid) is None)
    with stranger(pid) as said:
        assert processes.start_of(pid) not in {None, start}
        processes.send(pid, start, signal.SIGTERM)
        processes.send(pid, processes.start_of(pid) or 0, signal.SIGUSR2)
        wait_until(lambda: said() == b"got %d\n" % signal.SIGUSR2)


def look_around(supervisor: int) -> None:
    """Let a supervisor look at its run, and wait until it sleeps again."""

    def sleeps() -> int:
        lines = Path(f"/proc/{supervisor}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))

    before = sleeps()
    os.kill(supervisor, signal.SIGUSR1)
    wait_until(lambda: sleeps() > before)


def test_without_a_subreaper_the_number_of_a_member_that_died_is_nobodys(agents: Callable[..., AgentClient]) -> None:
    """What was seen of a run before is known by pid and start: the pid alone would make a stranger one of its members.

    The member dies, and its number is taken, between two looks of the supervisor.
    """
    agent = agents(env={"GL_FAIL": "subreaper:error:1"})
    spec = new_spec("sleep 1000 & echo $!; wait $! || sleep 1000", key=os.urandom(32).hex())
    agent.launch(spec)
    agent.wait_for(spec["run"], b"\n")
    supervisor = agent.record(spec["run"])["supervisor"][0]
    look_around(supervisor)
    pid = int((agent.run_folder(spec["run"]) / "output.log").read_text())
    start = processes.start_of(pid)
    assert start is not None
    os.kill(supervisor, signal.SIGSTOP)
    gone([pid, start])
    with stranger(pid) as said:
        os.kill(supervisor, signal.SIGCONT)
        agent.ask("cancel", run=spec["run"], grace=0.2, by="me")
        state, _ = agent.follow(spec["run"])
        assert (state["status"], state["left"]["processes"]) == ("cancelled", [])
        assert said() == b""
        assert processes.start_of(pid) is not None
