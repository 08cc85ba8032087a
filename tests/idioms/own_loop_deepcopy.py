"""A loop without DDP that copies and pickles its model and optimizer."""

import copy
import io

import torch

KIND = "loop"


def train(context):
    model = context.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with context.own_loop(model, optimizer) as average:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            average()
            context.watch.look("backward", model)
            optimizer.step()
            box = io.BytesIO()
            torch.save((model, optimizer), box)
            box.seek(0)
            loaded, state = torch.load(box, weights_only=False)
            context.watch.step(model=[model, copy.deepcopy(model), loaded], optimizer=[optimizer, state], loss=loss)
