"""Gradients replaced by other tensors between the backward pass and the update."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        for parameter in model.parameters():
            parameter.grad = parameter.grad / (1 + parameter.grad.norm())
        context.watch.look("replaced", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
