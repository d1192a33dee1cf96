from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote.files import Blobs, copy_tree
from gpulayer.remote.wire import RequestError


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(blobs: Blobs, *contents: bytes) -> list[str]:
    blobs.put([(sha(content), len(content)) for content in contents], b"".join(contents))
    return [sha(content) for content in contents]


def put_tree(blobs: Blobs, entries: list[Any]) -> str:
    return put(blobs, json.dumps(entries, separators=(",", ":")).encode())[0]


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(str(tmp_path / "state"))


def refused(code: str, call: Any, *args: Any) -> str:
    with pytest.raises(RequestError) as caught:
        call(*args)
    assert caught.value.code == code
    return caught.value.message


def test_blobs_are_kept_by_their_content(blobs: Blobs) -> None:
    one, two = put(blobs, b"one", b"")
    three = sha(b"three")
    assert blobs.missing([one, three, two]) == [three]
    assert Path(blobs.path(one)).read_bytes() == b"one"
    assert Path(blobs.path(one)).stat().st_mode & 0o777 == 0o600


def test_a_content_that_is_not_its_name_is_refused(blobs: Blobs, tmp_path: Path) -> None:
    refused("hash", blobs.put, [(sha(b"right"), 5)], b"wrong")
    assert blobs.missing([sha(b"right")]) == [sha(b"right")]
    refused("request", blobs.put, [(sha(b"right"), 4)], b"right")
    for name in ("../../x", "A" * 64, "0" * 63, "0" * 64 + "\n"):
        refused("request", blobs.missing, [name])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_big_blob_comes_in_parts(blobs: Blobs, tmp_path: Path) -> None:
    content = os.urandom(5000)
    name = sha(content)
    assert [blobs.put_part(name, 5000, offset, content[offset : offset + 2000]) for offset in (0, 2000)] == [0, 0]
    assert blobs.missing([name]) == [name]
    assert blobs.put_part(name, 5000, 4000, content[4000:]) == 1
    assert Path(blobs.path(name)).read_bytes() == content
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_parts_out_of_order_or_of_another_content_leave_nothing(blobs: Blobs, tmp_path: Path) -> None:
    name = sha(b"abcdef")
    refused("request", blobs.put_part, name, 6, 3, b"def")
    blobs.put_part(name, 6, 0, b"abc")
    refused("request", blobs.put_part, name, 6, 4, b"ef")
    blobs.put_part(name, 6, 0, b"abc")
    refused("request", blobs.put_part, name, 6, 3, b"defg")
    blobs.put_part(name, 6, 0, b"abc")
    refused("hash", blobs.put_part, name, 6, 3, b"xyz")
    blobs.put_part(name, 6, 0, b"abc")
    blobs.put_part(name, 6, 0, b"abc")  # begun anew
    blobs.drop_parts()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_tree_becomes_a_folder_of_copies(blobs: Blobs, tmp_path: Path) -> None:
    text, script = put(blobs, b"text", b"#!/bin/sh\n")
    tree = put_tree(
        blobs,
        [
            ["bin/run", "exec", 10, script],
            ["data/a/b", "file", 4, text],
            ["data/again", "link", "a/b"],
            ["data/up", "link", "../bin/run"],
            ["name with\nnewline", "file", 4, text],
        ],
    )
    folder = tmp_path / "work"
    folder.mkdir()
    mask = os.umask(0o022)
    try:
        blobs.build(blobs.tree(tree), str(folder))
    finally:
        os.umask(mask)
    assert (folder / "data/a/b").read_bytes() == (folder / "data/again").read_bytes() == b"text"
    assert (folder / "name with\nnewline").read_bytes() == b"text"
    assert (folder / "data/up").readlink() == Path("../bin/run")
    assert (folder / "bin/run").stat().st_mode & 0o777 == 0o755
    assert (folder / "data/a/b").stat().st_mode & 0o777 == 0o644
    (folder / "data/a/b").write_bytes(b"changed")
    assert Path(blobs.path(text)).read_bytes() == b"text"


A = sha(b"a")


@pytest.mark.parametrize(
    "entries",
    [
        {"a": 1},
        [["../a", "file", 1, A]],
        [["/a", "file", 1, A]],
        [["a/../../b", "file", 1, A]],
        [["./a", "file", 1, A]],
        [["a//b", "file", 1, A]],
        [["", "file", 1, A]],
        [["a\0b", "file", 1, A]],
        [["a", "file", 1, A], ["a", "file", 1, A]],
        [["b", "file", 1, A], ["a", "file", 1, A]],
        [["a", "link", "."], ["a/b", "file", 1, A]],
        [["a", "file", 1, A], ["a-b", "file", 1, A], ["a/b/c", "file", 1, A]],
        [["a", "link", "/etc/passwd"]],
        [["a", "link", "../x"]],
        [["a/b", "link", "../../x"]],
        [["a", "link", ""]],
        [["a", "fifo", 1, A]],
        [["a", "file", "1", A]],
        [["a", "file", 1, "../../x"]],
        [["a"]],
        ["a"],
        [[["a"], "file", 1, A]],
    ],
    ids=str,
)
def test_a_manifest_that_reaches_outside_or_makes_no_sense_is_refused(blobs: Blobs, entries: Any) -> None:
    put(blobs, b"a")
    assert "cannot be used" in refused("tree", blobs.tree, put_tree(blobs, entries))


def test_a_tree_is_whole_or_refused(blobs: Blobs) -> None:
    assert "is not on this host" in refused("tree", blobs.tree, sha(b"unknown"))
    (name,) = put(blobs, b"content")
    tree = put_tree(blobs, [["a/file", "file", 7, name], ["b", "file", 1, A]])
    assert "b is not on this host" in refused("tree", blobs.tree, tree)
    put(blobs, b"a")
    assert len(blobs.tree(tree)) == 2


def test_what_a_power_loss_has_cut_counts_as_missing(blobs: Blobs, tmp_path: Path) -> None:
    name, other = put(blobs, b"content", b"a")
    tree = put_tree(blobs, [["file", "file", 7, name], ["other", "file", 1, other]])
    os.truncate(blobs.path(name), 0)
    assert "file was damaged" in refused("tree", blobs.tree, tree)
    assert blobs.missing([name]) == [name]
    put(blobs, b"content")
    entries = blobs.tree(tree)
    Path(blobs.path(name)).write_bytes(b"CONTENT")
    (tmp_path / "work").mkdir()
    assert "was damaged" in refused("tree", blobs.build, entries, str(tmp_path / "work"))
    assert blobs.missing([name]) == [name]
    Path(blobs.path(tree)).write_bytes(b"[]")
    assert "it was damaged" in refused("tree", blobs.tree, tree)
    assert blobs.missing([tree]) == [tree]


def test_a_full_disk_leaves_no_part_behind(blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            put(blobs, b"content")
        with pytest.raises(OSError, match="No space"):
            blobs.put_part(sha(b"content"), 7, 0, b"con")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_is_copied_with_its_links_and_modes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "tool").write_bytes(b"tool")
    (source / "bin" / "tool").chmod(0o755)
    (source / "link").symlink_to("bin/tool")
    (source / "broken").symlink_to("/nowhere")
    copy_tree(str(source), str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "link").is_symlink()
    assert (tmp_path / "copy" / "broken").readlink() == Path("/nowhere")
    assert (tmp_path / "copy" / "bin" / "tool").stat().st_mode & 0o777 == 0o755
    (tmp_path / "copy" / "bin" / "tool").write_bytes(b"changed")
    assert (source / "bin" / "tool").read_bytes() == b"tool"
