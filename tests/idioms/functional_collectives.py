"""Functional collectives: outputs gathered in the forward pass, with gradients, and a DTensor of the loss."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import DTensor, Replicate, Shard
    except ImportError:
        from torch.distributed._tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        outputs = model(context.inputs(step))
        everywhere = functional.all_gather_tensor_autograd(outputs, 0, dist.group.WORLD)
        mean = functional.all_reduce(outputs.detach().mean(0), "sum", dist.group.WORLD)
        loss = (everywhere - mean).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        losses = DTensor.from_local(loss.detach().reshape(1), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        context.watch.step(model=model, optimizer=optimizer, loss=losses.to_local().sum())
