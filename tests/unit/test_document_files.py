"""Files of `tests/documents`: each valid one loads, each invalid one has the problems of its `.expect` file.

A file's name begins with what it is: `jobs-` or `inventory-`. A line of `.expect` is `line:column: field: message`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.errors import InvalidDocumentError
from gpulayer.spec.inventory import Inventory, load_inventory
from gpulayer.spec.jobs import JobSet, load_jobs

FOLDER = Path(__file__).parents[1] / "documents"


def load(path: Path) -> JobSet | Inventory:
    return load_jobs(path) if path.name.startswith("jobs-") else load_inventory(path)


def files(kind: str) -> list[Path]:
    found = sorted((FOLDER / kind).glob("*.yaml"))
    assert found
    return found


@pytest.mark.parametrize("path", files("valid"), ids=lambda path: path.stem)
def test_a_valid_file_loads(path: Path) -> None:
    loaded = load(path)
    assert loaded.path == path
    assert loaded.jobs if isinstance(loaded, JobSet) else loaded.hosts


@pytest.mark.parametrize("path", files("invalid"), ids=lambda path: path.stem)
def test_an_invalid_file_is_told_all_its_problems(path: Path) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        load(path)
    heads = [str(problem).split("\n")[0].removeprefix(f"{path}:") for problem in caught.value.problems]
    assert heads == path.with_suffix(".expect").read_text("utf-8").splitlines()
