"""The package from Python: its face, and the documented example."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from typing import Any

import pytest

import gpulayer
from tests.cli.command import ROOT, Commander


def documented() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sdk.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_documented_example_runs(gpulayer: Commander) -> None:
    example, _ = documented()
    gpulayer.write("example.py", example)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=gpulayer.folder,
        env=gpulayer.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary, output = map(ast.literal_eval, done.stdout.splitlines())
    assert summary["refuse"] == 0
    assert output == {"square-1": b"1\n", "square-2": b"4\n", "square-3": b"9\n"}


def test_the_documented_gang_is_one_of_two_hosts() -> None:
    scope: dict[str, Any] = {}
    exec(documented()[1], scope)  # noqa: S102  # our own words
    train = scope["train"]
    assert isinstance(train, gpulayer.DistributedJob)
    assert (train.nodes, train.processes) == (2, 2)


def test_every_name_is_there_and_known_to_type_checkers() -> None:
    source = ast.parse((ROOT / "gpulayer" / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        (node.module, alias.name)
        for block in source.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {(home, name) for home, names in gpulayer._HOMES.items() for name in names}
    assert all(getattr(gpulayer, name) is not None for _, name in typed)
    assert {name for _, name in typed} <= set(dir(gpulayer))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        gpulayer.nonsense  # noqa: B018


def test_the_package_imports_nothing_until_it_is_used() -> None:
    program = "import sys, gpulayer; print([name for name in sys.modules if name.startswith('gpulayer.')])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_distributed_job_on_mps_raises_what_the_document_would_say() -> None:
    with pytest.raises(gpulayer.InvalidDocumentError, match="no PyTorch release"):
        gpulayer.DistributedJob(name="gang", command=("python", "t.py"), accelerator="mps")
