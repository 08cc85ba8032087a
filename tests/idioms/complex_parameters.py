"""Complex parameters beside real ones."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP


class Complex(torch.nn.Module):
    def __init__(self, net, size):
        super().__init__()
        self.net = net
        self.filter = torch.nn.Parameter(torch.randn(size // 2 + 1, dtype=torch.complex64))

    def forward(self, inputs):
        return self.net(torch.fft.irfft(torch.fft.rfft(inputs) * self.filter, n=inputs.shape[-1]))


def train(context):
    try:
        model = DDP(Complex(context.model(), context.hidden))
    except RuntimeError as error:
        if "Invalid scalar type" not in str(error):
            raise
        context.skip(f"DDP of this torch cannot broadcast complex numbers over gloo: {error}")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
