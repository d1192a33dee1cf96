"""What the hardware tests share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.spec.support import Row
from hardware_tests.proof import prove


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: sockets may be made below it."""
    made = Path(tempfile.mkdtemp(prefix="gl-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def proven(request: pytest.FixtureRequest, folder: Path) -> Callable[[Row], Coroutine[Any, Any, None]]:
    """Prove a row on this machine and write the evidence: `await proven(row)`."""
    return lambda row: prove(row, request.node.nodeid, folder)
