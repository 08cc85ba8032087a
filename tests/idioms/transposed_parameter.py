"""A parameter that is not contiguous in memory."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    net[0].weight = torch.nn.Parameter(net[0].weight.detach().t().contiguous().t())
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        context.watch.note("strides", net[0].weight.grad.stride())
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
