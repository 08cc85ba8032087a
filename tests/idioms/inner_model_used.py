"""The inner model called beside DDP's forward pass, its gradients local, in turn with synchronised ones."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model(context.inputs(step, 0)).square().mean().backward()
        context.watch.look("synchronised", model)
        loss = model.module(context.inputs(step, 1)).square().mean()
        loss.backward()
        context.watch.look("local added", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
