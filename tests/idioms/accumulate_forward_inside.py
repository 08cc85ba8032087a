"""A forward pass under no_sync() whose backward pass runs outside it."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with model.no_sync():
            first = model(context.inputs(step, 0)).square().mean()
        first.backward()
        context.watch.look("first", model)
        second = model(context.inputs(step, 1)).square().mean()
        with model.no_sync():
            second.backward()
        context.watch.look("second", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=[first, second])
