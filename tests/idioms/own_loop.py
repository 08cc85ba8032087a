"""A loop without DDP that averages its gradients itself."""

import torch

KIND = "loop"


def train(context):
    model = context.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with context.own_loop(model, optimizer) as average:
        for step in range(5):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            average()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
