"""Every other row of the matrix that may be declared, one test each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gpulayer.spec import support
from gpulayer.spec.support import Row
from hardware_tests.test_gpu_smoke import SMOKE

OTHERS = tuple(row for row in support.matrix() if row.allowed and row not in SMOKE.values())


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.name)
async def test_row(proven: Callable[[Row], Awaitable[None]], row: Row) -> None:
    await proven(row)
