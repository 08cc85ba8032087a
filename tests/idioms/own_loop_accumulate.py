"""A loop without DDP that averages after each of several backward passes a step."""

import torch

KIND = "loop"


def train(context):
    model = context.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with context.own_loop(model, optimizer) as average:
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                loss = model(context.inputs(step, micro)).square().mean() / 2
                loss.backward()
                average()
                context.watch.look(f"micro {micro}", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
