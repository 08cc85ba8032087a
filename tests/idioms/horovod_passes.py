"""Horovod: backward_passes_per_step, gradients added up before they travel."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=3,
    )
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            loss = model(context.inputs(step, micro)).square().mean() / 3
            loss.backward()
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss, rate=0.1)
