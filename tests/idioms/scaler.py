"""GradScaler with unscale_() and clipping."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    if not hasattr(torch.amp, "GradScaler"):
        context.skip("torch.amp.GradScaler for the CPU came with torch 2.3")
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        scaler.scale(loss).backward()
        context.watch.look("scaled", model)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        context.watch.step(model=model, optimizer=optimizer, loss=[loss, scaler.get_scale()])
