"""The optimizer is made after the first backward pass."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = None
    for step in range(5):
        model.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
