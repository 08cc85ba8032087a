"""Sharpness-aware minimisation: weights move up the gradient, a second backward pass, and the update from there."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        model(context.inputs(step)).square().mean().backward()
        context.watch.look("first", model)
        with torch.no_grad():
            moves = [0.05 * parameter.grad for parameter in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("second", model)
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
