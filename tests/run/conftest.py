"""Three real sshd hosts that the tests of this folder share, and a project for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpulayer.fleet.transport import ConnectOptions
from tests.run.project import Project
from tests.sshd import SshdHost

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def trio(sshd_host: Callable[..., SshdHost]) -> dict[str, SshdHost]:
    """Three hosts with two CPU slots each."""
    return {name: sshd_host(name) for name in ("run-one", "run-two", "run-three")}


@pytest.fixture
async def project(
    tmp_path: Path, trio: dict[str, SshdHost], connect_options: ConnectOptions
) -> AsyncIterator[Project]:  # fmt: skip
    """A project on the three hosts; no two tests share a name, so that none sees another's runs."""
    folder = tmp_path / f"project-{next(_NUMBERS)}"
    folder.mkdir()
    project = Project(
        folder=folder, hosts=dict(trio), options=connect_options, extra={name: {"max_jobs": 2} for name in trio}
    )
    yield project
    await project.close()
