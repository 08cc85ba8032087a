"""An exponential moving average made by hand: a deep copy of the inner model, and lerp_."""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    model = DDP(net)
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), net.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        context.watch.step(model=[model, average], optimizer=optimizer, loss=loss)
