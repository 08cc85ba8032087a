"""An all-reduce with gradients inside the forward pass, as in a contrastive loss over all ranks."""

import torch
import torch.distributed.nn.functional as distributed
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        output = torch.nn.functional.normalize(model(context.inputs(step)))
        everyone = torch.cat(distributed.all_gather(output))
        loss = torch.logsumexp(output @ everyone.t(), dim=1).mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
