"""RMSprop, then Adagrad on the same model, each with state of its own."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    for kind in (torch.optim.RMSprop, torch.optim.Adagrad):
        optimizer = kind(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
