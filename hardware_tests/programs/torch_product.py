"""Squares the matrix with PyTorch, on the device that GPUlayer chose."""

import os

import torch
from product import SIZE, matrix, tell, wrong_rows

accelerator = os.environ["GPULAYER_ACCELERATOR"]
word = "cuda" if accelerator == "rocm" else accelerator  # a ROCm build answers to torch.cuda
there = torch.tensor(matrix(), dtype=torch.float32).to(word)
product = there @ there
found = {"version": torch.__version__, "device": product.device.type, "size": SIZE, "name": None, "visible": None}
if word == "cuda":
    properties = torch.cuda.get_device_properties(0)
    found |= {"name": properties.name, "uuid": str(properties.uuid), "visible": torch.cuda.device_count()}
elif word == "mps" and hasattr(torch.backends.mps, "get_name"):
    found["name"] = torch.backends.mps.get_name()
tell(wrong_rows=wrong_rows(product.cpu().tolist()), **found)
