"""FSDP2 with a MixedPrecisionPolicy of bfloat16, layers that stay unsharded after forward, two optimizers."""

import torch
from sharded import sharded, whole

KIND = "sharded"


def train(context):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(context, mp_policy=policy, reshard_after_forward=False)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:2], lr=0.05), torch.optim.AdamW(parameters[2:], lr=0.01)]
    for step in range(6):
        loss = model(context.inputs(step)).float().square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        context.watch.note(f"weights {step}", whole(model))
        context.watch.step(loss=loss)
