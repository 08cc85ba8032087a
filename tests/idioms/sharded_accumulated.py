"""FSDP2 with accumulation by set_requires_gradient_sync, clipping, and an evaluation between steps."""

import torch
from sharded import sharded, whole

KIND = "sharded"
MICRO = 3


def train(context):
    model = sharded(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        for micro in range(MICRO):
            model.set_requires_gradient_sync(micro == MICRO - 1)
            loss = model(context.inputs(step, micro)).square().mean() / MICRO
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        context.watch.note(f"norm {step}", norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            context.watch.note(f"evaluation {step}", model(context.inputs(100 + step)))
        context.watch.note(f"weights {step}", whole(model))
        context.watch.step(loss=loss)
