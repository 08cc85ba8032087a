"""Local SGD: a backward pass under no_sync(), a step of this rank alone, weights averaged every other step."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

QUIET = True  # no gradient travels by DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        with model.no_sync():
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
        context.watch.look("local", model)
        optimizer.step()
        if step % 2 == 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= context.size
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
