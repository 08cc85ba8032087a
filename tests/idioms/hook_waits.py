"""A communication hook that waits for the reducer's own all-reduce, by _run_allreduce_hook."""

import weakref

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())

    def averaged(model_of, bucket):
        model_of().reducer._run_allreduce_hook(bucket).wait()
        done = torch.futures.Future()
        done.set_result(bucket.buffer().div_(context.size))
        return done

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if step == 1:
            model.register_comm_hook(weakref.ref(model), averaged)
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
