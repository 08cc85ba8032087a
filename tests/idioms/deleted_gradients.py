"""Gradients of some layers deleted before the update."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        if step % 2:
            del model.module[0].weight.grad
            model.module[-1].bias.grad = None
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
