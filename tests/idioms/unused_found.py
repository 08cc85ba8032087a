"""find_unused_parameters=True: a branch that some ranks use, one that none uses, all gradients looked at."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Branches(torch.nn.Module):
    def __init__(self, net, size):
        super().__init__()
        self.net = net
        self.branches = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(3))

    def forward(self, inputs, branch):
        return self.net(self.branches[branch](inputs) if branch is not None else inputs)


def train(context):
    model = DDP(Branches(context.model(), context.hidden), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        branch = (None, 0, 1 if context.rank == 0 else 0)[step % 3]
        loss = model(context.inputs(step), branch).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
