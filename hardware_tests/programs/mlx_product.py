"""Squares the matrix with MLX, on the device that GPUlayer chose."""

import os
from importlib.metadata import version

import mlx.core as mx
from product import SIZE, matrix, tell, wrong_rows

kind = mx.cpu if os.environ["GPULAYER_ACCELERATOR"] == "cpu" else mx.gpu
mx.set_default_device(kind)
there = mx.array(matrix(), dtype=mx.float32)
product = there @ there
mx.eval(product)
tell(
    wrong_rows=wrong_rows(product.tolist()),
    version=version("mlx"),
    device="cpu" if mx.default_device() == mx.Device(mx.cpu, 0) else "gpu",
    name=mx.device_info(kind).get("device_name"),
    visible=mx.device_count(kind),
    size=SIZE,
)
