"""What is shipped: git's own list in a repository, else all; links inside; nothing that changes on the way."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpulayer.errors import UsageError
from gpulayer.fleet import tree as tree_module
from gpulayer.fleet.tree import Tree, tree_of


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(tree: Tree) -> list[str]:
    return [entry[0] for entry in json.loads(tree.manifest)]


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(root), *identity, *words], check=True, capture_output=True)


def test_the_manifest_is_canonical_and_names_the_tree(tmp_path: Path) -> None:
    write(tmp_path, b="bee", a__x="eks")
    (tmp_path / "run").write_text("#!")
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "a" / "link").symlink_to("../b")
    tree = tree_of(tmp_path)
    sha = {text: hashlib.sha256(text.encode()).hexdigest() for text in ("bee", "eks", "#!")}
    expected: list[Any] = [
        ["a/link", "link", "../b"],
        ["a/x", "file", 3, sha["eks"]],
        ["b", "file", 3, sha["bee"]],
        ["run", "exec", 2, sha["#!"]],
    ]
    assert tree.manifest == json.dumps(expected, separators=(",", ":")).encode()
    assert tree.hash == hashlib.sha256(tree.manifest).hexdigest()
    assert (tree.files, tree.bytes, set(tree.blobs)) == (3, 8, set(sha.values()))


def test_without_a_repository_all_but_our_own_files_are_shipped(tmp_path: Path) -> None:
    write(tmp_path, **{"jobs.yaml": "", "inventory.yaml": "", ".hidden": "", "d__.gpulayer__state.db": "", "d__x": ""})
    assert names(tree_of(tmp_path, [tmp_path / "jobs.yaml", tmp_path / "inventory.yaml"])) == [".hidden", "d/x"]


def test_a_saved_plan_is_no_part_of_the_tree_that_it_was_made_of(tmp_path: Path) -> None:
    cache = tmp_path / "hashes"
    root = tmp_path / "root"
    write(root, x="1", friday=json.dumps({"schema": "gpulayer.plan/1", "jobs": []}), other='{"schema": "mine.plan/1"}')
    os.utime(root / "friday", (1, 1))
    before = tree_of(root, cache=cache)
    assert names(before) == ["other", "x"]
    assert tree_of(root, cache=cache).hash == before.hash  # as the cache has it
    (root / "friday").unlink()
    assert tree_of(root, cache=cache).hash == before.hash


def test_in_a_repository_gits_list_counts(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(
        tmp_path, **{".gitignore": "*.tmp\nout/\n", "a.py": "", "b.tmp": "", "out__model": "", "gone.py": "", "new": ""}
    )
    git(tmp_path, "add", "a.py", "gone.py", ".gitignore")
    (tmp_path / "gone.py").unlink()
    assert names(tree_of(tmp_path)) == [".gitignore", "a.py", "new"]
    write(tmp_path, **{"sub__in.py": "", "sub__x.tmp": ""})
    assert names(tree_of(tmp_path / "sub")) == ["in.py"]


def test_a_folder_that_the_repository_ignores_is_shipped_whole(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, **{".gitignore": "out/\n", "out__model": "weights"})
    assert names(tree_of(tmp_path / "out")) == ["model"]


def test_submodules_and_repositories_inside_are_shipped_by_their_own_lists(tmp_path: Path) -> None:
    library, project = tmp_path / "library", tmp_path / "project"
    for root in (library, project, project / "loose"):
        root.mkdir(parents=True)
        git(root, "init", "-q")
    write(library, **{"lib.py": "", ".gitignore": "*.tmp\n"})
    git(library, "add", ".")
    git(library, "commit", "-qm", "x")
    git(project, "submodule", "add", "-q", str(library), "vendored")
    write(project, **{"main.py": "", "vendored__x.tmp": "", "loose__y.py": ""})
    assert names(tree_of(project)) == [
        ".gitmodules",
        "loose/y.py",
        "main.py",
        "vendored/.gitignore",
        "vendored/lib.py",
    ]


@pytest.mark.parametrize(
    ("target", "inside"),
    [
        ("x", True),
        ("d/../x", True),
        ("missing", True),
        ("../x", False),
        ("/etc", False),
        ("ROOT/x", False),  # it is inside here, and elsewhere on a host
        ("d/../../x", False),
        ("out/x", False),
    ],
)
def test_links_may_not_lead_out(tmp_path: Path, target: str, *, inside: bool) -> None:
    root = tmp_path / "root"
    write(root, x="x", d__y="y")
    (tmp_path / "elsewhere").mkdir()
    if target.startswith("out/"):
        (root / "out").symlink_to("../elsewhere")
    (root / "link").symlink_to(target.replace("ROOT", str(root)))
    if inside:
        assert ["link", "link", target] in json.loads(tree_of(root).manifest)
    else:
        with pytest.raises(UsageError, match=r"link is a link that leads out"):
            tree_of(root)


def test_all_that_cannot_be_shipped_is_named_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "out").symlink_to("/etc")
    with pytest.raises(UsageError) as caught:
        tree_of(tmp_path)
    assert "pipe is no regular file" in caught.value.message
    assert "out is a link that leads out" in caught.value.message


def test_more_than_a_tree_may_have_is_refused_before_any_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_module, "MAX_FILES", 3)
    write(tmp_path, a="", b="", c="")
    assert tree_of(tmp_path).files == 3
    with (tmp_path / "c").open("wb") as file:
        file.truncate(10 * 2**40)  # sparse: it would be hashed for hours
    with pytest.raises(UsageError, match=r"more than 3 files or 1,024 GiB \(at c\)"):
        tree_of(tmp_path)
    (tmp_path / "c").unlink()
    write(tmp_path, d="", e="")
    with pytest.raises(UsageError, match="more than 3 files"):
        tree_of(tmp_path)


NASTY = (b"a b", b"new\nline", b'quo"te', "é".encode(), b"-rf", b"$(id)")
NO_TEXT = pytest.param((b"\xff\xfe",), marks=pytest.mark.linux("a file system that takes names that are no UTF-8"))


@pytest.mark.parametrize("nasty", [NASTY, NO_TEXT], ids=["text", "bytes"])
def test_nasty_names_are_kept_byte_for_byte(tmp_path: Path, nasty: tuple[bytes, ...]) -> None:
    for name in nasty:
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_bytes(name)
    assert {os.fsencode(name) for name in names(tree_of(tmp_path))} == set(nasty)


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = tmp_path / "root", tmp_path / "hashes.json"
    write(root, a="a", b="b")
    monkeypatch.setattr(tree_module, "_SETTLED_NS", -(10**18))
    tree_of(root, cache=cache)
    assert cache.stat().st_mode & 0o777 == 0o600
    known = json.loads(cache.read_text())
    assert set(known) == {str(root / "a"), str(root / "b")}
    known[str(root / "b")][-1] = "f" * 64  # a cached hash is believed, which shows that the file was not read
    cache.write_text(json.dumps(known))
    assert "f" * 64 in tree_of(root, cache=cache).blobs
    write(root, b="B")
    assert hashlib.sha256(b"B").hexdigest() in tree_of(root, cache=cache).blobs


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a="a" * 100)
    real_open = os.open

    def open_and_change(path: str, flags: int) -> int:
        descriptor = real_open(path, flags)
        Path(path).write_text("b" * 101)
        return descriptor

    monkeypatch.setattr("os.open", open_and_change)
    with pytest.raises(UsageError, match=r"a changed while it was read"):
        tree_of(tmp_path)


def test_a_file_hashed_right_after_a_change_is_read_again(tmp_path: Path) -> None:
    root, cache = tmp_path / "root", tmp_path / "hashes.json"
    write(root, a="a")
    tree_of(root, cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000, '{"PATH": 5}', '{"PATH": []}'], ids=len)
def test_a_damaged_cache_costs_only_time(tmp_path: Path, text: str) -> None:
    root, cache = tmp_path / "root", tmp_path / "hashes.json"
    write(root, a="a")
    cache.write_text(text.replace("PATH", str(root / "a")))
    assert tree_of(root, cache=cache).hash == tree_of(root).hash
