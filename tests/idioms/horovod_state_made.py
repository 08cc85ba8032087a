"""Horovod: state of new optimizers broadcast, which Horovod makes by a step with gradients of zero."""

import torch

KIND = "horovod"
MAKERS = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
)


def train(context):
    import horovod.torch as hvd

    for number, make in enumerate(MAKERS):
        hvd.init()
        model = context.model()
        optimizer = make(model.parameters())
        if number < 2:  # both orders that scripts have
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if number == 2:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        context.watch.look("weights", [parameter.detach() for parameter in model.parameters()])
        for step in range(3):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            optimizer.synchronize()
            context.watch.look("synchronized", model)
            with optimizer.skip_synchronize():
                optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
        hvd.shutdown()  # each optimizer has a job of its own
