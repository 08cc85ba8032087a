"""A loop without DDP whose branches some ranks use, or none, with a layer frozen later and an update without a pass."""

import torch

KIND = "loop"


class Branches(torch.nn.Module):
    def __init__(self, net, size):
        super().__init__()
        self.net = net
        self.branches = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(3))

    def forward(self, inputs, branch):
        return self.net(self.branches[branch](inputs) if branch is not None else inputs)


def train(context):
    model = Branches(context.model(), context.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    with context.own_loop(model, optimizer) as average:
        for step in range(7):
            optimizer.zero_grad()
            model.net[0].requires_grad_(step < 4)
            branch = (None, 0, 1 if context.rank == 0 else 0)[step % 3]
            loss = model(context.inputs(step), branch).square().mean()
            loss.backward()
            average()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
        optimizer.zero_grad()
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer)
