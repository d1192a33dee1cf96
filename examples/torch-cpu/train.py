"""Fits a small network to sin(x) and saves its weights."""

import os

import torch

torch.manual_seed(0)
x = torch.linspace(-3, 3, 200, dtype=torch.float64).unsqueeze(1)
y = torch.sin(x)
network = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
steps = int(os.environ["STEPS"])
for step in range(1, steps + 1):
    loss = torch.nn.functional.mse_loss(network(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.6f}")
torch.save(network.state_dict(), "weights.pt")
