"""The oracle itself: each property of `check` and `check_nothing_is_left` is seen to fail on a story that breaks it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpulayer.fleet.transport import ConnectOptions
from gpulayer.remote import states
from gpulayer.run.store import Store
from gpulayer.run.work import queued
from gpulayer.spec.inventory import Host
from tests.faults.hosts import PoweredHost, wait_until
from tests.faults.oracle import check, check_nothing_is_left, most_connections
from tests.run.project import Project
from tests.sshd import ADDRESS, SshdHost

RUN = queued("a", "0" * 64, 1).run
OTHER = queued("b", "1" * 64, 1).run
TRUE = f"start {RUN} 7 1.00 GPU-1\nend {RUN} 0 2.00 GPU-1\n"
SUCCESS = {"status": states.EXITED, "code": 0}


@dataclass(kw_only=True)
class Story:
    """What one host, its jobs and one controller say of a run. As it begins, all of it is true."""

    project: Project
    host: PoweredHost

    @property
    def state(self) -> Path:
        return self.host.home / "state" / "runs" / RUN

    def journal(self, text: str) -> None:
        (self.host.home / "journal").write_text(text)

    def record(self, **state: object) -> None:
        (self.state / "exit.json").write_text(json.dumps({"state": state}))

    def log(self, *, there: bytes, here: bytes) -> None:
        (self.state / "output.log").write_bytes(there)
        path = self.project.paths.log(RUN)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(here)

    def verdict(self, **fields: object) -> None:
        """What the controller believes of the run, whose log it has."""
        run = replace(queued("a", "0" * 64, 1), host="a", **{"status": states.RUNNING, **fields})  # type: ignore[arg-type]
        self.project.paths.database.unlink(missing_ok=True)
        with Store.open(self.project.folder) as store:
            store.take(self.project.name, [run])
            store.collect(RUN)

    def check(self) -> None:
        check([self.project], [self.host])


@pytest.fixture
def story(tmp_path: Path) -> Story:
    home = tmp_path / "home"
    (tmp_path / "leases").mkdir()
    host = PoweredHost(
        host=Host(name="a", lease_dir=str(tmp_path / "leases")),
        home=home, host_key=tmp_path, log=tmp_path / "log", config=tmp_path,
    )  # fmt: skip
    folder = tmp_path / "project"
    folder.mkdir()
    story = Story(
        project=Project(folder=folder, hosts={"a": host}, options=ConnectOptions(known_hosts=()), extra={}), host=host
    )
    story.state.mkdir(parents=True)
    (story.state / "lock").touch()
    story.journal(TRUE)
    story.record(**SUCCESS)
    story.log(there=b"said\n", here=b"said\n")
    story.verdict(**SUCCESS)
    return story


def test_a_true_story_holds(story: Story) -> None:
    story.check()
    check_nothing_is_left([story.host])


def verdict(journal: str, **fields: object) -> Callable[[Story], None]:
    """A controller that believes something else than what the job has written."""

    def tell(story: Story) -> None:
        story.journal(journal)
        story.verdict(**fields)

    return tell


STARTED = TRUE.splitlines(keepends=True)[0]
LIES: dict[str, Callable[[Story], None]] = {
    "(a) it was started twice": lambda story: story.journal(TRUE + STARTED),
    "(b) two held a device, as they tell": lambda story: story.journal(
        STARTED + f"start {OTHER} 8 1.50 GPU-1\nend {RUN} 0 2.00 GPU-1\nend {OTHER} 0 2.50 GPU-1\n"
    ),
    "(b) two held a device, as its witness tells": lambda story: story.journal(TRUE + f"overlap {OTHER} GPU-1\n"),
    "(c) it ended with another code": lambda story: story.journal(TRUE.replace("0 2.00", "3 2.00")),
    "(c) it never ended": lambda story: story.journal(STARTED),
    "(c) what ended by a signal never started": verdict("", status=states.SIGNALED, signal=9),
    "(c) what was timed out never started": verdict("", status=states.TIMED_OUT),
    "(c) what failed to start ran": verdict(STARTED, status=states.FAILED_TO_START),
    "(c) what never started ran": verdict(STARTED, status=states.LOST, reason="never_started"),
    "(c) what waits ran": verdict(STARTED, status=states.QUEUED),
    "(e) a byte is missing": lambda story: story.log(there=b"said\n", here=b"said"),
    "(e) a byte came twice": lambda story: story.log(there=b"said\n", here=b"ssaid\n"),
    "(f) no host has written that it succeeded": lambda story: (story.state / "exit.json").unlink(),
    "(f) its host has written another code": lambda story: story.record(status=states.EXITED, code=1),
    "(f) its host has written another end": lambda story: story.record(status=states.CANCELLED, code=0),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_found(story: Story, name: str) -> None:
    LIES[name](story)
    with pytest.raises(AssertionError):
        story.check()


@pytest.mark.parametrize("run", [RUN, OTHER])
def test_what_is_unknown_is_no_lie(story: Story, run: str) -> None:
    """The controller could not ask: whether it ran or not, nothing false is said."""
    story.journal(STARTED.replace(RUN, run))
    story.verdict(status=states.UNKNOWN)
    story.check()


@pytest.mark.parametrize("place", ["run", "device", "slot"])
def test_a_lock_that_is_left_is_found(story: Story, place: str) -> None:
    """(d): some descriptor holds it, whoever has that."""
    leases = Path(story.host.host.lease_dir or "")
    path = {"run": story.state / "lock", "device": leases / "device-GPU-1", "slot": leases / "slot-0"}[place]
    with subprocess.Popen(["flock", path, "-c", "echo held; read _"], stdin=-1, stdout=-1) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AssertionError):
            check_nothing_is_left([story.host])
        holder.communicate(b"\n")
    check_nothing_is_left([story.host])


def test_a_process_that_is_left_is_found(story: Story) -> None:
    """(d): whatever its session, what a host's sshd has started has its home."""
    command = ["setsid", "sh", "-c", "echo up; read _"]
    environment = {"HOME": str(story.host.home), "PATH": os.environ["PATH"]}
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1) as left:
        assert left.stdout is not None
        assert left.stdout.readline() == b"up\n"
        with pytest.raises(AssertionError):
            check_nothing_is_left([story.host], limit=0.1)
        left.communicate(b"\n")
    check_nothing_is_left([story.host])


def test_connections_that_are_open_at_once_are_counted(sshd_host: Callable[..., SshdHost]) -> None:
    """One after the other is one; a third beside two is three, and a thousand jobs may have two."""
    host = sshd_host("counted")

    def ends() -> int:
        return len(re.findall(rf"^Connection (?:closed|reset) by {ADDRESS}", host.journal(), re.MULTILINE))

    for nth in range(2):
        with socket.create_connection((ADDRESS, host.port)) as one:
            assert one.recv(4) == b"SSH-"
        wait_until(lambda nth=nth: ends() == nth + 1)  # type: ignore[misc]
    assert most_connections(host.journal()) == 1
    with ExitStack() as opened:
        for _ in range(3):
            one = opened.enter_context(socket.create_connection((ADDRESS, host.port)))
            assert one.recv(4) == b"SSH-"
    assert most_connections(host.journal()) == 3
