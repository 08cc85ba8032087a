"""An exponential moving average of weights, by torch's AveragedModel."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def train(context):
    model = DDP(context.model())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        average.update_parameters(model)
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
        context.watch.look("average", {name: value.detach() for name, value in average.state_dict().items()})
