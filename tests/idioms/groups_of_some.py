"""A DDP model for each rank's own group, and one of all ranks, trained in turn."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    alone = [dist.new_group([rank]) for rank in range(context.size)][context.rank]
    pairs = dist.new_group([0, 1])
    models = [DDP(context.model(), process_group=alone), DDP(context.model())]
    if context.rank < 2:
        models.append(DDP(context.model(), process_group=pairs))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(4):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            context.watch.look(f"backward {index}", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
