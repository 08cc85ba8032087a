"""Horovod: GradScaler, with unscaling between synchronize() and the step, one rank infinite once."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    if not hasattr(torch.amp, "GradScaler"):
        context.skip("torch.amp.GradScaler for the CPU came with torch 2.3")
    hvd.init()
    model = context.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        if step == 2 and context.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        context.watch.look("synchronized", model)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        context.watch.step(model=model, optimizer=optimizer, loss=[loss, scaler.get_scale()])
