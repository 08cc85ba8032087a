"""Horovod: metrics averaged, gathered and broadcast beside the optimizer."""

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
        seen = hvd.allreduce(torch.full((3,), float(step + context.rank)), name="seen", op=hvd.Sum)
        rows = hvd.allgather(torch.full((1 + context.rank, 2), float(step)), name="rows")
        best = hvd.broadcast_object({"step": step, "rank": context.rank}, root_rank=1)
        optimizer.step()
        context.watch.note("metrics", [seen, rows, best])
        context.watch.step(model=model, optimizer=optimizer, loss=loss, rate=0.1)
