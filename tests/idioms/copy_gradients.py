"""Deep copies of the inner model with its gradients, and of the optimizer."""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    copies = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        copies.append(copy.deepcopy(model.module))
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
        copied = copy.deepcopy(optimizer)
        context.watch.step(model=copies, optimizer=copied)
