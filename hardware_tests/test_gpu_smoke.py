"""The rows of the matrix that a GPU's owner asks for first: a 512x512 product on the device, through the whole path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gpulayer.spec import support
from gpulayer.spec.support import Accelerator, Framework, JobKind, Row

Proven = Callable[[Row], Awaitable[None]]

# The row that each test of this file proves, by the test's name.
SMOKE = {
    "test_mps_independent_job": support.row(Accelerator.MPS, JobKind.INDEPENDENT, Framework.TORCH),
    "test_mlx_metal": support.row(Accelerator.MPS, JobKind.INDEPENDENT, Framework.MLX),
    "test_cuda_independent_jobs": support.row(Accelerator.CUDA, JobKind.INDEPENDENT, Framework.TORCH),
}


async def test_mps_independent_job(proven: Proven) -> None:
    await proven(SMOKE["test_mps_independent_job"])


async def test_mlx_metal(proven: Proven) -> None:
    await proven(SMOKE["test_mlx_metal"])


async def test_cuda_independent_jobs(proven: Proven) -> None:
    """One on each GPU, all at once; each sees its own alone."""
    await proven(SMOKE["test_cuda_independent_jobs"])
