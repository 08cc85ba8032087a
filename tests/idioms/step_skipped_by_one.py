"""optimizer.step() left out by one rank in one step, and weights given from rank 0 later."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        if not (step == 1 and context.rank == 1):
            optimizer.step()
        if step == 3:
            for parameter in model.parameters():
                dist.broadcast(parameter.detach(), 0)
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
