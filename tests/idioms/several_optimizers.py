"""Two optimizers on two parts of a model, as with Muon and AdamW."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    first = torch.optim.SGD(matrices, lr=0.05, momentum=0.9)
    second = torch.optim.AdamW(vectors, lr=0.01)
    for step in range(5):
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        context.watch.step(model=model, optimizer=[first, second], loss=loss)
