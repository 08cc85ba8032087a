"""Gradients that travel one by one, by Python hooks: the slow path, for what only Python can do."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from netbottleneck.torch.compression import Compressor
from netbottleneck.torch.gradients import on_gradient
from netbottleneck.torch.handles import synchronize

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before step(): "
    "increase backward_passes_per_step to add up gradients of several passes"
)


class PerParameter:
    """Each gradient for itself.

    It serves compression by classes, whose compress and decompress are the user's, and sparse gradients.
    """

    def __init__(
        self,
        parameters: list[tuple[str, torch.Tensor]],
        compression: type[Compressor],
        start: Callable[[torch.Tensor, str], int],
        passes: int,
        sparse_as_dense: bool,
    ) -> None:
        self._parameters = {parameter: name for name, parameter in parameters if parameter.requires_grad}
        self._compression = compression
        self._start = start
        self._passes = passes
        self._sparse_as_dense = sparse_as_dense
        self._left = dict.fromkeys(self._parameters, passes)
        self._sent: dict[torch.Tensor, tuple[int, Any]] = {}
        self._hooks = [on_gradient(parameter, self._ready) for parameter in self._parameters]

    @property
    def passes(self) -> int:
        """Backward passes a step."""
        return self._passes

    @passes.setter
    def passes(self, value: int) -> None:
        self._passes = value
        self._left = dict.fromkeys(self._parameters, value)

    @property
    def pending(self) -> int:
        """Gradients that were sent and not waited for."""
        return len(self._sent)

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._left[parameter] <= 0:
            raise AssertionError(TOO_MANY)
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._send(parameter)

    def _send(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            if not self._sparse_as_dense:
                raise ValueError(
                    f"the gradient of {self._parameters[parameter]} is sparse: give DistributedOptimizer "
                    "sparse_as_dense=True"
                )
            parameter.grad = parameter.grad.to_dense()
        travelling, context = self._compression.compress(parameter.grad)
        self._sent[parameter] = (self._start(travelling.contiguous(), self._parameters[parameter]), context)

    def flush(self) -> None:
        """Send every gradient that is not, zeros where there is none."""
        for parameter in self._parameters:
            if parameter not in self._sent:
                self._send(parameter)

    def wait(self) -> None:
        """Wait until all gradients are back, and put them in place."""
        sent, self._sent = self._sent, {}
        self._left = dict.fromkeys(self._parameters, self._passes)
        for parameter, (handle, context) in sent.items():
            result = self._compression.decompress(synchronize(handle), context)
            if parameter.grad is not None and parameter.grad is not result:
                parameter.grad.copy_(result)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class PassGuard:
    """Refuses a backward pass too many before a step.

    It listens to the parameter whose gradient comes first: one Python call a pass.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], limit: int) -> None:
        self.limit = limit
        self._count = 0
        self._first: torch.Tensor | None = None
        self._hooks = {parameter: on_gradient(parameter, self._ready) for parameter in parameters}

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._first is None:
            self._first = parameter
            for other, hook in self._hooks.items():
                if other is not parameter:
                    hook.remove()
        if parameter is not self._first:
            return
        if self._count >= self.limit:
            raise AssertionError(TOO_MANY)
        self._count += 1

    def reset(self) -> None:
        """A step begins."""
        self._count = 0

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
