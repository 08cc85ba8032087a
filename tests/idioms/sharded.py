"""FSDP2: fully_shard on each layer and on the whole."""

import torch
import torch.distributed as dist

KIND = "sharded"


def sharded(context, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = context.model()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options) or model


def whole(model, gradients=False):
    tensors = {name: p.grad if gradients else p for name, p in model.named_parameters()}
    return {name: tensor.full_tensor().detach().clone() for name, tensor in tensors.items() if tensor is not None}


def train(context):
    model = sharded(context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.note(f"gradients {step}", whole(model, gradients=True))
        optimizer.step()
        context.watch.note(f"weights {step}", whole(model))
        context.watch.step(loss=loss)
