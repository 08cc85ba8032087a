"""The generic Join context of torch with a DDP model and a ZeroRedundancyOptimizer."""

import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(3 + context.rank):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, loss=loss)
    context.watch.look("joined", [parameter.detach() for parameter in model.parameters()])
