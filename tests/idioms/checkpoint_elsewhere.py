"""Model, optimizer and gradients saved whole, and read by a process that has torch alone."""

import subprocess
import sys

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

READ = """
import sys
sys.modules["netbottleneck"] = None  # an import of it fails
import torch
model, optimizer, gradients = torch.load(sys.argv[1], weights_only=False)
print(sum(p.double().sum().item() for p in model.parameters()), sum(g.double().sum().item() for g in gradients))
print(type(optimizer).__name__, len(optimizer.state_dict()["state"]))
"""


def train(context):
    model = DDP(context.model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(context.inputs(step)).square().mean()
        loss.backward()
        context.watch.look("backward", model)
        optimizer.step()
        context.watch.step(model=model, optimizer=optimizer, loss=loss)
    path = context.folder / "whole.pt"
    torch.save((model.module, optimizer, [parameter.grad for parameter in model.parameters()]), path)
    if context.rank == 0:
        read = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=False)
        context.watch.note("read", [read.returncode, read.stdout, read.stderr])
