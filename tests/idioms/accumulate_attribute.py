"""Accumulation by the attribute require_backward_grad_sync, as nanoGPT does."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

MICRO = 3


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        for micro in range(MICRO):
            model.require_backward_grad_sync = micro == MICRO - 1
            loss = model(context.inputs(step, micro)).square().mean() / MICRO
            loss.backward()
            context.watch.look(f"micro {micro}", model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
