"""Training resumed from the checkpoint that the untouched script wrote."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(6):
        if step == 3:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, context.folder / "last.pt")
            saved = torch.load(context.untouched / "last.pt", weights_only=True)
            model = DDP(context.model())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
