"""static_graph=True with parameters that no rank uses, checkpointed twice."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Twice(torch.nn.Module):
    def __init__(self, net, size):
        super().__init__()
        self.net, self.shared, self.unused = net, torch.nn.Linear(size, size), torch.nn.Linear(size, 3)

    def forward(self, inputs):
        once = checkpoint(self.shared, inputs, use_reentrant=False)
        return self.net(checkpoint(self.shared, once, use_reentrant=False))


def train(context):
    model = DDP(Twice(context.model(), context.hidden), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
