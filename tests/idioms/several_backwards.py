"""Two forward and two synchronised backward passes a step."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        first = model(context.inputs(step, 0)).square().mean()
        first.backward()
        context.watch.look("first", model)
        second = model(context.inputs(step, 1)).abs().mean()
        second.backward()
        context.watch.look("second", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=[first, second])
