"""A communication hook that the script registers after some steps."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if step == 2:
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model, summed_in=torch.float16 if step >= 2 else None)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
