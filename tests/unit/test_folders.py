"""Where a host's state is kept: on a disk of its own, and never in two places."""

from __future__ import annotations

import fcntl
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer.remote import folders
from gpulayer.remote.wire import RequestError
from tests import sick_mount
from tests.mounts import mounted

FIRST = "Library/Application Support/gpulayer" if sys.platform == "darwin" else ".local/state/gpulayer"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home; the second candidate lies beside it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(folders, "_temporary", lambda: str(tmp_path / "second"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def frozen_home(home: Path) -> Iterator[Path]:
    """A home on a file system that takes nothing."""
    with mounted(home, "ro"):
        yield home


def chosen() -> Path:
    """The candidate in which the host's folder lies."""
    folder = Path(folders.state_folder(None))
    (folder / "runs").mkdir(exist_ok=True)
    return folder.parent


@pytest.mark.linux("a file system that is mounted for the test (tmpfs)")
def test_a_home_that_takes_nothing_is_passed_over(frozen_home: Path) -> None:
    assert chosen() == frozen_home.parent / "second"


def test_state_on_a_network_file_system_is_kept_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that other hosts mount as well: their locks would be ours."""

    def kind(path: str) -> str | None:
        return "nfs4" if path.startswith(str(home)) else None

    monkeypatch.setattr(folders, "_network_kind", kind)
    assert chosen() == home.parent / "second"
    with pytest.raises(RequestError, match=r"network file system \(nfs4\)"):
        folders.state_folder(str(home / "named"))


def test_the_folder_that_holds_the_runs_is_never_left_for_another(home: Path) -> None:
    first = chosen()
    assert first == home / FIRST
    (own,) = first.iterdir()
    own.chmod(0o755)  # something happened to it
    with pytest.raises(RequestError, match="holds the runs of this host") as caught:
        folders.state_folder(None)
    assert caught.value.code == "no_state_dir"
    own.chmod(0o700)
    assert chosen() == first


def test_state_that_lies_in_the_second_place_stays_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folders, "_network_kind", lambda path: "nfs" if path.startswith(str(home)) else None)
        second = chosen()
    assert chosen() == second  # though the first could be used by now


def test_hosts_that_share_a_home_have_a_folder_each(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for machine in ("a", "b"):
        monkeypatch.setattr(folders, "_machine", lambda machine=machine: machine * 16)
        found.add(folders.state_folder(None))
    assert {Path(folder).name for folder in found} == {"a" * 16, "b" * 16}
    assert {Path(folder).parent for folder in found} == {home / FIRST}
    assert len({folders.host_identity(folder) for folder in found}) == 2


@pytest.fixture
def sick_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose locks hang: in a file system that never answers, or, where none can be mounted, in a signal."""
    monkeypatch.setattr(folders, "_SELF_TEST_LIMIT", 0.3)
    folder = tmp_path / "sick"
    folder.mkdir(mode=0o700)
    if sick_mount.POSSIBLE:
        with sick_mount.mounted(folder):
            yield folder
    else:
        folder.chmod(0o1777)
        monkeypatch.setattr(fcntl, "flock", lambda *_: signal.pause())
        yield folder


def test_leases_are_not_kept_where_locks_hang(sick_folder: Path) -> None:
    """F45: who waits for such a lock cannot be killed. It is left behind, and the host is told why it is refused."""
    begun = time.monotonic()
    with pytest.raises(RequestError, match="locks hang there") as caught:
        folders.lease_folder(str(sick_folder))
    assert caught.value.code == "no_lease_dir"
    assert time.monotonic() - begun < 3


def test_locks_that_hang_cost_three_seconds_and_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_SELF_TEST_LIMIT", 0.2)
    monkeypatch.setattr(folders, "_try_locks", lambda _: signal.pause())
    with pytest.raises(RequestError, match="locks hang there"):
        folders.state_folder(str(home / "named"))
