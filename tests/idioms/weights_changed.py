"""Weights changed by the script: in place, through .data, and by load_state_dict, the optimizer's state too."""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        with torch.no_grad():
            model.module[0].weight.clamp_(-0.1, 0.1)
        model.module[2].weight.data = model.module[2].weight.data.clone() * 0.9
        if step == 1:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 3:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
