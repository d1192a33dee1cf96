"""Fits a small network to sin(x): by one process, or by all ranks of a gang, each with its part of the data."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

gang = "RANK" in os.environ  # torchrun says so
if gang:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if gang else (0, 1)
print(f"rank {rank} of {world} on {os.environ.get('GPULAYER_HOST', 'this machine')}", flush=True)

torch.manual_seed(0)  # every rank begins with the same weights
x = torch.linspace(-3, 3, 240).unsqueeze(1)[rank::world]
y = torch.sin(x)
network = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = DistributedDataParallel(network) if gang else network
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(int(os.environ.get("STEPS", "200")) + 1):
    loss = torch.nn.functional.mse_loss(model(x), y)
    if step % 50 == 0:
        mean = loss.detach().clone()
        if gang:
            dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: loss {mean.item() / world:.6f}", flush=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    torch.save(network.state_dict(), "weights.pt")
if gang:
    dist.destroy_process_group()
