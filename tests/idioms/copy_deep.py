"""A deep copy of the DDP model in mid-training, and training that goes on with the copy."""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 3:
            first = model
            model = copy.deepcopy(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        if step >= 3:
            context.watch.look("first", first)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
