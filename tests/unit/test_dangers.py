"""What gives others a program to run, or a file to write, is used nowhere: ruff looks, and a reader of the syntax too.

Ruff's findings can be waved through on a line; these exceptions stand here, where each is seen.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_house import ROOT, parse, project_files

# Modules of which any use is one too many: their data is a program, or a folder to write into.
MODULES = {"dill", "jsonpickle", "marshal", "pickle", "shelve", "tarfile", "zipfile"}
BUILTINS = {"__import__", "compile", "eval", "exec"}
ATTRIBUTES = {"create_subprocess_shell", "extractall", "getoutput", "getstatusoutput", "unpack_archive"}
FUNCTIONS = {"os.popen", "os.system"}
FUNCTIONS |= {
    f"yaml.{name}{every}" for name in ("full_load", "load", "safe_load", "unsafe_load") for every in ("", "_all")
}
ALLOWED = {
    # What a loader does: it runs our own modules, whose hash the host has checked.
    ("gpulayer/remote/importer.py", "compile"),
    ("gpulayer/remote/importer.py", "exec"),
    # What it has compiled of them and kept, in a folder that is its user's alone.
    ("gpulayer/remote/importer.py", "marshal"),
    # What starts a child of the probe: the source comes from our own process, on the command line.
    ("gpulayer/gpu/discovery_child.py", "compile"),
    ("gpulayer/gpu/discovery_child.py", "exec"),
    # The rival that is measured.
    ("bench/documents.py", "yaml.load"),
}
SNIPPETS = {
    "pickle": ("import pickle\npickle.loads(b'')", "S301"),
    "marshal": ("import marshal\nmarshal.loads(b'')", "S302"),
    "tarfile": ("import tarfile\ntarfile.open('x').extractall('.')", "S202"),
    "eval": ("eval('1')", "S307"),
    "exec": ("exec('1')", "S102"),
    "compile": ("compile('1', '', 'exec')", None),
    "__import__": ("__import__('os')", None),
    "shell=True": ("import subprocess\nsubprocess.run(f'ls {x}', shell=True)", "S602"),
    "create_subprocess_shell": ("import asyncio\nasyncio.create_subprocess_shell('ls')", None),
    "os.system": ("import os\nos.system('ls ' + x)", "S605"),
    "os.popen": ("import os\nos.popen('ls ' + x)", "S605"),
    "getoutput": ("import subprocess\nsubprocess.getoutput('ls ' + x)", "S605"),
    "yaml.load": ("import yaml\nyaml.load('', yaml.Loader)", "S506"),
    "yaml.unsafe_load": ("import yaml\nyaml.unsafe_load('')", None),
    "yaml.safe_load": ("import yaml\nyaml.safe_load('')", None),
    "unpack_archive": ("import shutil\nshutil.unpack_archive('x')", None),
}


def dangers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every line that does what is not done here, with its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from ((node.lineno, name) for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (name := f"{node.value.id}.{node.attr}") in FUNCTIONS:
                yield node.lineno, name
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            yield node.value.lineno, "shell=True"


def code() -> list[Path]:
    """All that is not a test: a test's shell and archive are its own."""
    return [path for path in project_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"]


def test_nothing_runs_or_unpacks_what_others_wrote() -> None:
    found = {
        (str(path.relative_to(ROOT)), what): f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in code()
        for line, what in dangers(parse(path))
    }
    assert [where for key, where in found.items() if key not in ALLOWED] == []
    assert ALLOWED - found.keys() == set(), "an exception that is no longer used"


@pytest.mark.parametrize("name", SNIPPETS)
def test_each_danger_is_recognised(name: str) -> None:
    assert name in {what for _, what in dangers(ast.parse(SNIPPETS[name][0]))}


def test_ruff_looks_for_them_in_what_we_ship() -> None:
    text = "\n".join(snippet for snippet, _ in SNIPPETS.values())
    ruff = Path(sys.executable).with_name("ruff")
    command = [
        str(ruff),
        "check",
        "--no-cache",
        "--output-format=concise",
        "--stdin-filename=gpulayer/fleet/snippets.py",
        "-",
    ]
    done = subprocess.run(command, input=text, cwd=ROOT, capture_output=True, text=True, check=False)
    assert {rule for _, rule in SNIPPETS.values() if rule and f" {rule} " not in done.stdout} == set()
