"""Accumulation under no_sync(), the last pass outside it."""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO = 3


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(MICRO):
            last = micro == MICRO - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(context.inputs(step, micro)).square().mean() / MICRO
                loss.backward()
            context.watch.look(f"micro {micro}", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
