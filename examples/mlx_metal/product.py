"""Multiplies two matrices with MLX on the device that GPUlayer chose. Exit code 1: it computed something else."""

import json
import os
import sys

import mlx.core as mx

SIZE = 512

device = {"mps": mx.gpu, "cuda": mx.gpu, "cpu": mx.cpu}[os.environ["GPULAYER_ACCELERATOR"]]
mx.random.seed(0)
# Small whole numbers: every sum is exact in float32, whatever the order in which a GPU adds.
one = mx.random.randint(-8, 9, (SIZE, SIZE), stream=mx.cpu).astype(mx.float32, stream=mx.cpu)
other = mx.random.randint(-8, 9, (SIZE, SIZE), stream=mx.cpu).astype(mx.float32, stream=mx.cpu)
product = mx.matmul(one, other, stream=device)
right = mx.matmul(one, other, stream=mx.cpu)
wrong = int(mx.sum(product != right, stream=mx.cpu).item())
result = {"device": str(device), "metal": mx.metal.is_available(), "size": SIZE, "wrong": wrong}
with open("result.json", "w", encoding="utf-8") as file:  # noqa: PTH123
    json.dump(result, file)
print(json.dumps(result))
sys.exit(1 if wrong else 0)
