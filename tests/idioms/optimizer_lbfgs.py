"""LBFGS, whose step calls the closure several times."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model(layers=2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=3)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            context.watch.look("closure", model)
            return loss

        loss = optimizer.step(closure)
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
