"""Squares the matrix by all ranks together, and takes one step of DistributedDataParallel, on the devices of a gang."""

import os

import torch
import torch.distributed as dist
from product import SIZE, matrix, tell, wrong_rows
from torch.nn.parallel import DistributedDataParallel

cpu = os.environ["GPULAYER_ACCELERATOR"] == "cpu"
local = int(os.environ["LOCAL_RANK"])
device = torch.device("cpu") if cpu else torch.device("cuda", local)  # a ROCm build answers to torch.cuda
if not cpu:
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if cpu else "nccl")
rank, world = dist.get_rank(), dist.get_world_size()

there = torch.tensor(matrix(), dtype=torch.float32).to(device)
product = torch.zeros(SIZE, SIZE, device=device)
product[rank::world] = there[rank::world] @ there  # each rank its rows; all have the whole once they are added up
dist.all_reduce(product)

model = torch.nn.Linear(4, 1, bias=False, device=device)
torch.nn.init.zeros_(model.weight)
trained = DistributedDataParallel(model, device_ids=None if cpu else [local])
trained(torch.full((1, 4), rank + 1.0, device=device)).sum().backward()
torch.optim.SGD(trained.parameters(), lr=1.0).step()  # by the mean of what the ranks have seen

found = {"name": None, "visible": None}
if not cpu:
    properties = torch.cuda.get_device_properties(device)
    found = {"name": properties.name, "uuid": str(properties.uuid), "visible": torch.cuda.device_count()}
tell(
    wrong_rows=wrong_rows(product.cpu().tolist()),
    version=torch.__version__,
    device=device.type,
    size=SIZE,
    backend=dist.get_backend(),
    weights=model.weight.detach().cpu().flatten().tolist(),
    **found,
)
dist.destroy_process_group()
