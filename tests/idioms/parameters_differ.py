"""Ranks that start from different weights, which DDP gives to all from rank 0."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1 + context.rank)
    model = DDP(net)
    context.watch.look("first", [parameter.detach() for parameter in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
