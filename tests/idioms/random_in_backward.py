"""Random numbers drawn in the backward pass, by an autograd function of the script's."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + 0.01 * torch.randn_like(gradient)


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = Noise.apply(model(context.inputs(step))).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
