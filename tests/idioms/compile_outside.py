"""torch.compile of the DDP model, with accumulation."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    wrapped = DDP(context.model())
    model = torch.compile(wrapped, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with wrapped.no_sync():
            model(context.inputs(step, 0)).square().mean().backward()
        loss = model(context.inputs(step, 1)).square().mean()
        loss.backward()
        context.watch.look("backward", wrapped)
        optimizer.step()
        context.watch.step(model=wrapped, optimizer=optimizer, loss=loss)
