"""Collectives of the script's own beside DDP's: metrics before, in and after the backward pass."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        output = model(context.inputs(step))
        loss = output.square().mean()
        total = loss.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        loss.backward()
        gathered = [torch.empty_like(output) for _ in range(context.size)]
        dist.all_gather(gathered, output.detach())
        work.wait()
        context.watch.look("backward", model)
        optimizer.step()
        dist.broadcast(total, context.size - 1)
        context.watch.note("metrics", [total, gathered])
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
