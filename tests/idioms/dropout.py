"""Dropout and random numbers of torch, Python and numpy in the loop."""

import random

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    net.insert(1, torch.nn.Dropout(0.3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        inputs = context.inputs(step) + random.random() + float(np.random.rand())  # noqa: NPY002 - as scripts do
        loss = model(inputs + 0.1 * torch.randn_like(inputs)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
