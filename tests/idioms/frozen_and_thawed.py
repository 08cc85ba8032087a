"""Fine-tuning: layers frozen before the model is wrapped, then thawed and wrapped anew."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    net[0].requires_grad_(False)
    for phase in range(2):
        model = DDP(net)
        optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(context.inputs(step, phase)).square().mean()
            loss.backward()
            context.watch.look("backward", net)
            optimizer.step()
            context.watch.step(model=net, optimizer=optimizer, loss=loss)
        net[0].requires_grad_(True)
