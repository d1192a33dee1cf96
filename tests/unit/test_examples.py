"""What README, the examples and the documentation show holds: documents load, links lead on, pages are listed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpulayer.gpu.facts import facts_from_report
from gpulayer.placement.plan import HostView
from gpulayer.placement.verdicts import Fits, verdict
from gpulayer.spec.inventory import Host, load_inventory
from gpulayer.spec.jobs import load_jobs
from tests import fleet_folders

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if ".gpulayer" not in path.parts)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])


def loads(path: Path) -> bool:
    """Whether a document, by its kind, loads and says something."""
    if "hosts:" in path.read_text(encoding="utf-8").splitlines():
        return bool(load_inventory(path).hosts)
    return bool(load_jobs(path).jobs)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_is_a_valid_document(path: Path) -> None:
    assert loads(path)


def test_the_example_inventory_shows_every_key_of_a_host() -> None:
    path = ROOT / "inventory.example.yaml"
    schema = json.loads((ROOT / "schemas" / "inventory.schema.json").read_text(encoding="utf-8"))
    keys = set(schema["$defs"]["host"]["properties"])
    shown = set(re.findall(r"^    (\w+):", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert shown == keys - LATER
    assert loads(path)


def test_the_example_jobs_show_every_key_of_a_job() -> None:
    path = ROOT / "jobs.example.yaml"
    schema = json.loads((ROOT / "schemas" / "jobs.schema.json").read_text(encoding="utf-8"))
    job = schema["$defs"]["job"]["properties"]
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"^    (\w+):", text, re.MULTILINE)) == set(job)
    assert set(re.findall(r"^      (\w+):", text, re.MULTILINE)) == set(job["resources"]["properties"])
    for key in ("where", "distributed"):
        line = re.search(rf"^    {key}: (.*)$", text, re.MULTILINE)
        assert line
        assert all(f"{word}: " in line[1] for word in job[key]["properties"])
    assert loads(path)


# Keys that have one allowed value today and nothing to show.
LATER = {"jobs_per_device"}


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```", README, re.DOTALL | re.MULTILINE))
def test_the_documents_in_readme_are_valid(block: str, tmp_path: Path) -> None:
    path = tmp_path / "document.yaml"
    path.write_text(block, encoding="utf-8")
    assert loads(path)


def test_the_first_lines_of_readme_write_valid_documents(tmp_path: Path) -> None:
    lines = re.findall(r"^    (printf .*)$", README, re.MULTILINE)
    subprocess.run("\n".join(lines), shell=True, cwd=tmp_path, check=True)  # noqa: S602  as a reader's shell would
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inventory.yaml", "jobs.yaml"]
    assert all(loads(path) for path in tmp_path.iterdir())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_bench_table_lists_every_bench() -> None:
    listed = set(
        re.findall(r"^\| `(\w+\.py)`", (ROOT / "bench" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert listed == {path.name for path in (ROOT / "bench").glob("*.py")}


APPLE = {"mps_smoke": "smoke.py", "mlx_metal": "product.py"}


def fits(example: str, machine: str) -> bool:
    """Whether an example's job would be placed on a machine of the simulated fleet."""
    report = json.loads((fleet_folders.HERE / machine / "report.json").read_text(encoding="utf-8"))
    facts = facts_from_report({**report, "started_at": "2026-11-30T10:00:00Z"})
    job = load_jobs(ROOT / "examples" / example / "jobs.yaml").jobs["product"]
    return isinstance(verdict(job, HostView(host=Host(name="machine"), reached=True, facts=facts)), Fits)


@pytest.mark.parametrize("example", APPLE)
def test_the_apple_examples_are_placed_on_macs_that_show_their_framework(example: str) -> None:
    assert fits(example, "m2-ultra")
    assert fits(example, "m1") == (example == "mps_smoke")
    assert not fits(example, "mac-vm")
    assert not fits(example, "rtx-4090")


@pytest.mark.parametrize("example", APPLE)
def test_the_programs_of_the_apple_examples_compute_rightly_on_a_cpu(example: str, tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "examples" / example / APPLE[example])]
    subprocess.run(program, cwd=tmp_path, check=True, env={**os.environ, "GPULAYER_ACCELERATOR": "cpu"})
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["size"], result["wrong"]) == (512, 0)
