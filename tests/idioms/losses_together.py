"""torch.autograd.backward of two losses at once."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        output = model(context.inputs(step))
        losses = [output.square().mean(), output.abs().mean()]
        torch.autograd.backward(losses)
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=losses)
