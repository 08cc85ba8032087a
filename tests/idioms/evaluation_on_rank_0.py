"""Evaluation on rank 0 only, by the inner model, between steps."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        if context.rank == 0:
            model.eval()
            with torch.no_grad():
                context.watch.note("evaluation", model.module(context.inputs(50 + step)).square().mean())
            model.train()
        dist.barrier()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
