"""A disk that is full, or takes nothing for a while: no launch is half done, and no end is lost."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulayer.remote.wire import refusal
from tests.host.agent_client import AgentClient, AgentError, new_spec
from tests.host.test_crashes import supervisor_has_ended, wait_until
from tests.mounts import mounted, read_only

Agents = Callable[..., AgentClient]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The host's state lies on a file system of 2 MiB and 200 files."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    with mounted(state, "size=2m,nr_inodes=200,mode=700"):
        yield state


def fill(disk: Path) -> Path:
    """Fill the disk to the last byte, and return the file that does."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    break
    return filler


def fill_names(disk: Path) -> Path:
    """Use up the disk's last file, and return the folder that holds them."""
    folder = disk / "files"
    folder.mkdir()
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (folder / str(number)).touch()
    return folder


@pytest.mark.parametrize("exhaust", [fill, fill_names])
def test_a_launch_on_a_full_disk_is_refused_and_its_id_stays_free(
    small_disk: Path, agent: AgentClient, exhaust: Callable[[Path], Path]
) -> None:
    spec = new_spec("echo ran")
    filler = exhaust(small_disk)
    with pytest.raises(AgentError) as caught:
        agent.launch(spec)
    assert caught.value.code == "disk"
    shutil.rmtree(filler) if filler.is_dir() else filler.unlink()
    assert agent.launch(spec)["new"] is True
    state, log = agent.follow(spec["run"])
    assert (state["code"], log) == (0, b"ran\n")
    assert not (agent.run_folder(spec["run"]) / "reserve").exists()


def test_a_disk_that_takes_nothing_any_more_refuses_launches_and_still_tells_of_runs(
    small_disk: Path, agent: AgentClient
) -> None:
    """F30: mounted anew for reading alone, as ext4 does with itself after an error."""
    before, later = new_spec("echo before", job="before"), new_spec("echo later", job="later")
    agent.launch(before)
    end, _ = agent.follow(before["run"])
    supervisor_has_ended(agent, before["run"])
    with read_only(small_disk):
        with pytest.raises(AgentError, match="Read-only file system") as caught:
            agent.launch(later)
        assert caught.value.code == "system"
        assert agent.status(later["run"]) is None
        assert agent.follow(before["run"]) == (end, b"before\n")
    assert agent.launch(later)["new"] is True
    assert agent.follow(later["run"])[1] == b"later\n"


def test_a_job_runs_where_the_disk_executes_nothing(tmp_path: Path, agents: Agents) -> None:
    """F44: neither agent nor supervisor is a file there."""
    (tmp_path / "state").mkdir(mode=0o700)
    with mounted(tmp_path / "state", "noexec,mode=700"):
        agent = agents()
        spec = new_spec("python3 -c 'print(6 * 7)'")
        agent.launch(spec)
        state, log = agent.follow(spec["run"])
        assert (state["code"], log) == (0, b"42\n")
        supervisor_has_ended(agent, spec["run"])
        agent.close()


def test_a_quota_that_is_used_up_is_a_full_disk() -> None:
    assert refusal(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))).code == "disk"


@pytest.mark.parametrize(
    "command",
    [
        "cat /dev/zero",
        "cat /dev/zero > file",
        "n=0; while : > file-$n; do n=$((n + 1)); done",
    ],
    ids=["its log", "its files", "many files"],
)
def test_the_end_of_a_job_that_fills_the_disk_is_recorded(
    small_disk: Path, agent: AgentClient, command: str
) -> None:  # fmt: skip
    # Its record is larger than what a file system gives back for a small file: it needs the whole reserve.
    outputs = [f"{'x' * 200}/{number}" for number in range(100)]
    spec = new_spec(f"set +e\n({command}) 2>/dev/null\nexit 7", outputs=outputs)
    agent.launch(spec)
    state, _ = agent.follow(spec["run"])
    assert (state["status"], state["code"]) == ("exited", 7)
    assert small_disk.is_mount()


def test_a_job_that_keeps_the_disk_full_can_be_cancelled(small_disk: Path, agent: AgentClient) -> None:
    spec = new_spec("echo begun\nset +e\nwhile :; do cat /dev/zero >> file; done 2>/dev/null", grace=1)
    agent.launch(spec)
    agent.wait_for(spec["run"], b"begun")
    wait_until(lambda: os.statvfs(small_disk).f_bfree == 0)
    agent.ask("cancel", run=spec["run"], grace=None, by="me")
    state, _ = agent.follow(spec["run"])
    assert state["status"] == "cancelled"
    assert state["reason"] in {"me", "cancelled on a full disk"}


def test_a_disk_that_fills_after_the_intent_fails_the_start_and_says_so(small_disk: Path, agents: Agents) -> None:
    """The pid of the job cannot be written down: then it must not run."""
    ran = small_disk.parent / "ran"
    agent = agents(env={"GL_FAIL": "leader-forked:stop:1"})
    spec = new_spec(f"touch {ran}")
    request = agent.send("launch", b"{}", spec=spec)
    wait_until(lambda: any(small_disk.glob("*/runs/*/state.json")))
    pid = agent.record(spec["run"])["supervisor"][0]
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    fill(small_disk)
    os.kill(pid, 18)
    state = agent.answer(request)[0]["state"]
    assert (state["status"], ran.exists()) == ("failed_to_start", False)
    assert "No space left" in state["reason"]


def test_an_end_that_the_disk_does_not_take_is_written_later(agents: Agents) -> None:
    agent = agents(env={"GL_FAIL": "exit-due:error:1"})
    spec = new_spec("exit 5")
    agent.launch(spec)
    state, _ = agent.follow(spec["run"])
    assert (state["status"], state["code"]) == ("exited", 5)
