"""The memory of gradients replaced through .grad.data."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data.sign()
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
