"""Horovod: after a backward pass in which a rank leaves a layer out, zero_grad() is refused, and a state is loaded."""

import copy

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.ModuleDict({"net": context.model(), "last": torch.nn.Linear(10, 10)})
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    state = copy.deepcopy(optimizer.state_dict())
    for step in range(5):
        optimizer.zero_grad()
        output = model["net"](context.inputs(step))
        if step % 2 == 0 or context.rank == 0:
            output = model["last"](output)
        output.square().mean().backward()
        try:
            optimizer.zero_grad()
        except AssertionError as error:
            context.watch.note("refused", "optimizer.zero_grad() was called after loss.backward()" in str(error))
        if step % 2:
            optimizer.load_state_dict(state)
            optimizer.zero_grad()
            output = model["last"](model["net"](context.inputs(step, 1)))
            output.square().mean().backward()
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, rate=0.1)
