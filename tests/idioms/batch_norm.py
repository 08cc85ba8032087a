"""BatchNorm, whose buffers DDP broadcasts from rank 0 before each forward pass."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    net.insert(1, torch.nn.BatchNorm1d(context.hidden))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if step == 3:
            model.eval()
            context.watch.note("evaluation", model(context.inputs(99)).detach())
            model.train()
        optimizer.zero_grad()
        with model.no_sync():
            model(context.inputs(step, 0)).square().mean().backward()
        loss = model(context.inputs(step, 1)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
