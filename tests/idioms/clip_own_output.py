"""A model that returns an object of its own class, and clipping by norm."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Output:
    def __init__(self, loss):
        self.loss = loss


class Model(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs):
        return Output(self.net(inputs).square().mean())


def train(context):
    model = DDP(Model(context.model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step) * (1 + 9 * context.rank)).loss
        loss.backward()
        context.watch.look("backward", model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        context.watch.look("clipped", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=[loss, norm])
