"""The optimizer is made before the model is wrapped, from the inner model's parameters."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = DDP(net)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", net)
        optimizer.step()
        context.watch.step(model=net, optimizer=optimizer, loss=loss)
