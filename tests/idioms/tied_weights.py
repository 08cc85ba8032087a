"""Tied weights: the output layer shares the embedding's."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Language(torch.nn.Module):
    def __init__(self, words, size):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, size)
        self.layer = torch.nn.Linear(size, size)
        self.output = torch.nn.Linear(size, words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(self.layer(self.embedding(tokens)))


def train(context):
    torch.manual_seed(1)
    model = DDP(Language(50, context.hidden))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(5):
        tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(10 * step + context.rank))
        optimizer.zero_grad()
        output = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
