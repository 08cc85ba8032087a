"""Models made, trained and thrown away one after another, as in a search over settings."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    for trial in range(4):
        model = DDP(context.model(layers=2 + trial % 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (trial + 1))
        for step in range(3):
            optimizer.zero_grad()
            loss = model(context.inputs(step, trial)).square().mean()
            loss.backward()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
        del model, optimizer
