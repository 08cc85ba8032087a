"""Post-local SGD with torch's hook, averager and optimizer."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    group = torch.distributed.new_group([context.rank], use_local_synchronization=True)
    model.register_comm_hook(PostLocalSGDState(None, subgroup=group, start_localSGD_iter=2), post_localSGD_hook)
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=2, warmup_steps=2))
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=local, loss=loss)
