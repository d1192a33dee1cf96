"""Squares the matrix with ExecuTorch, lowered to a delegate of the device that GPUlayer chose."""

import os
from importlib.metadata import version
from typing import Any

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from product import SIZE, matrix, tell, wrong_rows


def xnnpack() -> Any:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner  # noqa: PLC0415

    return XnnpackPartitioner()


def mlx() -> Any:
    from executorch.backends.mlx.partitioner import MLXPartitioner  # noqa: PLC0415

    return MLXPartitioner()


def coreml() -> Any:
    """Core ML takes half precision unless told otherwise, in which the product is not exact."""
    import coremltools  # noqa: PLC0415
    from executorch.backends.apple.coreml.compiler import CoreMLBackend  # noqa: PLC0415
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner  # noqa: PLC0415

    specs = CoreMLBackend.generate_compile_specs(
        compute_unit=coremltools.ComputeUnit.CPU_AND_GPU, compute_precision=coremltools.precision.FLOAT32
    )
    return CoreMLPartitioner(compile_specs=specs)


def cuda() -> Any:
    from executorch.backends.cuda.cuda_backend import CudaBackend  # noqa: PLC0415
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner  # noqa: PLC0415

    return CudaPartitioner([CudaBackend.generate_method_name_compile_spec("forward")])


# In order of preference: MLX computes on the GPU for sure, Core ML where it likes.
DELEGATES = {
    "cpu": {"XnnpackBackend": xnnpack},
    "mps": {"MLXBackend": mlx, "CoreMLBackend": coreml},
    "cuda": {"CudaBackend": cuda},
}

runtime = Runtime.get()
accelerator = os.environ["GPULAYER_ACCELERATOR"]
registered = runtime.backend_registry.registered_backend_names
delegate = next(name for name in DELEGATES[accelerator] if name in registered)

values = torch.tensor(matrix(), dtype=torch.float32)
model = torch.nn.Linear(SIZE, SIZE, bias=False)
model.weight.data = values.T.contiguous()
exported = torch.export.export(model.eval(), (values,))
program = to_edge_transform_and_lower(exported, partitioner=[DELEGATES[accelerator][delegate]()]).to_executorch()
if delegate.encode() not in program.buffer:
    raise SystemExit(f"the program has nothing for {delegate}: the CPU alone would compute")
(product,) = runtime.load_program(program.buffer).load_method("forward").execute([values])
tell(
    wrong_rows=wrong_rows(product.tolist()),
    version=version("executorch"),
    device=accelerator,
    name=delegate,
    visible=None,
    size=SIZE,
)
