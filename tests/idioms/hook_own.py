"""The optimizer first, then the model wrapped, then a communication hook of the script's own."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    calls = []

    def averaged(_state, bucket):
        calls.append(bucket.index())
        tensor = bucket.buffer().div_(context.size)
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])

    net = context.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DDP(net)
    model.register_comm_hook(None, averaged)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
    context.watch.note("calls", calls)
