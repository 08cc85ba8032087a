"""Learning-rate schedulers: warm-up, then cosine."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 4)], milestones=[2]
    )
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        scheduler.step()
        context.watch.step(model=model, optimizer=optimizer, loss=[loss, scheduler.get_last_lr()[0]])
