"""A loop without DDP with a plain evaluation between steps, and a batch that is skipped."""

import torch

KIND = "loop"


def train(context):
    model = context.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with context.own_loop(model, optimizer) as average:
        for step in range(6):
            with torch.no_grad():
                context.watch.note("evaluation", model(context.inputs(70)).sum())
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            if step == 3:
                continue
            loss.backward()
            average()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
