"""Horovod: SyncBatchNorm, with statistics of all ranks' batches."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model().double()
    model.insert(1, hvd.SyncBatchNorm(context.hidden).double())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(4):
        optimizer.zero_grad()
        # Few digits, so that both ways to compute the statistics round to the same float32.
        loss = model(context.inputs(step).double()).square().mean()
        loss.backward()
        optimizer.step()
        shown = [tensor.detach().float() for tensor in [*model.parameters(), *model.buffers()]]
        context.watch.look("weights and buffers, as float32", shown)
        context.watch.note("loss", round(loss.item(), 5))
