"""A DDP loop for benchmarks/auto.py: `auto_rank.py STEPS WIDTH`."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, width = map(int, sys.argv[1:3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(8, width)
for _ in range(steps):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
