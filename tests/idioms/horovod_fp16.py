"""Horovod: Compression.fp16."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
    )
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean() * 64
        loss.backward()
        optimizer.synchronize()
        context.watch.look("synchronized", model, summed_in=torch.float16)
        with optimizer.skip_synchronize():
            optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
