"""The double's DistributedOptimizer: a class made on the fly, hooks on the nodes that accumulate, a wait in step()."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .mpi_ops import allreduce_async_, grouped_allreduce_async_, synchronize


class _Distributed(torch.optim.Optimizer):
    def __init__(self, params: Any, named: Iterable[tuple[str, torch.Tensor]], passes: int, grouped: bool) -> None:
        super(self.__class__, self).__init__(params)  # type: ignore[call-arg]
        self._parameter_names = {p: name for name, p in named}
        self._passes = passes
        self._left = dict.fromkeys(self._parameter_names, passes)
        self._grouped = grouped
        self._handles: dict[Any, int] = {}
        self._should_synchronize = True
        self._nodes = []
        for p in self._parameter_names:
            node = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            node.register_hook(self._made_for(p))
            self._nodes.append(node)

    def _made_for(self, p: torch.Tensor) -> Any:
        def hook(*_: Any) -> None:
            self._left[p] -= 1
            if self._left[p] > 0:
                return
            if not self._grouped:
                self._handles[p] = self._allreduce_grad_async(p)
            elif not any(self._left.values()):
                self._handles[None] = self._grouped_allreduce_grad_async()

        return hook

    def _allreduce_grad_async(self, p: torch.Tensor) -> int:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        return allreduce_async_(p.grad, name=self._parameter_names[p])

    def _grouped_allreduce_grad_async(self) -> int:
        return grouped_allreduce_async_([p.grad for p in self._parameter_names], "all")  # type: ignore[misc]

    def synchronize(self) -> None:
        if not self._grouped:
            for p in self._parameter_names:
                if p not in self._handles:
                    self._handles[p] = self._allreduce_grad_async(p)
        for handle in self._handles.values():
            synchronize(handle)
        self._handles.clear()
        self._left = dict.fromkeys(self._parameter_names, self._passes)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._should_synchronize = False
        yield
        self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        if self._should_synchronize:
            self.synchronize()
        return super(self.__class__, self).step(closure)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    backward_passes_per_step: int = 1,
    grouped: bool = False,
) -> Any:
    made: Any = type(type(optimizer).__name__, (type(optimizer),), dict(_Distributed.__dict__))
    return made(optimizer.param_groups, named_parameters, backward_passes_per_step, grouped)
