"""An exception between the backward pass and the update that the script catches; gradients stay for the next step."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        try:
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            context.watch.look("backward", model)
            if step == 2:
                raise ValueError("a bad batch")
            optimizer.step()
            optimizer.zero_grad()
        except ValueError as error:
            context.watch.note("caught", str(error))
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
