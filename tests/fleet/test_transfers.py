"""Code goes to a host once, outputs come back as they are, and neither side can lead the other astray."""

from __future__ import annotations

import asyncio
import json
import random
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpulayer.errors import HostError, StateError, UsageError
from gpulayer.fleet import artifacts
from gpulayer.fleet import sync as sync_module
from gpulayer.fleet.artifacts import fetch
from gpulayer.fleet.session import AgentError, Session
from gpulayer.fleet.sync import Sent, sync
from gpulayer.fleet.transport import ConnectOptions
from gpulayer.fleet.tree import tree_of
from gpulayer.spec.inventory import Host, Inventory
from tests.fleet.conftest import open_hostile, run
from tests.sshd import SshdHost


@pytest.fixture(scope="module")
def worker(sshd_host: Callable[..., SshdHost]) -> SshdHost:
    return sshd_host("worker")


@pytest.fixture
async def session(worker: SshdHost, connect_options: ConnectOptions) -> AsyncIterator[Session]:
    async with await Session.open(worker.host, Inventory(hosts={}), connect_options) as session:
        yield session


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A tree with small files, equal files, a big one, an empty one, a program and a link."""
    root = tmp_path / "code"
    (root / "deep" / "er").mkdir(parents=True)
    for number in range(30):
        (root / "deep" / f"{number}.txt").write_text(f"{tmp_path} {number // 2}")
    (root / "big").write_bytes(random.Random(str(tmp_path)).randbytes(3 * 1024 * 1024 + 7))  # noqa: S311
    (root / "empty").touch()
    (root / "deep" / "er" / "run").write_text("#!/bin/sh\necho hello\n")
    (root / "deep" / "er" / "run").chmod(0o755)
    (root / "link").symlink_to("deep/er/run")
    return root


async def test_only_what_is_missing_travels(session: Session, code: Path) -> None:
    tree = tree_of(code)
    seen: list[tuple[int, int]] = []
    distinct = 15 + 3
    sent = await sync(session, tree, lambda *progress: seen.append(progress))
    assert sent == Sent(files=distinct, bytes=sum(source.size for source in tree.blobs.values()))
    assert seen == sorted(seen)
    assert seen[-1] == (sent.bytes + len(tree.manifest),) * 2
    assert await sync(session, tree) == Sent(files=0, bytes=0)
    assert await sync(session, tree, thorough=True) == Sent(files=0, bytes=0)
    (code / "deep" / "new.txt").write_text("new")
    assert await sync(session, tree_of(code)) == Sent(files=1, bytes=3)


async def test_a_job_finds_the_very_tree(session: Session, code: Path) -> None:
    digest = "find . -type f | sort | xargs cat | sha256sum"
    tree = tree_of(code)
    await sync(session, tree)
    state, output = await run(
        session, "./link; find . -type f | sort | xargs cat | sha256sum; readlink link", tree=tree.hash
    )
    here = await asyncio.create_subprocess_shell(digest, cwd=code, stdout=asyncio.subprocess.PIPE)
    expected = b"hello\n" + (await here.communicate())[0] + b"deep/er/run\n"
    assert (state["code"], output) == (0, expected)


async def test_a_tree_lost_on_the_host_is_sent_again_when_asked(session: Session, worker: SshdHost, code: Path) -> None:
    tree = tree_of(code)
    await sync(session, tree)
    lost = next(iter(tree.blobs))
    (blob,) = worker.home.rglob(lost)
    blob.unlink()
    with pytest.raises(AgentError) as caught:
        await run(session, ["true"], tree=tree.hash)
    assert caught.value.code == "tree"
    assert (await sync(session, tree, thorough=True)).files == 1
    assert (await run(session, ["true"], tree=tree.hash))[0]["code"] == 0


@pytest.mark.parametrize("name", ["big", "deep/1.txt"])
@pytest.mark.parametrize("change", ["other", "shorter", "gone", "link"])
async def test_code_that_changed_since_the_plan_is_not_sent(
    session: Session, code: Path, name: str, change: str
) -> None:
    tree = tree_of(code)
    path = code / name
    data = path.read_bytes()
    path.unlink()
    if change == "other":
        path.write_bytes(bytes(len(data)))
    elif change == "shorter":
        path.write_bytes(data[:-1])
    elif change == "link":
        path.symlink_to("/etc/passwd")
    with pytest.raises((UsageError, AgentError), match="change"):
        await sync(session, tree)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    await sync(session, tree)  # nothing is left in the way


async def test_two_trees_with_one_big_file_do_not_meet(session: Session, code: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "same").write_bytes((code / "big").read_bytes())
    sent = await asyncio.gather(sync(session, tree_of(code)), sync(session, tree_of(other)))
    assert sum(one.bytes for one in sent) < 2 * (code / "big").stat().st_size


async def test_a_long_manifest_travels_in_parts(session: Session, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "PACK", 1000)
    monkeypatch.setattr(sync_module, "ASKED_AT_ONCE", 7)
    (code / "big").write_bytes(b"0123456789" * 1000)
    tree = tree_of(code)
    assert len(tree.manifest) > 1000
    await sync(session, tree)
    assert (await run(session, "cat big", tree=tree.hash))[1] == b"0123456789" * 1000


async def test_outputs_come_back_as_they_are(session: Session, tmp_path: Path) -> None:
    command = (
        "mkdir -p out/deep other; head -c 700000 /dev/zero > out/deep/big; printf hi > 'out/a b'; : > out/empty;"
        "printf x > out/run; chmod 4755 out/run; ln -s /etc/passwd out/link; mkfifo out/pipe; echo no > other/x"
    )
    state, _ = await run(session, command, outputs=["out/**"])
    seen: list[int] = []
    dest = tmp_path / "run" / "outputs"
    fetched = await fetch(session, state["run"], ["out/**"], dest, seen.append)
    files = {str(path.relative_to(dest)): path.read_bytes() for path in dest.rglob("*") if path.is_file()}
    assert files == {"out/deep/big": bytes(700_000), "out/a b": b"hi", "out/empty": b"", "out/run": b"x"}
    assert stat.S_IMODE((dest / "out" / "run").stat().st_mode) == 0o755
    assert stat.S_IMODE((dest / "out" / "a b").stat().st_mode) == 0o644
    assert (fetched.files, fetched.bytes) == (4, 700_003)
    assert {name for name, _ in fetched.skipped} == {"out/link", "out/pipe"}
    assert seen[-1] == 700_003
    (dest / "stale").touch()
    await fetch(session, state["run"], ["out/empty"], dest)
    assert [path.name for path in dest.rglob("*")] == ["out", "empty"]
    assert [path.name for path in dest.parent.iterdir()] == ["outputs"]


async def test_links_where_outputs_go_are_refused(session: Session, tmp_path: Path) -> None:
    state, _ = await run(session, "echo hi > x", outputs=["x"])
    target = tmp_path / "target"
    target.mkdir()
    (target / "x").write_text("mine")
    planted = tmp_path / "planted"
    planted.symlink_to(target)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "x").symlink_to(target / "x")
    for dest in (planted, inside):
        with pytest.raises(StateError, match="symbolic link"):
            await fetch(session, state["run"], ["x"], dest)
    assert (target / "x").read_text() == "mine"


def record(name: object, text: str = "x", **fields: object) -> list[Any]:
    return [{"file": name, "size": len(text), "exec": False, "off": 0, "last": True, **fields}, text]


END = [{"ok": True, "files": 1, "bytes": 1, "skipped": 0, "unmatched": []}, ""]
BAD_NAMES = ["../x", "/abs", "a/../../x", "a/./x", "a//x", "C:\\x", "C:x", "a\\b", "a\0b", "x" * 256, "d/" * 600 + "x"]
BAD_NAMES += ["a\n\x1b[31m", "", ".", "..", "a\u202eb", "\udcff"]


@pytest.mark.parametrize(
    "frames",
    [
        *([record(name), END] for name in (*BAD_NAMES, 5, None)),
        [record("x"), record("x"), END],
        [record("x"), record("x/y"), END],
        [record("x", size=-1), END],
        [record("x", size=True), END],
        [record("x", size=0), END],
        [record("x", size=2), END],
        [record("x", last=False), END],
        [record("x", off=1), END],
        [record("x", size=2, last=False), record("y", size=2, off=1), END],
        [record("x"), [{"ok": True}, ""]],
        [record("x"), [{"ok": True, "files": 2, "bytes": 1, "unmatched": []}, ""]],
        *([record("x"), [{"files": 1, "bytes": 1, "unmatched": told}, ""]] for told in (None, "x", ["x"], [5])),
        [[{"skipped": 5, "why": "x"}, ""], END],
        [[{"nothing": 1}, ""], END],
    ],
)
async def test_a_host_that_lies_about_outputs_is_refused(
    hostile: Host, connect_options: ConnectOptions, tmp_path: Path, frames: list[Any]
) -> None:
    dest = tmp_path / "a" / "outputs"
    async with await open_hostile(hostile, "records", connect_options) as session:
        with pytest.raises(HostError):
            await fetch(session, "x", [json.dumps(frames)], dest)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not dest.exists()


async def test_a_file_taken_back_does_not_count(hostile: Host, connect_options: ConnectOptions, tmp_path: Path) -> None:
    frames = [record("b", size=9, last=False), [{"skipped": "b", "why": "it shrank"}, ""], record("a"), END]
    async with await open_hostile(hostile, "records", connect_options) as session:
        fetched = await fetch(session, "x", [json.dumps(frames)], tmp_path / "outputs")
    assert (fetched.files, fetched.bytes, fetched.skipped) == (1, 1, (("b", "it shrank"),))
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["a"]


async def test_of_what_a_host_leaves_out_the_first_are_named_and_all_counted(
    hostile: Host, connect_options: ConnectOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "KEPT_SKIPPED", 2)
    monkeypatch.setattr(artifacts, "MAX_SKIPPED", 5)
    skipped: list[list[Any]] = [[{"skipped": f"f{number}", "why": "w" * 5000}, ""] for number in range(5)]
    frames = [*skipped, [{"ok": True, "files": 0, "bytes": 0, "skipped": 5, "unmatched": []}, ""]]
    async with await open_hostile(hostile, "records", connect_options) as session:
        fetched = await fetch(session, "x", [json.dumps(frames)], tmp_path / "outputs")
    assert [name for name, _ in fetched.skipped] == ["f0", "f1", "\u2026"]
    assert fetched.skipped[-1][1] == "and 3 more"
    assert len(fetched.skipped[0][1]) == artifacts.MAX_NAME
    async with await open_hostile(hostile, "records", connect_options) as session:
        with pytest.raises(HostError, match="skips more than 5 files"):
            await fetch(session, "x", [json.dumps([*skipped, skipped[0]])], tmp_path / "outputs")


async def test_outputs_beyond_the_limits_are_refused(
    hostile: Host, connect_options: ConnectOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MAX_FILES", 3)
    many = [record(f"f{number}") for number in range(5)]
    sparse = [record("x", size=10 * 2**40, last=False)]
    async with await open_hostile(hostile, "records", connect_options) as session:
        with pytest.raises(HostError, match="more than 3 files"):
            await fetch(session, "x", [json.dumps(many)], tmp_path / "outputs")
    async with await open_hostile(hostile, "records", connect_options) as session:
        with pytest.raises(StateError, match="do not fit"):
            await fetch(session, "x", [json.dumps(sparse)], tmp_path / "outputs")
    assert list(tmp_path.iterdir()) == []


async def test_an_answer_without_a_list_is_refused(hostile: Host, connect_options: ConnectOptions, code: Path) -> None:
    async with await open_hostile(hostile, "records", connect_options) as session:
        with pytest.raises(HostError, match="names no missing files"):
            await sync(session, tree_of(code))
