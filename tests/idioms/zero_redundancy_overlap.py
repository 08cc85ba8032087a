"""ZeroRedundancyOptimizer with parameters as views of buckets and a communication hook of torch's that shards."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, allreduce_hook)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, parameters_as_bucket_view=True, lr=0.1, momentum=0.9
    )
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer.optim, loss=loss)
