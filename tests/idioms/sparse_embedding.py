"""An embedding with sparse gradients, beside dense layers, and an optimizer for each."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Sparse(torch.nn.Module):
    def __init__(self, words, size):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, size, sparse=True)
        self.layer = torch.nn.Linear(size, 5)

    def forward(self, tokens):
        return self.layer(self.embedding(tokens))


def train(context):
    torch.manual_seed(1)
    model = DDP(Sparse(50, context.hidden))
    sparse = torch.optim.SparseAdam([model.module.embedding.weight], lr=0.01)
    dense = torch.optim.SGD(model.module.layer.parameters(), lr=0.1)
    for step in range(5):
        tokens = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(10 * step + context.rank))
        sparse.zero_grad()
        dense.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        sparse.step()
        dense.step()
        context.watch.step(model=model, optimizer=[sparse, dense], loss=loss)
