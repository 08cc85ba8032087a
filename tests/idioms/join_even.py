"""model.join() with as many batches on each rank, twice in one training."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        with model.join():
            for step in range(3):
                optimizer.zero_grad()
                loss = model(context.inputs(step, epoch)).square().mean()
                loss.backward()
                context.watch.look("backward", model)
                optimizer.step()
                context.watch.step(model=model, optimizer=optimizer, loss=loss)
