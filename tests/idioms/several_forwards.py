"""Two forward passes of the same model and one backward pass of a loss that joins them."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        left, right = model(context.inputs(step, 0)), model(context.inputs(step, 1))
        loss = (left - right).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
