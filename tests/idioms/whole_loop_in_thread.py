"""The whole loop runs in another thread than the one that made the model."""

import threading

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failed = []

    def loop():
        try:
            for step in range(5):
                optimizer.zero_grad()
                loss = model(context.inputs(step)).square().mean()
                loss.backward()
                context.watch.look("backward", model)
                optimizer.step()
                context.watch.step(model=model, optimizer=optimizer, loss=loss)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
