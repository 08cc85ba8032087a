"""Horovod: a layer that some steps, and some ranks, do not use."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.ModuleDict({"net": context.model(), "extra": torch.nn.Linear(10, 10)})
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(5):
        optimizer.zero_grad()
        output = model["net"](context.inputs(step))
        if step % 2 and context.rank == 0:
            output = model["extra"](output)
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss, rate=0.1)
