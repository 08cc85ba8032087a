"""Parameters without elements, and parameters of one."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Empty(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.empty = torch.nn.Parameter(torch.zeros(0, 5))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs):
        return self.net(inputs) * self.scale + self.empty.sum()


def train(context):
    model = DDP(Empty(context.model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
