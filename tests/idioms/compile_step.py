"""torch.compile of the DDP model by its method, with aot_eager and small buckets."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model(), bucket_cap_mb=1)
    model.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
