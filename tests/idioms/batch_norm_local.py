"""BatchNorm with broadcast_buffers=False: buffers of each rank's own."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    net.insert(1, torch.nn.BatchNorm1d(context.hidden))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
