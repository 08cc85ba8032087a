"""model.join() with divide_by_initial_world_size=False: gradients divided by the ranks that are left."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(3 + 2 * context.rank):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
    context.watch.look("joined", [parameter.detach() for parameter in model.parameters()])
