from __future__ import annotations

import pytest

from gpulayer.spec import support
from gpulayer.spec.support import Accelerator, Backend, Framework, JobKind


def test_the_matrix_has_each_combination_once() -> None:
    rows = support.matrix()
    keys = [(row.accelerator, row.kind, row.framework) for row in rows]
    wanted = {(a, k, f) for a in Accelerator for k in JobKind for f in (*Framework, None)}
    assert set(keys) == wanted
    assert len(keys) == len(wanted)
    assert all(row.why for row in rows)


def test_no_distributed_job_runs_on_the_apple_gpu() -> None:
    rows = [row for row in support.matrix() if row.kind is JobKind.DISTRIBUTED and row.accelerator is Accelerator.MPS]
    assert len(rows) == len(Framework) + 1
    assert not any(row.allowed for row in rows)
    torch = support.row(Accelerator.MPS, JobKind.DISTRIBUTED, Framework.TORCH)
    assert "gloo" in torch.why


@pytest.mark.parametrize(
    ("framework", "accelerator", "capabilities"),
    [
        (Framework.TORCH, Accelerator.MPS, ("torch.mps",)),
        (Framework.TORCH, Accelerator.CUDA, ("torch.cuda",)),
        (Framework.TORCH, Accelerator.ROCM, ("torch.rocm",)),
        (Framework.TORCH, Accelerator.CPU, ("torch",)),
        (Framework.MLX, Accelerator.MPS, ("mlx.metal",)),
        (Framework.MLX, Accelerator.CUDA, ("mlx.cuda",)),
        (Framework.MLX, Accelerator.CPU, ("mlx.cpu",)),
        (Framework.EXECUTORCH, Accelerator.MPS, ("executorch.coreml", "executorch.mlx", "executorch.metal")),
        (Framework.EXECUTORCH, Accelerator.CUDA, ("executorch.cuda",)),
        (Framework.EXECUTORCH, Accelerator.CPU, ("executorch.xnnpack",)),
        (None, Accelerator.MPS, ()),
    ],
)
def test_what_a_framework_demands(
    framework: Framework | None, accelerator: Accelerator, capabilities: tuple[str, ...]
) -> None:
    assert support.demanded(framework, accelerator) == capabilities
    assert support.row(accelerator, JobKind.INDEPENDENT, framework).capabilities == capabilities


def test_every_demanded_capability_is_in_the_vocabulary_and_no_retired_name_is() -> None:
    demanded = {name for row in support.matrix() for name in row.capabilities}
    demanded |= {support.backend_capability(backend) for backend in Backend}
    assert demanded <= set(support.CAPABILITIES)
    assert not set(support.RETIRED) & set(support.CAPABILITIES)
    assert len(set(support.CAPABILITIES)) == len(support.CAPABILITIES)


def test_advice_for_a_retired_name_offers_what_exists() -> None:
    for name in ("executorch.coreml", "executorch.mlx", "executorch.metal"):
        assert name in support.RETIRED["executorch.mps"]
        assert name in support.CAPABILITIES


def test_double_precision_never_fits_the_apple_gpu() -> None:
    assert support.NEVER_DTYPES[Accelerator.MPS] == {"float64", "complex128"}
    assert {word for words in support.NEVER_DTYPES.values() for word in words} <= set(support.DTYPES)


def test_other_words_lead_to_words_that_exist() -> None:
    known = {*Accelerator, *Framework, *support.MemoryKind, *Backend, *support.DTYPES}
    assert set(support.OTHER_WORDS.values()) <= known
    assert not set(support.OTHER_WORDS) & known
