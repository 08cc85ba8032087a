"""A child forked in mid-training that writes to its copies of weights and gradients."""

import os

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        child = os.fork()
        if child == 0:
            for parameter in model.parameters():
                parameter.grad.numpy()[...] = -1e9
            os._exit(0)
        os.waitpid(child, 0)
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
