"""Horovod: a step after fewer backward passes than backward_passes_per_step, as at the end of an epoch."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
    )
    for step in range(5):
        optimizer.zero_grad()
        for micro in range(1 if step == 2 else 2):
            loss = model(context.inputs(step, micro)).square().mean()
            loss.backward()
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss, rate=0.1)
