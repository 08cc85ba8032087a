"""A learning-rate finder: state saved, rates swept, state restored, then training."""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def one_step(context, model, optimizer, step):
    optimizer.zero_grad()
    loss = model(context.inputs(step)).square().mean()
    loss.backward()
    context.watch.look("backward", model)
    optimizer.step()
    context.watch.step(model=model, optimizer=optimizer, loss=loss)


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] *= 5
        one_step(context, model, optimizer, step)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in range(3):
        one_step(context, model, optimizer, step)
