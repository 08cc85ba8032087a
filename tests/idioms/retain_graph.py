"""Two backward passes through one graph, the first with retain_graph=True."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        output = model(context.inputs(step))
        output.square().mean().backward(retain_graph=True)
        context.watch.look("first", model)
        loss = output.abs().mean()
        loss.backward()
        context.watch.look("second", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
