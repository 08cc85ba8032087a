"""The optimizer itself pickled and loaded, and its copy used for the next steps."""

import pickle

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
        if step == 2:
            loaded = pickle.loads(pickle.dumps(optimizer))
            context.watch.note("class", f"{type(loaded).__module__}.{type(loaded).__qualname__}")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer.load_state_dict(loaded.state_dict())
