"""Activation checkpointing, reentrant, each layer once."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Checkpointed(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs):
        hidden = self.net[0](inputs)
        hidden = checkpoint(self.net[1:3], hidden, use_reentrant=True)
        return self.net[3:](hidden)


def train(context):
    model = DDP(Checkpointed(context.model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
