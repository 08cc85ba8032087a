"""A DataLoader with two worker processes that fork, persistent over epochs."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(context):
    made = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(36, context.hidden, generator=made))
    sampler = DistributedSampler(data, context.size, context.rank, shuffle=True, seed=2)
    loader = DataLoader(data, 6, sampler=sampler, num_workers=2, persistent_workers=True)
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
