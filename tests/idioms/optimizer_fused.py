"""AdamW in its fused form."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    except RuntimeError:
        context.skip("this torch has no fused AdamW for the CPU")
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
