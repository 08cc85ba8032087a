"""A loop without DDP whose gradients are kept over the next backward pass, and edited."""

import torch

KIND = "loop"


def train(context):
    model = context.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    with context.own_loop(model, optimizer) as average:
        for step in range(5):
            optimizer.zero_grad(set_to_none=True)
            loss = model(context.inputs(step) * (1 + step)).square().mean()
            loss.backward()
            average()
            context.watch.look("backward", model)
            context.watch.look("kept before", kept)
            kept = [parameter.grad for parameter in model.parameters()]
            for gradient in kept:
                gradient.mul_(0.5)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
