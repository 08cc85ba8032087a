"""Horovod: clipping between synchronize() and a step that skips it."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        optimizer.synchronize()
        context.watch.look("synchronized", model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
