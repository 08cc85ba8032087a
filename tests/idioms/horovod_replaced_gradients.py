"""Horovod: gradients replaced after synchronize(), by other tensors and through .data."""

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
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        optimizer.synchronize()
        context.watch.look("synchronized", model)
        for parameter in model.parameters():
            if step % 2:
                parameter.grad = parameter.grad.sign()
            else:
                parameter.grad.data = parameter.grad.data * 0.5
        with optimizer.skip_synchronize():
            optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
