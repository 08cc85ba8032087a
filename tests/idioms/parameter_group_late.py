"""Layers that join the optimizer later, by add_param_group."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.module[-1].parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": model.module[0].parameters(), "lr": 0.01})
        model.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
