"""torch.save of the inner model with its gradients, and of the whole DDP model, loaded again."""

import io

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def again(thing):
    box = io.BytesIO()
    torch.save(thing, box)
    box.seek(0)
    return box.getbuffer().nbytes, torch.load(box, weights_only=False)


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        size, loaded = again(model.module)
        context.watch.note("bytes", size // 1024)
        context.watch.step(model=[model, loaded], optimizer=optimizer, loss=loss)
    _, gradients = again([parameter.grad for parameter in model.parameters()])
    context.watch.look("gradients", gradients)
    _, whole = again(model)
    context.watch.look("whole", [parameter.detach() for parameter in whole.parameters()])
