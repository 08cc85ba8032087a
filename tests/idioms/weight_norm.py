"""Parametrizations: weight_norm, and spectral_norm with its buffers."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


def train(context):
    net = context.model()
    weight_norm(net[0])
    spectral_norm(net[2])
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
