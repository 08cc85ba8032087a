"""An optimizer whose steps are joined by Adasum, in place of gradients that are averaged."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from netbottleneck.runtime import async_operations
from netbottleneck.runtime.members import ProcessSet, members_of
from netbottleneck.torch.compression import Compressor
from netbottleneck.torch.handles import synchronize
from netbottleneck.torch.reductions import allreduce_async_
from netbottleneck.torch.remake import positive, remade


class _Adasum(torch.optim.Optimizer):
    """What an optimizer whose steps, not gradients, are joined adds to the class of the one that it was made from."""

    _parameter_names: dict[torch.Tensor, str]
    _process_set: ProcessSet
    _compression: type[Compressor]
    _left: int
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Say how many backward passes come before a step, from now on."""
        self.backward_passes_per_step = positive(passes)

    def synchronize(self) -> None:
        """Do nothing: steps are joined, not gradients."""

    @contextmanager
    def skip_synchronize(self) -> Generator[None, None, None]:
        """Do nothing where this rank is alone; else raise AssertionError: there is nothing to skip."""
        if not self._alone():
            raise AssertionError("skip_synchronize() is not for op=Adasum: no gradient is reduced")
        yield

    def _alone(self) -> bool:
        """Whether there is nobody to join steps with, in the job that runs."""
        return self._process_set.included() is False or members_of(self._process_set).size == 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make this rank's own step, and take the Adasum of all ranks' steps in its place."""
        if self._alone():
            return super().step() if closure is None else super().step(closure)
        before = {parameter: parameter.detach().clone() for parameter in self._parameter_names}
        loss = super().step() if closure is None else super().step(closure)
        sent = []
        for parameter, name in self._parameter_names.items():
            delta, context = self._compression.compress(parameter.detach() - before[parameter])
            handle = allreduce_async_(
                delta.contiguous(), name=f"adasum.{name}", op=async_operations.Adasum, process_set=self._process_set
            )
            sent.append((parameter, handle, context))
        for parameter, handle, context in sent:
            joined = self._compression.decompress(synchronize(handle), context)
            parameter.detach().copy_(before[parameter] + joined)
        return loss


def adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    compression: type[Compressor],
    passes: int,
    process_set: ProcessSet,
) -> Any:
    """Return an optimizer of the same class whose steps are joined over a process set."""
    result = remade(optimizer, _Adasum)
    result._parameter_names = {parameter: name for name, parameter in named if parameter.requires_grad}
    result._process_set = process_set
    result._compression = compression
    result.backward_passes_per_step = positive(passes)
    return result
