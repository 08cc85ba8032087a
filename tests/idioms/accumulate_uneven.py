"""Micro-batches whose number varies from step to step, the attribute left as the last step set it."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, count in enumerate((1, 3, 2, 1, 4)):
        for micro in range(count):
            model.require_backward_grad_sync = micro + 1 == count
            loss = model(context.inputs(step, micro)).square().mean() / count
            loss.backward()
        context.watch.look("summed", model)
        optimizer.step()
        optimizer.zero_grad()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
