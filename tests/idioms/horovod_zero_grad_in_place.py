"""Horovod: gradients set to zero in place by the model, not the optimizer."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(5):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss, rate=0.1)
