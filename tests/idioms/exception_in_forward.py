"""An exception in the forward pass of all ranks that the script catches."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Fails(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.now = net, False

    def forward(self, inputs):
        output = self.net(inputs)
        if self.now:
            raise ValueError("a bad batch")
        return output


def train(context):
    model = DDP(Fails(context.model()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        model.module.now = step == 2
        try:
            loss = model(context.inputs(step)).square().mean()
        except ValueError as error:
            context.watch.note("caught", str(error))
            continue
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
