"""The house holds: who may import whom, what runs on hosts, what is pure, how big a file is, what a test must do."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.outcomes import Skipped

from gpulayer.fleet.shipment import shipped
from tests import conftest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpulayer"

EVERYTHING = {"errors", "spec", "gpu", "remote", "placement", "probe", "fleet", "run", "cli"}

# What each module may import of ours, by the longest prefix; the order of the folders is the order of the house.
# "spec" allows all of spec/. A module that stands under a folder's row needs no row of its own.
TABLE: dict[str, set[str]] = {
    "errors": set(),
    "spec": {"errors", "spec"},
    "spec.documents": {"errors", "spec.files"},
    "spec.files": set(),
    "spec.schemas": {"errors", "spec.documents"},
    "spec.support": set(),
    "gpu": {"gpu"},
    "gpu.facts": set(),
    "remote": {"remote", "gpu.discovery", "gpu.discovery_occupants"},
    "remote.wire": set(),
    "remote.states": set(),
    # A plan compares with known runs, whose words are those of `remote/states.py`, the one table of them.
    "placement": {"errors", "spec", "gpu.facts", "remote.states", "placement"},
    "placement.plan": {"errors", "spec", "gpu.facts"},
    "placement.rules": {"spec", "gpu.facts", "placement.plan"},
    "probe": {"gpu.discovery"},
    "fleet": {"errors", "spec", "remote.wire", "fleet"},
    "fleet.transport": {"errors"},
    "fleet.shipment": set(),
    # A controller dies at named points as a host does, for the tests that prove what a crash leads to.
    # A probe's report is read by the reader of all that hosts send.
    "run": {
        *("errors", "spec", "gpu.facts", "placement", "remote.states", "remote.failpoints", "remote.wire", "fleet"),
        "run",
    },
    "cli": EVERYTHING | {""},  # "": the version
    "__main__": {"cli"},
    "": EVERYTHING,
}

# Modules that decide; `spec.files` reads the file that it is given and `spec.schemas` the packaged schemas.
PURE = ("spec", "placement", "gpu.facts")
READS_FILES = ("spec.files", "spec.schemas")
IMPURE_MODULES = {
    *("asyncio", "getpass", "glob", "http", "multiprocessing", "os", "platform", "random", "secrets", "select"),
    *("shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "urllib"),
    "uuid",
}
IMPURE_CALLS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "exists", "is_file", "is_dir", "stat", "lstat"),
    *("iterdir", "glob", "rglob", "mkdir", "unlink", "touch", "expanduser", "cwd", "home", "now", "utcnow", "today"),
}

# Spelled in pieces, so that this file does not hold what it refuses.
STRANGERS = re.compile(
    "|".join(
        (
            r"(?<![\w.*}>)/-])/(?:wor" + r"k|roo" + r"t|far" + r"m)/",
            r"/opt/whee" + "ls",
            r"/tmp/studi" + "o",
            r"farm-(?:studi" + r"o|benc" + r"h)",
            r"pypi\.o" + "rg",
            r"python" + "hosted",
            r"registry\.npm" + "js",
            r"deb\.deb" + "ian",
        )
    )
)

LONGEST = 500

HIDDEN = {".ci", ".github"}
GENERATED = {"__pycache__", "build", "dist"}


def name_of(path: Path) -> str:
    """`gpulayer/spec/jobs.py` is `spec.jobs`, a folder's `__init__` is the folder, the package itself is empty."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def under(name: str, prefixes: set[str] | tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def row_of(name: str) -> str:
    """The longest row that holds for a module."""
    if name == "":
        return ""
    return max((row for row in TABLE if row and under(name, {row})), key=len, default="(no row)")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere in a file, at its top or inside a function, with the line."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            for alias in node.names:
                below = f"{module}.{alias.name}"
                is_module = module.startswith("gpulayer") and below.removeprefix("gpulayer.") in MODULES
                yield below if is_module else module, node.lineno


def ours(path: Path) -> Iterator[tuple[str, int]]:
    """Imports of our own modules, named as in the table."""
    for module, line in imports(path):
        if module == "gpulayer" or module.startswith("gpulayer."):
            yield module.removeprefix("gpulayer").removeprefix("."), line


def project_files() -> Iterator[Path]:
    """All files of the project, in a repository or an unpacked source distribution, without what tools have made."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name in HIDDEN or not (name.startswith(".") or name in GENERATED)]
        yield from (Path(folder, name) for name in files if name != ".git")


def test_every_module_has_a_row_and_every_row_a_module() -> None:
    without_row = [name for name in MODULES if row_of(name) not in TABLE]
    without_module = [row for row in TABLE if row not in MODULES]
    assert not without_row
    assert not without_module


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    allowed = TABLE[row_of(name)]
    wrong = [
        f"{MODULES[name].relative_to(ROOT)}:{line}: imports {target or 'gpulayer'}, but may import {sorted(allowed)}"
        for target, line in ours(MODULES[name])
        if not under(target, allowed)
    ]
    assert not wrong


def test_every_arrow_of_the_table_is_used() -> None:
    used = {(row_of(name), target) for name, path in MODULES.items() for target, _ in ours(path)}
    idle = [
        f"{row or 'gpulayer'} -> {allowed}"
        for row, targets in TABLE.items()
        if not targets >= EVERYTHING
        for allowed in targets
        if not any(one == row and under(target, {allowed}) for one, target in used)
    ]
    assert not idle


def test_rows_point_to_rows_above_them() -> None:
    folders = [row for row in TABLE if "." not in row]
    upward = [
        (row, target)
        for row, targets in TABLE.items()
        for target in targets
        if row and folders.index(target.partition(".")[0]) > folders.index(row.partition(".")[0])
        if (row, target) not in {("__main__", "cli"), ("cli", "")}
    ]
    assert not upward


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: {target for target, _ in ours(path)} & MODULES.keys() for name, path in MODULES.items()}
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert not graph, f"these modules, or what they lead to, import each other in a circle: {graph}"


def test_asyncssh_is_imported_in_one_place() -> None:
    users = {
        name for name, path in MODULES.items() for module, _ in imports(path) if module.split(".")[0] == "asyncssh"
    }
    assert users == {"fleet.sshlibrary"}


def on_hosts() -> set[str]:
    """What runs on hosts: what is sent, and what every package carries along."""
    return {name.removeprefix("gpulayer.") for name in shipped()} | {"remote", "gpu"}


def test_what_is_sent_is_what_the_house_says() -> None:
    pattern = r"remote(\.\w+)?|gpu(\.discovery\w*|\.\w+_child)?|probe"
    assert on_hosts() == {name for name in MODULES if re.fullmatch(pattern, name)}


@pytest.mark.parametrize("name", sorted(on_hosts()))
def test_shipped_modules_need_only_the_standard_library_of_python_3_9(name: str) -> None:
    path = MODULES[name]
    strangers = {
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for module, line in imports(path)
        if module.split(".")[0] not in sys.stdlib_module_names and not module.startswith("gpulayer")
    }
    to_what_stays = {target for target, _ in ours(path) if target not in on_hosts()}
    assert not strangers
    assert not to_what_stays
    ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 9))


@pytest.mark.parametrize("name", [name for name in MODULES if under(name, PURE)])
def test_what_decides_is_pure(name: str) -> None:
    if name in READS_FILES:
        banned = {module for module, _ in imports(MODULES[name])} & {"socket", "subprocess", "time", "asyncio"}
        assert not banned
        return
    path = MODULES[name]
    modules = {f"line {line}: {module}" for module, line in imports(path) if module.split(".")[0] in IMPURE_MODULES}
    calls = {
        f"line {node.lineno}: {called}()"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and (called := called_name(node)) in IMPURE_CALLS
    }
    assert not modules
    assert not calls


def called_name(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in project_files()
        if path.suffix == ".py" and (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST
    }
    assert not long


def test_the_project_speaks_of_itself_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in project_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if STRANGERS.search(line)
    ]
    assert not found


def test_strangers_are_recognised() -> None:
    root = "/roo" + "t/"
    assert STRANGERS.search(f"see {root}x")
    assert STRANGERS.search('"' + "/wor" + 'k/main"')
    assert not STRANGERS.search("<run>/work/out and {run}/work/out and runs/*/work/out and ./work/out")


TESTS = sorted((ROOT / "tests").rglob("*.py"))


@functools.cache
def functions(path: Path) -> list[tuple[str, int, bool, set[str]]]:
    """Every function of a file: its name, its line, whether it asserts by itself, and what it calls."""
    return [
        (
            node.name,
            node.lineno,
            any(isinstance(part, ast.Assert) for part in ast.walk(node)),
            {called_name(part) for part in ast.walk(node) if isinstance(part, ast.Call)},
        )
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_every_test_asserts_something() -> None:
    asserting = {"raises", "warns", "fail"}
    below = [(name, asserts, called) for path in TESTS for name, _, asserts, called in functions(path)]
    while more := {name for name, asserts, called in below if asserts or called & asserting} - asserting:
        asserting |= more
    silent = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in TESTS
        for name, line, asserts, called in functions(path)
        if name.startswith("test_") and not asserts and not called & asserting
    ]
    assert not silent


def test_no_test_is_skipped_but_by_the_two_markers_of_what_it_needs() -> None:
    skips = [
        (str(path.relative_to(ROOT)), node.attr)
        for path in TESTS
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr in {"skip", "skipif", "xfail", "importorskip"}
    ]
    assert skips == [("tests/conftest.py", "skip")]


@pytest.mark.linux("the test itself")
def test_what_needs_linux_is_skipped_elsewhere_with_a_code(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    conftest.pytest_runtest_setup(request.node)
    monkeypatch.setattr(conftest, "sys", SimpleNamespace(platform="darwin"))
    with pytest.raises(Skipped, match=r"^\[needs_linux\] the test itself$"):
        conftest.pytest_runtest_setup(request.node)


@pytest.mark.root("this test")
def test_what_needs_root_is_skipped_for_others_with_a_code(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "os", SimpleNamespace(geteuid=lambda: 1000))
    with pytest.raises(Skipped, match=r"^\[needs_root\] this test$"):
        conftest.pytest_runtest_setup(request.node)
