"""Each way to install GPUlayer gives a working command and the schemas of the source."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import gpulayer

ROOT = Path(__file__).parents[2]
SCHEMAS = {path.name.removesuffix(".schema.json"): path for path in (ROOT / "schemas").glob("*.schema.json")}


def run(*command: str | Path, cwd: Path) -> str:
    """Return what a command prints; its whole output is the message where it fails.

    Nothing is found through PYTHONPATH: it would come before what is installed.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


class Installed:
    """A virtual environment with GPUlayer; its dependencies are those of the environment that runs the tests."""

    def __init__(self, folder: Path, *what: str | Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.folder, self.bin = folder, folder / "bin"
        self.site = Path(
            run(self.bin / "python", "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
        )
        # A plain path in a .pth is searched last, and the .pth files there (our own editable install) are not read.
        (self.site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python", "--disable-pip-version-check", "install")
        run(*pip, "--quiet", "--no-deps", "--no-index", "--no-build-isolation", *what, cwd=folder)

    def python(self, *arguments: str) -> str:
        return run(self.bin / "python", *arguments, cwd=self.folder)

    def works(self) -> None:
        """The command and `python -m` answer from a folder that holds nothing of ours; every schema is the source's."""
        version = run(self.bin / "gpulayer", "--version", cwd=self.folder)
        assert gpulayer.__version__ in version
        assert self.python("-m", "gpulayer", "--version") == version
        assert {name: self.schema(name) for name in SCHEMAS} == {
            name: json.loads(path.read_text(encoding="utf-8")) for name, path in SCHEMAS.items()
        }

    def schema(self, name: str) -> Any:
        program = "import json, sys; from gpulayer.spec.schemas import schema; print(json.dumps(schema(sys.argv[1])))"
        return json.loads(self.python("-c", program, name))


def contents(wheel: Path) -> dict[str, str]:
    """The files of a wheel by hash."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def build(source: Path, target: str, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source, so that building changes nothing here."""
    folder = tmp_path_factory.mktemp("source") / "gpulayer"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "dist", "build")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored))


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(build(checkout, "sdist", tmp_path_factory.mktemp("sdist"))) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top


def test_a_wheel_works(wheel: Path, tmp_path: Path) -> None:
    Installed(tmp_path / "venv", wheel).works()
    packaged = {name for name in contents(wheel) if name.startswith("gpulayer/schemas/")}
    assert packaged == {f"gpulayer/schemas/{path.name}" for path in SCHEMAS.values()}
    assert "gpulayer/py.typed" in contents(wheel)


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    assert contents(build(unpacked, "wheel", tmp_path)) == contents(wheel)
    assert {"Makefile", "README.md", "tests", "examples", "schemas", "inventory.example.yaml"} <= {
        path.name for path in unpacked.iterdir()
    }


def test_an_editable_install_reads_the_source_and_never_a_stale_copy(checkout: Path, tmp_path: Path) -> None:
    installed = Installed(tmp_path / "venv", "--editable", checkout)
    installed.works()
    assert {path.name for path in (installed.site / "gpulayer" / "schemas").iterdir()}, "no copy to be misled by"

    path = checkout / "schemas" / "jobs.schema.json"
    changed = json.loads(path.read_text(encoding="utf-8")) | {"$comment": "changed after the install"}
    path.write_text(json.dumps(changed), encoding="utf-8")
    assert installed.schema("jobs") == changed
