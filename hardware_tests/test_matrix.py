"""Every other row of the matrix that may be declared, one test each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gpulayer.spec import support
from gpulayer.spec.support import Accelerator, Framework, JobKind, Row
from hardware_tests.proof import row_name

SMOKE = (
    support.row(Accelerator.MPS, JobKind.INDEPENDENT, Framework.TORCH),
    support.row(Accelerator.MPS, JobKind.INDEPENDENT, Framework.MLX),
    support.row(Accelerator.CUDA, JobKind.INDEPENDENT, Framework.TORCH),
)
OTHERS = tuple(row for row in support.matrix() if row.allowed and row not in SMOKE)


@pytest.mark.parametrize("row", OTHERS, ids=row_name)
async def test_row(proven: Callable[[Row], Awaitable[None]], row: Row) -> None:
    await proven(row)
