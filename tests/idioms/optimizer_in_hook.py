"""Updates of each parameter in a post-accumulate hook of its own, before DDP reduces."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(5):
        model.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        context.watch.step(model=model, optimizer=list(optimizers.values()), loss=loss)
