"""Updates inside the backward pass, by torch's _apply_optimizer_in_backward."""

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as DDP


def loop(context):
    net = context.model()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), optimizer_kwargs={"lr": 0.1})
    model = DDP(net)
    for step in range(5):
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.step(model=model, loss=loss, rate=0.1)


def train(context):
    try:
        loop(context)
    except RuntimeError as error:
        if "accelerator" not in str(error) and "CUDA" not in str(error):
            raise
        context.skip(f"torch's own hook for it needs an accelerator: {str(error).splitlines()[0]}")
