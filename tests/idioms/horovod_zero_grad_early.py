"""Horovod: zero_grad() while gradients are on their way, which is refused, and caught."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(4):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        if step == 1:
            try:
                optimizer.zero_grad()
            except AssertionError as error:
                context.watch.note("refused", "optimizer.zero_grad() was called after loss.backward()" in str(error))
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss, rate=0.1)
