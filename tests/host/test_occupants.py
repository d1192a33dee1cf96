"""Processes of others on a GPU: seen before a launch, during the run and after it, and never touched.

The driver is a stand-in nvidia-smi; the processes that it names are real.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.host.agent_client import AgentClient, AgentError, new_spec
from tests.host.test_crashes import wait_until
from tests.machines import H200_IDS, write_nvidia_smi, write_program

FIRST, SECOND = H200_IDS


@pytest.fixture
def apps(tmp_path: Path) -> Path:
    """What the stand-in driver lists: lines of UUID, pid, MiB."""
    write_nvidia_smi(tmp_path / "driver" / "nvidia-smi")
    return tmp_path / "driver" / "apps.csv"


@pytest.fixture
def cuda(agents: Callable[..., AgentClient], apps: Path) -> AgentClient:
    return agents(env={"PATH": f"{apps.parent}:/usr/bin:/bin"})


@contextmanager
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that GPUlayer did not start."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


def gpu_job(command: str, *devices: str, **fields: Any) -> dict[str, Any]:
    return new_spec(command, accelerator="cuda", devices=list(devices), slots=None, **fields)


def computing(apps: Path, device: str, megabytes: int = 2048) -> str:
    """A command after which the driver names the job's shell as a process on `device`."""
    return f'echo "{device}, $$, {megabytes}" >> {apps}'


def holders(agent: AgentClient) -> dict[str, str]:
    found: dict[str, str] = agent.ask("survey", project="tests", after=None)[0]["holders"]
    return found


def test_a_device_that_others_use_is_busy_and_they_are_named(cuda: AgentClient, apps: Path) -> None:
    with stranger() as process:
        apps.write_text(f"{FIRST}, {process.pid}, 5325\n")
        assert holders(cuda).keys() == {FIRST}
        holder = holders(cuda)[FIRST]
        assert holder.startswith(f"process {process.pid} (sleep, user ")
        assert holder.endswith(", 5.2 GiB)")
        for devices in ([FIRST], [SECOND, FIRST]):
            with pytest.raises(AgentError) as caught:
                cuda.launch(gpu_job("true", *devices))
            assert (caught.value.code, caught.value.error["holder"]) == ("busy", holder)
        assert holders(cuda).keys() == {FIRST}  # the lease of the second device was given back
        assert process.poll() is None
    # The driver still lists it for a moment; it is dead, so nobody is there.
    assert holders(cuda) == {}
    assert cuda.launch(gpu_job("true", FIRST))["new"] is True


def test_a_probe_that_tries_a_device_at_this_moment_does_not_hold_it(cuda: AgentClient, apps: Path) -> None:
    python, asked = apps.with_name("python"), apps.with_name("asked")
    os.mkfifo(asked)
    write_program(python, f"#!/bin/sh\necho '{FIRST}, '$$', 512' > {apps}; read line < {asked}")
    probe = cuda.send("probe", python=str(python), frameworks=[], fresh=True)
    wait_until(apps.exists)
    wait_until(lambda: FIRST in apps.read_text())
    assert holders(cuda) == {}
    assert cuda.launch(gpu_job("true", FIRST))["new"] is True
    asked.write_text("go on\n")
    cuda.answer(probe)


def test_a_leased_device_is_held_by_its_run_and_its_own_processes_are_no_strangers(
    cuda: AgentClient, apps: Path
) -> None:  # fmt: skip
    spec = gpu_job(f"{computing(apps, FIRST)}; echo begun; sleep 1.5; : > {apps}", FIRST)
    cuda.launch(spec)
    cuda.wait_for(spec["run"], b"begun")
    assert holders(cuda) == {FIRST: spec["run"]}
    state, _ = cuda.follow(spec["run"])
    assert state["foreign_process"] == []
    assert state["left"] == {"tree": "empty", "devices": {FIRST: "free"}, "processes": []}


def counting(apps: Path) -> Path:
    """Let the stand-in driver note each time that it is asked for processes, a line each."""
    tool, asked = apps.with_name("nvidia-smi"), apps.with_name("asked")
    real = tool.rename(tool.with_name("nvidia-smi.real"))
    write_program(tool, f'#!/bin/sh\ncase "$*" in *apps*) echo >> {asked};; esac\nexec {real} "$@"\n')
    return asked


def test_a_member_of_the_run_is_no_stranger_even_where_it_has_cleared_its_environment(
    cuda: AgentClient, apps: Path
) -> None:  # fmt: skip
    """What the supervisor sees as its own needs no name. When it looks again it has judged what it saw first."""
    asked = counting(apps)
    member = f'env -i setsid sleep 1000 & echo "{FIRST}, $!, 100" >> {apps}'
    looks = f"before=$(wc -l < {asked}); until test $(wc -l < {asked}) -ge $((before + 2)); do sleep 0.05; done"
    spec = gpu_job(f"{member}; {looks}; kill $!; : > {apps}", FIRST)
    cuda.launch(spec)
    assert cuda.follow(spec["run"])[0]["foreign_process"] == []


def test_a_stranger_that_comes_during_the_run_is_in_its_record_and_is_left_alone(cuda: AgentClient, apps: Path) -> None:
    spec = gpu_job("echo begun; sleep 1000", FIRST)
    cuda.launch(spec)
    cuda.wait_for(spec["run"], b"begun")
    with stranger() as process:
        apps.write_text(f"{FIRST}, {process.pid}, 700\n")
        frames = cuda.frames(cuda.send("follow", run=spec["run"], offset=0, tail=None))
        seen = next(state for header, _ in frames if (state := header.get("state")) and state["foreign_process"])
        assert seen["status"] == "running"
        (found,) = seen["foreign_process"]
        assert (found["device"], found["pid"], found["name"]) == (FIRST, process.pid, "sleep")
        assert found["memory_bytes"] == 700 << 20
        cuda.ask("cancel", run=spec["run"], grace=1, by="me")
        *_, (last, _) = frames
        assert last["state"]["status"] == "cancelled"
        assert last["state"]["foreign_process"] == [found]
        assert last["state"]["left"] == {"tree": "empty", "devices": {FIRST: "free"}, "processes": [found]}
        assert process.poll() is None


def test_a_cancel_says_who_still_holds_the_device(cuda: AgentClient, apps: Path) -> None:
    """Somebody outside of the tree holds its memory: a container's process, say."""
    spec = gpu_job("echo begun; sleep 1000", FIRST)
    cuda.launch(spec)
    cuda.wait_for(spec["run"], b"begun")
    with stranger() as process:
        cuda.ask("cancel", run=spec["run"], grace=5, by="me")
        apps.write_text(f"{FIRST}, {process.pid}, 23000\n")
        left = cuda.follow(spec["run"])[0]["left"]
        assert left["tree"] == "empty"
        assert left["devices"] == {FIRST: "held"}
        assert [(found["pid"], found["device"]) for found in left["processes"]] == [(process.pid, FIRST)]
        assert process.poll() is None
        assert holders(cuda).keys() == {FIRST}


def test_memory_that_does_not_come_back_is_held_by_an_unknown(cuda: AgentClient, apps: Path) -> None:
    query = apps.with_name("query.csv")
    spec = gpu_job(f"sed -i 's/143156 MiB/120000 MiB/' {query}; {computing(apps, SECOND)}", SECOND)
    cuda.launch(spec)
    wait_until(lambda: "120000" in query.read_text() and apps.exists())
    state, _ = cuda.follow(spec["run"])
    assert (state["status"], state["code"]) == ("exited", 0)
    assert state["left"] == {"tree": "empty", "devices": {SECOND: "held"}, "processes": []}


def test_memory_that_a_known_stranger_has_is_not_missed(cuda: AgentClient, apps: Path) -> None:
    """It came during the run and has taken what the device lacks at the end: the run has given all of its own back."""
    query = apps.with_name("query.csv")
    spec = gpu_job("echo begun; sleep 1000", FIRST)
    cuda.launch(spec)
    cuda.wait_for(spec["run"], b"begun")
    with stranger() as process:
        apps.write_text(f"{FIRST}, {process.pid}, 23156\n")
        query.write_text(query.read_text().replace("143156 MiB", "120000 MiB"))
        wait_until(lambda: bool((cuda.status(spec["run"]) or {})["foreign_process"]))
        cuda.ask("cancel", run=spec["run"], grace=1, by="me")
        left = cuda.follow(spec["run"])[0]["left"]
        assert left["devices"] == {FIRST: "free"}
        assert [found["pid"] for found in left["processes"]] == [process.pid]


def test_what_a_driver_does_not_tell_is_unknown(agent: AgentClient) -> None:
    spec = new_spec("true", accelerator="mps", devices=["apple:0"], slots=None)
    agent.launch(spec)
    state, _ = agent.follow(spec["run"])
    assert state["foreign_process"] is None
    assert state["left"] == {"tree": "empty", "devices": {"apple:0": "unknown"}, "processes": []}
