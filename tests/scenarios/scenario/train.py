"""A DDP training whose compute is sleep, with the causes that its arguments name: `train.py JSON`."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import netbottleneck  # noqa: F401 - measures, as its variables say

OPTIONS: dict[str, Any] = json.loads(sys.argv[1])
RANK = int(os.environ["RANK"])
RANDOM = random.Random(f"{OPTIONS['seed']}/{RANK}")
LEVEL = [1.0]


def work(ms: float) -> None:
    """Take this time: asleep, or busy with `spin`."""
    if not OPTIONS.get("spin"):
        time.sleep(ms * LEVEL[0] / 1e3)
        return
    until = time.thread_time() + ms * LEVEL[0] / 1e3
    while time.thread_time() < until:
        sum(range(100))


class Timed(torch.autograd.Function):
    """The identity, whose forward and backward take time."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
        """Return the values after a while."""
        ctx.ms = backward_ms
        work(forward_ms)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient after a while."""
        work(ctx.ms)
        return gradient, None, None


class Layer(nn.Module):
    """Weights of `kib` KiB in a layer that takes time."""

    def __init__(self, kib: int, ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kib * 256))
        self.ms = ms

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add the mean of the weights."""
        late_ms = OPTIONS.get("sleep_ms", 0.0) if OPTIONS.get("slow_rank") == RANK else 0.0
        return Timed.apply(values + self.weight.mean(), self.ms / 2, self.ms + late_ms / OPTIONS["layers"])


class Reduced(torch.autograd.Function):
    """The sum over all ranks, of the values and of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the values."""
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients."""
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Shared(nn.Module):
    """Sums `forward_mib` MiB over all ranks in the forward pass."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.values = torch.zeros(mib << 18)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values."""
        dist.all_reduce(self.values)
        return values


class SyncNorm(nn.Module):
    """Normalises by statistics of all ranks, `norm_kib` KiB of them, as SyncBatchNorm does on GPUs."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        self.channels = kib * 256

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values without their mean over all ranks, and with it: as they are."""
        mean = Reduced.apply(values.expand(self.channels)).mean() / dist.get_world_size()
        return values - mean + mean.detach()


class Slow(torch.optim.SGD):
    """An optimizer that takes time."""

    def __init__(self, parameters: Any, ms: float) -> None:
        self.ms = ms
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        """Update after a while."""
        work(self.ms)
        return super().step(closure)


def main() -> None:
    """Train for the requested number of steps."""
    if "core" in OPTIONS:
        os.sched_setaffinity(0, {OPTIONS["core"]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers: list[nn.Module] = [Shared(OPTIONS["forward_mib"])] if "forward_mib" in OPTIONS else []
    for _ in range(OPTIONS["layers"]):
        layers.append(Layer(OPTIONS["kib"], OPTIONS["ms"]))
        if "norm_kib" in OPTIONS:
            layers.append(SyncNorm(OPTIONS["norm_kib"]))
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=OPTIONS["kib"] / 1024)
    *most, last = model.parameters()
    optimizers = [Slow(most, OPTIONS.get("optimizer_ms", 0.0)), Slow([last], OPTIONS.get("second_ms", 0.0))]
    for _ in range(OPTIONS["steps"]):
        LEVEL[0] = max(0.1, 1 + OPTIONS.get("jitter", 0.0) * RANDOM.gauss(0, 1))
        work(OPTIONS.get("input_ms", 0.0))
        model.zero_grad()
        model(torch.ones(1, requires_grad=True)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
