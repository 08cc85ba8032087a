"""Horovod: two models with a distributed optimizer each, as a GAN has."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    maker, judge = context.model(), torch.nn.Linear(10, 1)
    hvd.broadcast_parameters(judge.state_dict(), root_rank=0)
    names = [(f"maker.{name}", p) for name, p in maker.named_parameters()]
    first = hvd.DistributedOptimizer(torch.optim.SGD(maker.parameters(), lr=0.1), named_parameters=names)
    names = [(f"judge.{name}", p) for name, p in judge.named_parameters()]
    second = hvd.DistributedOptimizer(torch.optim.SGD(judge.parameters(), lr=0.1), named_parameters=names)
    for step in range(4):
        second.zero_grad()
        loss = judge(maker(context.inputs(step)).detach()).square().mean()
        loss.backward()
        second.step()
        context.watch.step(model=judge, optimizer=second, loss=loss, rate=0.1)
        first.zero_grad()
        loss = maker(context.inputs(step, 1)).square().mean()
        loss.backward()
        first.step()
        context.watch.step(model=maker, optimizer=first, loss=loss, rate=0.1)
