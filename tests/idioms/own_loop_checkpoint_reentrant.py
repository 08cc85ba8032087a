"""A loop without DDP with reentrant activation checkpointing of all layers, one of them in two segments."""

import torch
from torch.utils.checkpoint import checkpoint

KIND = "loop"


class Checkpointed(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs):
        hidden = checkpoint(self.net[:2], inputs.requires_grad_(), use_reentrant=True)
        for _ in range(2):
            hidden = checkpoint(self.net[2:4], hidden, use_reentrant=True)
        return checkpoint(self.net[4:], hidden, use_reentrant=True)


def train(context):
    model = Checkpointed(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with context.own_loop(model, optimizer) as average:
        for step in range(5):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            average()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
