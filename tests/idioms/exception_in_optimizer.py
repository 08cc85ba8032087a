"""An optimizer whose step raises once, after it has begun."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Fails(torch.optim.SGD):
    now = False

    def step(self, closure=None):
        if self.now:
            raise RuntimeError("out of memory (of the script)")
        return super().step(closure)


def train(context):
    model = DDP(context.model())
    optimizer = Fails(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.now = step == 1
        try:
            optimizer.step()
        except RuntimeError as error:
            context.watch.note("caught", str(error))
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
