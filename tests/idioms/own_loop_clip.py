"""A loop without DDP, with clipping, and a model that returns an object of its own class."""

import torch

KIND = "loop"


class Output:
    def __init__(self, value):
        self.value = value


class Model(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, inputs):
        return Output(self.net(inputs))


def train(context):
    model = Model(context.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with context.own_loop(model, optimizer) as average:
        for step in range(5):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).value.square().mean()
            loss.backward()
            average()
            context.watch.look("backward", model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
