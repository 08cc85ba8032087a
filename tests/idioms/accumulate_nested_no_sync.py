"""Accumulation under no_sync() inside no_sync()."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            with model.no_sync():
                model(context.inputs(step, 0)).square().mean().backward()
            model(context.inputs(step, 1)).square().mean().backward()
        context.watch.look("local", model)
        loss = model(context.inputs(step, 2)).square().mean()
        loss.backward()
        context.watch.look("summed", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
