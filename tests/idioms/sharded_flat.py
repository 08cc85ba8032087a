"""FullyShardedDataParallel around each layer and the whole, with clipping."""

import torch

KIND = "sharded"


def train(context):
    from torch.distributed.fsdp import FullyShardedDataParallel

    host = torch.device("cpu")
    model = context.model()
    for at in range(0, len(model), 2):
        model[at] = FullyShardedDataParallel(model[at], device_id=host)
    model = FullyShardedDataParallel(model, device_id=host)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        model.clip_grad_norm_(0.5)
        context.watch.note(f"gradients {step}", {str(at): p.grad.clone() for at, p in enumerate(model.parameters())})
        optimizer.step()
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            context.watch.note(f"weights {step}", {name: p.detach().clone() for name, p in model.named_parameters()})
        context.watch.step(loss=loss)
