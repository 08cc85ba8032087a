"""A DDP loop for benchmarks/onset.py, whose compute is sleep: `onset_rank.py DIR LAYERS MS`.

While DIR/late exists, the last rank takes as many ms longer a step as the file says. Ends when DIR/end exists.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import netbottleneck  # noqa: F401 - measures, as its variables say

folder, layers, ms = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
VALUES = 64 << 10  # of a layer


class Timed(torch.autograd.Function):
    """The identity, which takes time in both passes."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        """Return the values after a while."""
        time.sleep(ms / 2e3)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient after a while."""
        time.sleep((ms + late_ms / layers) / 1e3)
        return gradient


class Layer(torch.nn.Module):
    """A layer of VALUES weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(VALUES))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add the mean of the weights."""
        return Timed.apply(values + self.weight.mean())


late_ms = 0.0
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*[Layer() for _ in range(layers)]), bucket_cap_mb=0.25)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ends = torch.zeros(1)
while not ends.item():
    if dist.get_rank() == dist.get_world_size() - 1 and (folder / "late").exists():
        late_ms = float((folder / "late").read_text(encoding="utf-8") or 0)
    optimizer.zero_grad()
    model(torch.ones(1, requires_grad=True)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        ends.fill_((folder / "end").exists())
    dist.broadcast(ends, 0)
dist.destroy_process_group()
