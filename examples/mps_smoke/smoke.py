"""Multiplies two matrices on the device that GPUlayer chose. Exit code 1: the device computed something else."""

import json
import os
import sys

import torch

SIZE = 512

device = torch.device(os.environ["GPULAYER_ACCELERATOR"])
torch.manual_seed(0)
# Small whole numbers: every sum is exact in float32, whatever the order in which a GPU adds.
one = torch.randint(-8, 9, (SIZE, SIZE)).to(torch.float32)
other = torch.randint(-8, 9, (SIZE, SIZE)).to(torch.float32)
product = one.to(device) @ other.to(device)
wrong = int((product.cpu() != one @ other).sum())
result = {"torch": torch.__version__, "device": product.device.type, "size": SIZE, "wrong": wrong}
with open("result.json", "w", encoding="utf-8") as file:  # noqa: PTH123
    json.dump(result, file)
print(json.dumps(result))
sys.exit(1 if wrong or product.device.type != device.type else 0)
