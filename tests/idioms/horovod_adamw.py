"""Horovod: AdamW with groups, a scheduler, and its state broadcast after a resumed start."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    model = context.model()
    groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2:].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    if hvd.rank() == 0:
        model(context.inputs(90)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # In this order, since Horovod makes state that is missing by a step, which decays weights.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        optimizer.synchronize()
        context.watch.look("synchronized", model)
        with optimizer.skip_synchronize():
            optimizer.step()
        scheduler.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
