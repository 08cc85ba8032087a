"""Forward passes of the DDP model under no_grad and inference_mode between steps."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        with torch.no_grad():
            context.watch.note("before", model(context.inputs(40 + step)).sum())
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        with torch.inference_mode():
            context.watch.note("between", model(context.inputs(60 + step)).sum().item())
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
