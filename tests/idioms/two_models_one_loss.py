"""An encoder and a decoder, each wrapped by itself, with one loss and one optimizer."""

import itertools

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def train(context):
    encoder, decoder = DDP(context.model()), DDP(torch.nn.Linear(10, context.hidden))
    optimizer = torch.optim.SGD(itertools.chain(encoder.parameters(), decoder.parameters()), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        inputs = context.inputs(step)
        loss = (decoder(encoder(inputs)) - inputs).square().mean()
        loss.backward()
        context.watch.look("encoder", encoder)
        context.watch.look("decoder", decoder)
        optimizer.step()
        context.watch.step(model=[encoder, decoder], optimizer=optimizer, loss=loss)
