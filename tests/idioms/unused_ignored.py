"""Parameters that DDP ignores, by _set_params_and_buffers_to_ignore_for_model."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    net = context.model()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "0.bias"])
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", net)
        optimizer.step()
        context.watch.step(model=net, optimizer=optimizer, loss=loss)
