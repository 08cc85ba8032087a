"""An LSTM, with truncated back-propagation and a hidden state that is kept."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Recurrent(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.cell, self.out = torch.nn.LSTM(size, size // 2, batch_first=True), torch.nn.Linear(size // 2, 3)

    def forward(self, inputs, state):
        hidden, state = self.cell(inputs, state)
        return self.out(hidden), state


def train(context):
    torch.manual_seed(1)
    model = DDP(Recurrent(context.hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for step in range(4):
        optimizer.zero_grad()
        output, state = model(context.inputs(step).unflatten(0, (2, 4)), state)
        state = tuple(part.detach() for part in state)
        loss = output.square().mean()
        loss.backward()
        context.watch.look("backward", model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
