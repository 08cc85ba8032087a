"""Horovod: sparse gradients of an embedding, gathered."""

import torch

KIND = "horovod"


def train(context):
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    embedding, layer = torch.nn.Embedding(50, context.hidden, sparse=True), torch.nn.Linear(context.hidden, 5)
    model = torch.nn.Sequential(embedding, layer)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(5):
        tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(10 * step + context.rank))
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.synchronize()
        context.watch.look("synchronized", model)
        with optimizer.skip_synchronize():
            optimizer.step()
        context.watch.look("weights", [parameter.detach() for parameter in model.parameters()])
