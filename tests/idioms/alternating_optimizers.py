"""Two optimizers that take turns from step to step."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:], lr=0.01)]
    for step in range(6):
        optimizer = optimizers[step % 2]
        model.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizers, loss=loss)
