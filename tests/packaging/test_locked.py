"""What `make setup` installs is exact, and a file that is not the one whose hash is written down is not installed."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+)(.*(?:\n {4}--hash=.*)*)", re.MULTILINE)


def locked(name: str) -> dict[str, set[str]]:
    """Each package of a file with its versions (one, or one for each kind of Python)."""
    found: dict[str, set[str]] = {}
    for package, version, _ in ENTRY.findall((ROOT / name).read_text("utf-8")):
        found.setdefault(package, set()).add(version)
    return found


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("requirements/run.txt", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["build"]]),
        ("requirements/dev.txt", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]),
        ("constraints.txt", PROJECT["optional-dependencies"]["frameworks"]),
    ],
)
def test_what_the_project_asks_for_is_locked_within_its_bounds(name: str, asked: list[str]) -> None:
    exact = locked(name)
    wrong = [
        text
        for text in asked
        for wanted in [Requirement(text)]
        if not any(wanted.specifier.contains(version) for version in exact.get(canonicalize_name(wanted.name), ()))
    ]
    assert wrong == [], "make lock"


@pytest.mark.parametrize("name", ["run", "dev"])
def test_every_file_that_may_be_installed_has_its_hash(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text("utf-8")
    entries = ENTRY.findall(text)
    assert [package for package, _, rest in entries if "--hash=sha256:" not in rest] == []
    assert len(entries) == sum(1 for line in text.splitlines() if line[:1] not in {" ", "#", ""})


def test_the_locks_agree() -> None:
    run, dev, every = map(locked, ("requirements/run.txt", "requirements/dev.txt", "constraints.txt"))
    assert run.items() <= dev.items() <= every.items()


def recipe() -> list[list[str]]:
    """The calls of pip with which `make setup` begins from nothing, as words."""
    asked = ["make", "--dry-run", "--always-make", ".venv/developed"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [line.split() for line in lines if " pip install " in line]


def test_setup_installs_nothing_whose_hash_or_version_is_not_written_down() -> None:
    bare = [
        words
        for words in recipe()
        if "--require-hashes" not in words and "--no-deps" not in words and "--constraint" not in words
    ]
    assert len(recipe()) == 4
    assert bare == []


def fake(folder: Path) -> Path:
    """A package that somebody else made, under the name and version of one that we trust."""
    path = folder / "mdurl-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("mdurl.py", "raise SystemExit('not the mdurl that was locked')\n")
        wheel.writestr("mdurl-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: mdurl\nVersion: 0.1.2\n")
        wheel.writestr("mdurl-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"").digest()).rstrip(b"=").decode()
        wheel.writestr("mdurl-0.1.2.dist-info/RECORD", f"mdurl-0.1.2.dist-info/RECORD,sha256={digest},0\n")
    return path


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    wheel = fake(tmp_path)
    (entry,) = (match[0] for match in ENTRY.finditer((FOLDER / "run.txt").read_text("utf-8")) if match[1] == "mdurl")
    (first,) = (words for words in recipe() if words[-1] == "requirements/run.txt")
    installed = tmp_path / "installed"

    def install(lines: str) -> subprocess.CompletedProcess[str]:
        requirements = tmp_path / "run.txt"
        requirements.write_text(lines)
        here = ["--no-index", "--find-links", str(tmp_path), "--target", str(installed), "--disable-pip-version-check"]
        words = [sys.executable, *first[1:-1], str(requirements), *here]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)

    refused = install(entry)
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not installed.exists()
    own = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert install(f"mdurl==0.1.2 --hash=sha256:{own}\n").returncode == 0
    assert (installed / "mdurl.py").exists()
