"""Gradients edited in place: noise, scaling, a row set to zero."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5).add_(torch.randn_like(parameter.grad), alpha=1e-3)
            parameter.grad[0] = 0
        context.watch.look("edited", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
