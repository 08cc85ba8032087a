"""Tensor hooks of the script's on parameters and activations, before and after the model is wrapped."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    net[0].weight.register_hook(lambda gradient: gradient * 2)
    model = DDP(net)
    net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    net[1].register_full_backward_hook(lambda _module, _inputs, outputs: (outputs[0] * 0.5,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
