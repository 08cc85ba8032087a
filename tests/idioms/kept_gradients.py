"""Gradients that the script keeps over the next backward pass."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=True)
        loss = model(context.inputs(step) * (step + 1)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        context.watch.look("kept before", kept)
        kept = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
