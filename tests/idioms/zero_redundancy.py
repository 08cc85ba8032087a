"""ZeroRedundancyOptimizer, which keeps a part of the optimizer state on each rank."""

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer.optim, loss=loss)
