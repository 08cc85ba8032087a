"""A loss that is not a number for one step, with an update that the script skips on all ranks."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        inputs = context.inputs(step)
        if step == 2 and context.rank == 0:
            inputs[0, 0] = float("nan")
        loss = model(inputs).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        if all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters()):
            optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
