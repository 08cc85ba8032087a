"""The same network wrapped anew in mid-training, the optimizer kept."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for phase in range(3):
        model = DDP(net, bucket_cap_mb=1 + phase)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(context.inputs(step, phase)).square().mean()
            loss.backward()
            context.watch.look("backward", net)
            optimizer.step()
            context.watch.step(model=net, optimizer=optimizer, loss=loss)
        del model
