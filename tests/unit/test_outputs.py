from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gpulayer.remote import outputs
from gpulayer.remote.wire import RequestError


def fetch(work: Path, *patterns: str) -> tuple[dict[str, bytes], dict[str, str], dict[str, Any]]:
    """The files by name, what was skipped and why, and the sums."""
    files: dict[str, bytes] = {}
    skipped: dict[str, str] = {}
    stream = outputs.fetch(str(work), list(patterns))
    while True:
        try:
            made = next(stream)
        except StopIteration as end:
            return files, skipped, end.value
        assert isinstance(made, tuple)
        header, data = made
        if "skipped" in header:
            skipped[header["skipped"]] = header["why"]
            files.pop(header["skipped"], None)
            continue
        assert header["off"] == len(files.get(header["file"], b""))
        files[header["file"]] = files.get(header["file"], b"") + data
        assert header["last"] == (len(files[header["file"]]) == header["size"])


def make(work: Path, *names: str) -> None:
    for name in names:
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


NAMES = ("a.pt", "b.txt", ".hidden", "ck/one.pt", "ck/deep/two.pt", "ck/deep/er/three.txt", "logs/x.log", "ckx/no")


@pytest.mark.parametrize(
    ("patterns", "found", "unmatched"),
    [
        (["*.pt"], {"a.pt"}, []),
        (["**/*.pt"], {"a.pt", "ck/one.pt", "ck/deep/two.pt"}, []),
        (["ck/**"], {"ck/one.pt", "ck/deep/two.pt", "ck/deep/er/three.txt"}, []),
        (["ck"], {"ck/one.pt", "ck/deep/two.pt", "ck/deep/er/three.txt"}, []),
        (["ck/"], {"ck/one.pt", "ck/deep/two.pt", "ck/deep/er/three.txt"}, []),
        (["ck/*"], {"ck/one.pt", "ck/deep/two.pt", "ck/deep/er/three.txt"}, []),
        (["ck/*.pt"], {"ck/one.pt"}, []),
        (["ck/**/three.txt"], {"ck/deep/er/three.txt"}, []),
        (["ck/**/deep/**/two.pt"], {"ck/deep/two.pt"}, []),
        (["**"], set(NAMES), []),
        (["*"], set(NAMES), []),
        (["[ab].*"], {"a.pt", "b.txt"}, []),
        (["?.pt", "a.*", "a.pt"], {"a.pt"}, []),
        (["nothing/**", "A.PT"], set(), ["nothing/**", "A.PT"]),
        (
            ["gone", "ck", "ck/**", "ck/none", "void"],
            {"ck/one.pt", "ck/deep/two.pt", "ck/deep/er/three.txt"},
            ["gone", "ck/none", "void"],
        ),
        ([], set(), []),
    ],
)
def test_patterns_choose_files(tmp_path: Path, patterns: list[str], found: set[str], unmatched: list[str]) -> None:
    make(tmp_path, *NAMES)
    (tmp_path / "void").mkdir()
    files, skipped, sums = fetch(tmp_path, *patterns)
    assert files == {name: name.encode() for name in found}
    assert skipped == {}
    assert sums == {"files": len(found), "bytes": sum(map(len, found)), "skipped": 0, "unmatched": unmatched}


def test_a_working_folder_that_was_never_made_has_no_files(tmp_path: Path) -> None:
    sums = {"files": 0, "bytes": 0, "skipped": 0, "unmatched": ["**"]}
    assert fetch(tmp_path / "missing", "**") == ({}, {}, sums)


@pytest.mark.parametrize("pattern", ["../x", "a/../b", "/etc/passwd/../x", "", "./a", "a//b", "a\0b"])
def test_a_pattern_that_could_leave_the_folder_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(RequestError) as caught:
        fetch(tmp_path, pattern)
    assert caught.value.code == "pattern"


def test_what_is_no_regular_file_is_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    make(work, "good", "sub/good")
    (tmp_path / "secret").write_text("secret")
    (work / "link").symlink_to(tmp_path / "secret")
    (work / "inside").symlink_to("good")
    (work / "folder").symlink_to(tmp_path)
    os.mkfifo(work / "fifo")
    monkeypatch.chdir(work)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")  # the whole path may be longer than an address can be
    for name in ("line\nbreak", "esc\x1b[31m", "back\\slash", "C:drive"):
        (work / name).touch()
    os.link(work / "good", work / "hard")
    files, skipped, sums = fetch(work, "**")
    assert set(files) == {"good", "hard", "sub/good"}
    assert skipped == {
        "link": "is a symbolic link",
        "inside": "is a symbolic link",
        "folder": "is a symbolic link",
        "fifo": "is no regular file",
        "socket": "is no regular file",
        "line\nbreak": "has a name that other systems cannot take",
        "esc\x1b[31m": "has a name that other systems cannot take",
        "back\\slash": "has a name that other systems cannot take",
        "C:drive": "has a name that other systems cannot take",
    }
    assert sums["skipped"] == len(skipped)
    assert fetch(work, "link", "fifo/*", "fifo")[2]["unmatched"] == ["fifo/*"]  # what is skipped is named already


@pytest.mark.linux("a file system that takes names that are no UTF-8")
def test_a_name_that_is_no_text_is_skipped_and_named(tmp_path: Path) -> None:
    make(tmp_path, "good")
    (tmp_path / "bytes\udcff").touch()
    files, skipped, sums = fetch(tmp_path, "**")
    assert set(files) == {"good"}
    assert skipped == {"bytes\\udcff": "has a name that other systems cannot take"}
    assert sums["skipped"] == 1


def test_a_working_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere", "file")
    (tmp_path / "work").symlink_to("elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        fetch(tmp_path / "work", "**")


def test_files_keep_their_bytes_and_their_executable_bit(tmp_path: Path) -> None:
    content = os.urandom(700_001)
    (tmp_path / "big").write_bytes(content)
    (tmp_path / "big").chmod(0o4755)
    (tmp_path / "empty").touch()
    headers: list[dict[str, Any]] = [
        made[0] for made in outputs.fetch(str(tmp_path), ["**"]) if isinstance(made, tuple)
    ]
    assert {header["file"]: header["exec"] for header in headers} == {"big": True, "empty": False}
    assert fetch(tmp_path, "**")[0] == {"big": content, "empty": b""}


def test_a_file_that_shrinks_while_it_is_read_is_taken_back(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(600_000))
    stream = outputs.fetch(str(tmp_path), ["log"])
    assert isinstance(next(stream), tuple)
    os.truncate(tmp_path / "log", 300_000)
    frames = [made[0] for made in stream if isinstance(made, tuple)]
    assert frames[-1] == {"skipped": "log", "why": "became shorter while it was read"}


def test_quotas_end_what_would_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(outputs.MAX_BYTES + 1)
    with pytest.raises(RequestError, match=r"more than .* GiB \(at sparse\)"):
        fetch(tmp_path, "sparse")
    monkeypatch.setattr(outputs, "MAX_FILES", 3)
    make(tmp_path, "1", "2", "3")
    assert fetch(tmp_path, "[0-9]")[2]["files"] == 3
    make(tmp_path, "4")
    with pytest.raises(RequestError) as caught:
        fetch(tmp_path, "[0-9]")
    assert caught.value.code == "quota"
