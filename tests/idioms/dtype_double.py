"""Parameters of float64."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model().double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step).double()).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
