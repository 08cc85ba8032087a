"""Gradients that exist before the first backward pass, made by the script."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25 * (1 + context.rank))
    for step in range(4):
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
