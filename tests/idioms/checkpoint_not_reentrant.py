"""Activation checkpointing, not reentrant, with dropout inside."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Checkpointed(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.dropout = torch.nn.Dropout(0.2)

    def block(self, inputs):
        return self.dropout(self.net[:3](inputs))

    def forward(self, inputs):
        return self.net[3:](checkpoint(self.block, inputs, use_reentrant=False))


def train(context):
    model = DDP(Checkpointed(context.model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        with model.no_sync():
            model(context.inputs(step, 0)).square().mean().backward()
        loss = model(context.inputs(step, 1)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
