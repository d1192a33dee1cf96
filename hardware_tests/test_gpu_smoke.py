"""The rows of the matrix that a GPU's owner asks for first: a 512x512 product on the device, through the whole path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gpulayer.spec import support
from gpulayer.spec.support import Accelerator, Framework, JobKind, Row

Proven = Callable[[Row], Awaitable[None]]


async def test_mps_independent_job(proven: Proven) -> None:
    await proven(support.row(Accelerator.MPS, JobKind.INDEPENDENT, Framework.TORCH))


async def test_mlx_metal(proven: Proven) -> None:
    await proven(support.row(Accelerator.MPS, JobKind.INDEPENDENT, Framework.MLX))


async def test_cuda_independent_jobs(proven: Proven) -> None:
    """One on each GPU, all at once; each sees its own alone."""
    await proven(support.row(Accelerator.CUDA, JobKind.INDEPENDENT, Framework.TORCH))
