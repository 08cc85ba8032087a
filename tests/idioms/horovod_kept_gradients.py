"""Horovod: gradients kept over the next backward pass, set to None in between."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    kept = []
    for step in range(5):
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(context.inputs(step) * (1 + step)).square().mean()
        loss.backward()
        optimizer.synchronize()
        context.watch.look("synchronized", model)
        context.watch.look("kept before", kept)
        kept = [parameter.grad for parameter in model.parameters()]
        with optimizer.skip_synchronize():
            optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
