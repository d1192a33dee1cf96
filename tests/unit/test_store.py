"""The local database: durable intents, no verdict lost, never silently made anew."""

import os
import sqlite3
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpulayer.errors import StateError, UsageError
from gpulayer.placement.plan import KnownRun
from gpulayer.run.events import Event, now, status_event
from gpulayer.run.paths import Paths, find_folder, put_aside, write_private
from gpulayer.run.store import Intent, Store


def queued(job: str, attempt: int = 1) -> KnownRun:
    return KnownRun(run=f"{job}-0123456789ab-a{attempt}", job=job, key="0123456789ab", attempt=attempt, host="",
                    status="queued")  # fmt: skip


def intent(run: KnownRun, host: str = "alpha") -> Intent:
    there = replace(run, host=host, devices=("GPU-1",), status="launching")
    return Intent(run=there, specs=({"run": run.run, "command": ["true"]},))


def becomes(run: KnownRun, status: str, code: int | None = None) -> KnownRun:
    return KnownRun(run=run.run, job=run.job, key=run.key, attempt=run.attempt, host="alpha", status=status, code=code)


def test_folder_and_files_are_for_this_user_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with Store.open(tmp_path) as store:
            store.take("p", [queued("a")])
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in store.paths.root.iterdir()}
            assert stat.S_IMODE(store.paths.root.stat().st_mode) == 0o700
    finally:
        os.umask(old)
    assert modes == dict.fromkeys(("state.db", "state.db-wal", "state.db-shm", "state.db.lock"), 0o600)


def test_an_intent_survives_and_is_given_once(tmp_path: Path) -> None:
    run = queued("a")
    with Store.open(tmp_path) as store:
        store.take("p", [run])
        assert store.intend([intent(run)]) == {run.run}
        assert store.intend([intent(run, "beta")]) == set()
    with Store.open(tmp_path) as store:
        found = store.run(run.run)
        assert found is not None
        assert (found.status, found.host, found.devices) == ("launching", "alpha", ("GPU-1",))
        assert store.spec(run.run) == {"run": run.run, "command": ["true"]}


def test_a_database_that_was_moved_away_leaves_nothing_in_the_next(tmp_path: Path) -> None:
    """A killed process leaves its write-ahead log beside the database, where SQLite would take it for the new one's."""
    program = (
        "import os; from pathlib import Path; from tests.unit.test_store import *\n"
        f"store = Store.open(Path({str(tmp_path)!r})); store.take('p', [queued('old')]); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program], check=False, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    database = Paths(tmp_path).database
    assert database.with_name("state.db-wal").stat().st_size
    database.rename(database.with_name("state.db.broken"))
    with Store.open(tmp_path) as store:
        assert store.runs() == []
        store.take("p", [queued("new")])
    with Store.open(tmp_path) as store:
        assert [run.job for run in store.runs()] == ["new"]


def test_an_intent_is_on_disk_before_intend_returns(tmp_path: Path) -> None:
    """A process that dies without a word right after `intend` leaves the intent behind."""
    program = (
        "import os, sys; from pathlib import Path; from tests.unit.test_store import *\n"
        "store = Store.open(Path(sys.argv[1])); store.take('p', [queued('a')]); store.intend([intent(queued('a'))])\n"
        "os._exit(9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path.cwd(), timeout=30, check=False)
    assert ended.returncode == 9
    with Store.open(tmp_path) as store:
        assert [run.status for run in store.runs("p")] == ["launching"]


def test_a_dropped_run_is_not_launched(tmp_path: Path) -> None:
    first, second = queued("a"), queued("b")
    with Store.open(tmp_path) as store, Store.open(tmp_path) as other:
        store.take("p", [first, second])
        assert not store.changed()
        assert [run.run for run in other.drop([first.run])] == [first.run]
        assert store.changed()
        assert store.intend([intent(first), intent(second)]) == {second.run}
        assert other.drop([second.run]) == []


def test_a_kept_cancel_keeps_its_run_from_being_launched_until_its_end_is_known(tmp_path: Path) -> None:
    run, other = queued("a"), queued("b")
    with Store.open(tmp_path) as store:
        store.take("p", [run, other])
        store.intend([intent(run), intent(other, "beta")])
        store.keep_cancel(run.run, grace=3.0, by="me")
        store.keep_cancel(run.run, grace=9.0, by="another")
    with Store.open(tmp_path) as store:
        (kept,) = store.kept_cancels("alpha")
        assert (kept.run.run, kept.grace, kept.by) == (run.run, 3.0, "me")
        assert store.kept_cancels("beta") == []
        store.take("p", [run])  # as one who goes on with a queue does
        assert store.intend([intent(run)]) == set()
        store.forget_cancels([run.run])
        assert store.intend([intent(run)]) == {run.run}
        store.keep_cancel(run.run, grace=None, by="me")
        ended = becomes(run, "cancelled")
        store.record([(status_event(ended), ended)])
        assert store.kept_cancels() == []
        assert not store.is_unwanted(run.run)


def test_a_final_word_stays(tmp_path: Path) -> None:
    run = queued("a")
    with Store.open(tmp_path) as store:
        store.take("p", [run])
        for status, code in (("running", None), ("exited", 3), ("unknown", None), ("running", None)):
            now_is = becomes(run, status, code)
            store.record([(status_event(now_is), now_is)])
        found = store.run(run.run)
        assert found is not None
        assert (found.status, found.code) == ("exited", 3)
        assert [event["event"] for event in store.events()] == ["running", "exited", "unknown", "running"]


def test_the_run_taken_in_hand_last_is_the_jobs_own(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.take("p", [queued("a", 1)])
        store.take("p", [queued("a", 2), queued("b")])
        assert [run.attempt for run in store.runs("p", "a")] == [1, 2]
        store.take("p", [queued("a", 1)])
        assert [run.attempt for run in store.runs("p", "a")] == [2, 1]
        store.collect(queued("b").run)
        assert store.collected() == {queued("b").run}


def test_a_reader_is_not_held_up_by_a_writer(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store, Store.open(tmp_path) as other:
        store.take("p", [queued("a")])
        with store._writing() as connection:
            connection.execute("UPDATE runs SET status = 'running'")
            assert [run.status for run in other.runs("p")] == ["queued"]
        assert [run.status for run in other.runs("p")] == ["running"]


@pytest.mark.parametrize("damage", ["empty", "short", "random", "truncated", "foreign", "newer", "link", "folder"])
def test_a_damaged_database_is_named_and_left_alone(tmp_path: Path, damage: str) -> None:
    with Store.open(tmp_path) as store:
        store.take("p", [queued(f"job-{number}") for number in range(200)])
        path = store.paths.database
    data = path.read_bytes()
    assert len(data) > 8192
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "short":
        path.write_bytes(data[:50])
    elif damage == "random":
        path.write_bytes(os.urandom(len(data)))
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "foreign":
        path.unlink()
        other = sqlite3.connect(path)
        other.execute("CREATE TABLE t (a)")
        other.close()
    elif damage == "newer":
        other = sqlite3.connect(path)
        other.execute("PRAGMA user_version = 4")
        other.close()
    elif damage == "link":
        path.rename(tmp_path / "elsewhere.db")
        path.symlink_to(tmp_path / "elsewhere.db")
    else:
        path.unlink()
        path.mkdir()
    before = None if damage == "folder" else path.read_bytes()
    with pytest.raises(StateError) as caught:
        Store.open(tmp_path)
    assert caught.value.fix is not None
    assert put_aside(path, ".old" if damage == "newer" else ".broken") in caught.value.fix
    assert put_aside(Path("/a b/c"), ".old") == "mv '/a b/c' '/a b/c.old'"
    assert before is None or path.read_bytes() == before


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / ".gpulayer").symlink_to(tmp_path / "real")
    with pytest.raises(StateError, match="link"):
        Store.open(tmp_path)


def test_many_processes_may_make_it_at_once(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.unit.test_store import *\n"
        "store = Store.open(Path(sys.argv[1])); store.take('p', [queued(sys.argv[2])]); store.close()\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), f"j{number}"]) for number in range(4)]
    assert [process.wait(60) for process in started] == [0] * 4
    with Store.open(tmp_path) as store:
        assert {run.job for run in store.runs()} == {f"j{number}" for number in range(4)}
        assert sorted(path.name for path in store.paths.root.iterdir() if "partial" in path.name) == []


def test_the_folder_is_found_upward(tmp_path: Path) -> None:
    Paths(tmp_path).create()
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert find_folder(below) == tmp_path.resolve()
    (tmp_path / ".gpulayer").rmdir()
    with pytest.raises(UsageError):
        find_folder(below)
    (tmp_path / "a" / "jobs.yaml").touch()
    assert find_folder(below) == (tmp_path / "a").resolve()


@pytest.mark.parametrize("run", ["../x", "", "a/b", "A", "-a", "a\n", "a" * 64])
def test_a_hosts_run_id_is_no_path(tmp_path: Path, run: str) -> None:
    with pytest.raises(UsageError):
        Paths(tmp_path).log(run)


def test_a_private_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_private(path, b"one")
    write_private(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StateError):
        write_private(tmp_path / "none" / "plan.json", b"")


def test_output_that_is_no_text_travels_as_base64() -> None:
    event = Event(event="output", at=now(), job="a", run="r", host="h", data=b"\xff\x00", detail={"offset": 7})
    assert event.to_json()["base64"] == "/wA="
    assert event.to_json()["offset"] == 7
    text = Event(event="output", at=now(), job="a", run="r", host="h", data=b"ok\n", detail={"offset": 0}).to_json()
    assert text["text"] == "ok\n"
    assert "base64" not in text
