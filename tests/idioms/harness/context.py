"""Context: what an idiom is given, beside torch, to be the same training in every run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.watch import Watch

HIDDEN = {"small": 24, "large": 400}  # a matrix of 400 by 400 is 625 KiB: two are more than DDP's first bucket


class Skipped(Exception):
    """Raised by an idiom that needs what this torch lacks."""


class Context:
    """rank, size: of this process. width: "small" or "large" gradients. hidden: features of a layer in that width.

    watch: where to show gradients and steps. folder: a folder of this rank in this run. untouched: that of this rank
    in the untouched run, with what the same idiom left there.
    """

    def __init__(self, rank: int, size: int, width: str, watch: Watch, folder: Path, untouched: Path) -> None:
        self.rank, self.size, self.width = rank, size, width
        self.watch = watch
        self.hidden = HIDDEN[width]
        self.folder, self.untouched = folder, untouched
        self.profile: Callable[[Any, Any], contextlib.AbstractContextManager[Any]] | None = None
        for each in (folder, untouched):
            each.mkdir(parents=True, exist_ok=True)

    def inputs(self, step: int, micro: int = 0, rows: int = 8) -> torch.Tensor:
        """Return a batch (rows, hidden), another one for each rank, step and micro-batch."""
        made = torch.Generator().manual_seed(1000 * step + 10 * micro + self.rank)
        return torch.randn(rows, self.hidden, generator=made)

    def model(self, layers: int = 3) -> torch.nn.Sequential:
        """Return a small network of linear layers, the same on all ranks."""
        torch.manual_seed(7)
        made: list[torch.nn.Module] = []
        for _ in range(layers - 1):
            made += [torch.nn.Linear(self.hidden, self.hidden), torch.nn.Tanh()]
        return torch.nn.Sequential(*made, torch.nn.Linear(self.hidden, 10))

    def skip(self, reason: str) -> None:
        """End the idiom: this torch lacks what it needs."""
        raise Skipped(reason)

    @contextlib.contextmanager
    def own_loop(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
        """Give a loop without DDP what averages its gradients: a function to call after the backward pass."""
        self.watch.sum_gradients(model.parameters())
        if self.profile is not None:
            with self.profile(model, optimizer):
                yield lambda: None
            return
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)

        def average() -> None:
            parameters = list(model.parameters())
            used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
            dist.all_reduce(used, dist.ReduceOp.MAX)
            for parameter in [parameter for parameter, somewhere in zip(parameters, used, strict=True) if somewhere]:
                if parameter.grad is None:
                    zeros = torch.zeros_like(parameter)
                    self.watch.add(parameter, zeros)
                    parameter.grad = zeros
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.size

        yield average
