"""Parameters of float32, bfloat16 and float64 in one model."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Mixed(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.first = torch.nn.Linear(size, size)
        self.second = torch.nn.Linear(size, size, dtype=torch.bfloat16)
        self.third = torch.nn.Linear(size, 10, dtype=torch.float64)

    def forward(self, inputs):
        return self.third(self.second(self.first(inputs).tanh().bfloat16()).double())


def train(context):
    torch.manual_seed(1)
    model = DDP(Mixed(context.hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
