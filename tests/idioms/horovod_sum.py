"""Horovod: op=Sum, and no names given."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), op=hvd.Sum)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean() / hvd.size()
        loss.backward()
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss, rate=0.05, times=hvd.size())
