"""A gradient penalty: gradients of the inputs, and a backward pass through them (double backward)."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        inputs = context.inputs(step).requires_grad_()
        output = model(inputs).square().mean()
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        loss = output + 10 * (slope.norm() - 1) ** 2
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
