"""The shipped modules come from memory, and what was compiled of them is used again where it is whole and the same."""

from __future__ import annotations

import importlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer.remote.importer import MemoryImporter, install

NAME = "shipped_by_a_test"
BUILD = "0123456789abcdef" * 4


def names(importer: MemoryImporter) -> list[object]:
    """What a module says, imported anew."""
    sys.modules.pop(NAME, None)
    sys.meta_path.insert(0, importer)
    try:
        module = importlib.import_module(NAME)
        return [module.WORD, module.__file__]
    finally:
        sys.meta_path.remove(importer)
        sys.modules.pop(NAME, None)


def connect(folder: Path, word: str, build: str = BUILD) -> list[object]:
    """Import the module as an agent does whose sources say `word`, and end; return what it was told."""
    importer = MemoryImporter({NAME: f"WORD = {word!r}"}, build)
    importer.remember(str(folder))
    said = names(importer)
    importer.keep()
    return said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "code"


def test_what_was_compiled_is_used_again(folder: Path) -> None:
    assert connect(folder, "first") == ["first", f"<shipped {NAME}>"]
    (kept,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)
    before = kept.stat().st_mtime_ns
    assert connect(folder, "not compiled again") == ["first", f"<shipped {NAME}>"]
    assert kept.stat().st_mtime_ns == before


def test_other_sources_are_not_mixed_up(folder: Path) -> None:
    connect(folder, "first")
    assert connect(folder, "second", "f" * 64)[0] == "second"
    assert connect(folder, "")[0] == "first"


@pytest.mark.parametrize("damage", [b"", b"\0" * 31, b"\0" * 500])
def test_what_is_damaged_is_compiled_anew(folder: Path, damage: bytes) -> None:
    connect(folder, "first")
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    for broken in (damage, whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        kept.write_bytes(broken)
        assert connect(folder, "second")[0] == "second"
        assert connect(folder, "third")[0] == "second"


def test_what_another_connection_kept_meanwhile_is_no_loss(folder: Path) -> None:
    importer = MemoryImporter({NAME: "WORD = 'slow'"}, BUILD)
    importer.remember(str(folder))
    assert names(importer)[0] == "slow"
    connect(folder, "fast")
    importer.keep()
    assert connect(folder, "") == ["slow", f"<shipped {NAME}>"]


def test_old_builds_go(folder: Path) -> None:
    for build in range(6):
        connect(folder, "", f"{build:064x}"[::-1])
        newest = max(folder.iterdir(), key=lambda path: path.stat().st_ctime_ns)
        os.utime(newest, (build, build))
    assert sorted(path.name[0] for path in folder.iterdir()) == ["2", "3", "4", "5"]


def test_a_folder_that_cannot_be_made_hurts_nobody(tmp_path: Path) -> None:
    (tmp_path / "code").write_text("")
    assert connect(tmp_path / "code", "first")[0] == "first"
    (tmp_path / "link").mkdir()
    connect(tmp_path / "link", "theirs")
    (kept,) = (tmp_path / "link").iterdir()
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    assert connect(tmp_path / "link", "ours")[0] == "ours"


def test_what_lies_in_the_way_is_neither_waited_for_nor_read(folder: Path) -> None:
    connect(folder, "first")
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()

    def others_write() -> None:
        kept.write_bytes(whole)
        kept.chmod(0o622)

    def too_large() -> None:
        kept.write_bytes(whole)
        os.truncate(kept, 1 << 40)

    def fifo() -> None:
        os.mkfifo(kept)

    for put in (fifo, kept.mkdir, others_write, too_large):
        kept.unlink()
        put()
        before = len(list(Path("/dev/fd").iterdir()))
        assert connect(folder, "second")[0] == "second"
        assert len(list(Path("/dev/fd").iterdir())) == before
        assert [path.name for path in folder.iterdir()] == [kept.name]  # nothing half written beside it
        if kept.is_dir():
            kept.rmdir()
            connect(folder, "first")
        assert connect(folder, "third")[0] != "third"


def test_a_full_disk_is_left_no_halves(folder: Path) -> None:
    folder.mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        assert connect(folder, "first")[0] == "first"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("is_link", [True, False])
def test_files_of_others_stay(folder: Path, tmp_path: Path, is_link: bool) -> None:
    theirs = tmp_path / "theirs" if is_link else folder
    theirs.mkdir()
    if is_link:
        folder.symlink_to(theirs)
    names = {"thesis", "0-1", f"{'0' * 32}-kept"}
    (theirs / f"{'0' * 32}-kept").mkdir()
    for name in ("thesis", "0-1"):
        (theirs / name).touch()
    for build in range(6):
        connect(folder, "", f"{build:064x}"[::-1])
    assert {path.name for path in theirs.iterdir()} >= names
    assert len(list(theirs.iterdir())) == len(names) + (0 if is_link else 4)


@pytest.fixture
def path_as_before() -> Iterator[None]:
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


@pytest.mark.usefixtures("path_as_before")
def test_it_comes_before_all_else() -> None:
    importer = install({"json": "WORD = 1"}, BUILD)
    assert sys.meta_path[0] is importer
    found = importer.find_spec("json")
    loader: object = found and found.loader
    assert loader is importer
    assert importer.find_spec("gpulayer.remote.no_such_module") is None
