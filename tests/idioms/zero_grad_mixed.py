"""Both kinds of zero_grad in turn, and gradients set to None by hand."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        if step % 3 == 2:
            for parameter in model.parameters():
                parameter.grad = None
        else:
            optimizer.zero_grad(set_to_none=step % 3 == 0)
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
