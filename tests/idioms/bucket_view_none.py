"""gradient_as_bucket_view=True, gradients set to None, with accumulation."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad(set_to_none=True)
        with model.no_sync():
            model(context.inputs(step, 0)).square().mean().backward()
        context.watch.look("local", model)
        loss = model(context.inputs(step, 1)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
