"""Clipping by value."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step) * (1 + 9 * context.rank)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        context.watch.look("clipped", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
