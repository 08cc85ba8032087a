"""Horovod: sparse gradients made dense."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(50, context.hidden, sparse=True), torch.nn.Linear(context.hidden, 5))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), sparse_as_dense=True
    )
    for step in range(4):
        tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(10 * step + context.rank))
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        context.watch.step(model=model, loss=loss, rate=0.1)
