from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Commander


@pytest.fixture
def gpulayer(tmp_path: Path) -> Commander:
    """`gpulayer("plan")` runs the command in an empty folder with an empty home."""
    for name in ("project", "home"):
        (tmp_path / name).mkdir()
    return Commander(folder=tmp_path / "project", home=tmp_path / "home")
