"""GradScaler where one rank's gradients are infinite in one step, so that no rank updates."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    if not hasattr(torch.amp, "GradScaler"):
        context.skip("torch.amp.GradScaler for the CPU came with torch 2.3")
    model = DDP(context.model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        if step == 2 and context.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        context.watch.look("scaled", model)
        scaler.step(optimizer)
        scaler.update()
        context.watch.step(model=model, optimizer=optimizer, loss=[loss, scaler.get_scale()])
