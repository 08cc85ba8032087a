"""Unused parameters without find_unused_parameters: DDP's error, caught, and training ended."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

QUIET = True


class Half(torch.nn.Module):
    def __init__(self, net, size):
        super().__init__()
        self.net, self.unused = net, torch.nn.Linear(size, size)

    def forward(self, inputs):
        return self.net(inputs)


def train(context):
    model = DDP(Half(context.model(), context.hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        try:
            model(context.inputs(step)).square().mean().backward()
        except RuntimeError as error:
            context.watch.note("error", str(error).splitlines()[0][:60])
            break
        context.watch.note("went on", step)
