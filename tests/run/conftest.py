"""Three real sshd hosts that the tests of this folder share, and a project for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpulayer.fleet.transport import ConnectOptions
from tests.run.project import Project, new_project
from tests.sshd import SshdHost


@pytest.fixture(scope="session")
def trio(sshd_host: Callable[..., SshdHost]) -> dict[str, SshdHost]:
    """Three hosts with two CPU slots each."""
    return {name: sshd_host(name) for name in ("run-one", "run-two", "run-three")}


@pytest.fixture
async def project(
    tmp_path: Path, trio: dict[str, SshdHost], connect_options: ConnectOptions
) -> AsyncIterator[Project]:  # fmt: skip
    """A project on the three hosts."""
    async with new_project(tmp_path, "project", trio, connect_options) as project:
        yield project
