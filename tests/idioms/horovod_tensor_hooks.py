"""Horovod: gradients replaced by tensor hooks of the script's before they travel."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for step in range(4):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        optimizer.synchronize()
        context.watch.look("synchronized", model)
        with optimizer.skip_synchronize():
            optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
