"""torch.profiler and anomaly detection around the loop."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities), torch.autograd.set_detect_anomaly(True):
        for step in range(4):
            optimizer.zero_grad()
            loss = model(context.inputs(step)).square().mean()
            loss.backward()
            context.watch.look("backward", model)
            optimizer.step()
            context.watch.step(model=model, optimizer=optimizer, loss=loss)
