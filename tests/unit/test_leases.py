from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer.remote.leases import Leases
from gpulayer.remote.wire import RequestError

ROOT = Path(__file__).parents[2]
DEVICES = ["GPU-0a", "apple:0", "MIG-1/ä.b%"]


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    tmp_path.chmod(0o1777)
    return Leases(str(tmp_path))


def free(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@contextlib.contextmanager
def running(script: str, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, once it has said that it is there."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_a_device_is_held_until_its_holder_ends(leases: Leases, tmp_path: Path) -> None:
    script = (
        "import sys; from gpulayer.remote.leases import Leases; "
        "Leases(sys.argv[1]).take_devices(sys.argv[2:], 1, 'other-run'); print('held', flush=True); sys.stdin.read()"
    )
    with running(script, tmp_path, *DEVICES):
        with pytest.raises(RequestError, match="apple:0 is held by other-run") as caught:
            leases.take_devices(["apple:0"], 1, "mine")
        assert caught.value.code == "busy"
        assert caught.value.fields == {"holder": "other-run"}
        assert leases.holders() == (dict.fromkeys(DEVICES, "other-run"), 0)
    free(leases.take_devices(DEVICES, 1, "mine"))
    assert leases.holders() == ({}, 0)


def test_all_devices_are_taken_or_none(leases: Leases) -> None:
    held = leases.take_devices(["GPU-b"], 1, "first")
    with pytest.raises(RequestError, match="GPU-b is held by first"):
        leases.take_devices(["GPU-c", "GPU-b", "GPU-a"], 1, "second")
    assert set(leases.holders()[0]) == {"GPU-b"}
    free(held)


def test_slots_are_as_many_as_the_host_has(leases: Leases) -> None:
    held = leases.take_slot(2, "one") + leases.take_slot(2, "two")
    assert leases.holders() == ({}, 2)
    with pytest.raises(RequestError, match="every CPU slot is held"):
        leases.take_slot(2, "three")
    held += leases.take_slot(3, "three")
    free(held)
    assert leases.holders() == ({}, 0)


def test_a_shared_device_has_as_many_places_as_jobs_may_share_it(leases: Leases) -> None:
    held = leases.take_devices(["GPU-a"], 2, "one") + leases.take_devices(["GPU-a"], 2, "two")
    for share in (1, 2):
        with pytest.raises(RequestError) as caught:
            leases.take_devices(["GPU-a"], share, "three")
        assert caught.value.code == "busy"
    free(held)
    held = leases.take_devices(["GPU-a"], 1, "alone")
    with pytest.raises(RequestError, match="held by alone"):
        leases.take_devices(["GPU-a"], 2, "one")
    free(held)


def test_lease_files_are_for_everybody_and_stay(leases: Leases, tmp_path: Path) -> None:
    free(leases.take_devices(["GPU-a"], 1, "one"))
    lease = tmp_path / "device-GPU-a"
    assert lease.stat().st_mode & 0o7777 == 0o444
    inode = lease.stat().st_ino
    free(leases.take_devices(["GPU-a"], 1, "two"))
    assert lease.stat().st_ino == inode


def test_a_lock_on_a_file_that_lost_its_name_does_not_count(
    leases: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = tmp_path / "device-GPU-a"
    real = fcntl.flock

    def lose_the_name(descriptor: int, kind: int) -> None:
        """The worst moment for somebody to remove the file: between opening and locking it."""
        monkeypatch.undo()
        lease.unlink()
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lose_the_name)
    held = leases.take_devices(["GPU-a"], 1, "one")
    assert os.fstat(held[0]).st_ino == lease.stat().st_ino
    with pytest.raises(RequestError, match="held by one"):
        leases.take_devices(["GPU-a"], 1, "two")
    free(held)


def test_what_is_planted_for_a_lease_is_refused(leases: Leases, tmp_path: Path) -> None:
    (tmp_path / "device-GPU-a").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        leases.take_devices(["GPU-a"], 1, "one")
    os.mkfifo(tmp_path / "device-GPU-b")
    (tmp_path / "original").touch()
    os.link(tmp_path / "original", tmp_path / "device-GPU-c")
    for device in ("GPU-b", "GPU-c"):
        with pytest.raises(RequestError, match="is no lease file"):
            leases.take_devices([device], 1, "one")


def test_asking_who_holds_what_never_makes_a_free_device_busy(
    leases: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulayer.remote.leases._PATIENCE", 10.0)  # a machine under load stops who asks for long
    free(leases.take_devices(["GPU-a"], 1, "one"))
    with running(
        "import sys; from gpulayer.remote.leases import Leases; print('asking', flush=True)\n"
        "while True: Leases(sys.argv[1]).holders()",
        tmp_path,
    ):
        for _ in range(200):
            free(leases.take_devices(["GPU-a"], 1, "one"))
    assert leases.holders() == ({}, 0)
