"""step(closure) with plain SGD."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            context.watch.look("closure", model)
            return loss

        loss = optimizer.step(closure)
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
