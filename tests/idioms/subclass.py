"""A subclass of DistributedDataParallel that passes attributes on, as libraries have it."""

import torch
from torch.nn.parallel import DistributedDataParallel


class Wrapper(DistributedDataParallel):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, *inputs, **named):
        output = super().forward(*inputs, **named)
        return {"output": output, "size": len(output)}


def train(context):
    model = Wrapper(context.model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step))["output"].square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
