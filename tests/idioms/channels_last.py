"""Convolutions in channels_last."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    torch.manual_seed(1)
    wide = 8 if context.width == "small" else 160
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, wide, 3), torch.nn.ReLU(), torch.nn.Conv2d(wide, wide, 3), torch.nn.Flatten()
    )
    model = DDP(net.to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        made = torch.Generator().manual_seed(10 * step + context.rank)
        images = torch.randn(2, 3, 8, 8, generator=made).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss = model(images).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        context.watch.note(
            "layout", [p.grad.is_contiguous(memory_format=torch.channels_last) for p in net[0].parameters()][:1]
        )
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
