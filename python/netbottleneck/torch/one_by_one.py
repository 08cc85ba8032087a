"""Gradients that travel one by one, by Python hooks: the slow path, for what only Python can do."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from netbottleneck.torch.compression import Compression, Compressor
from netbottleneck.torch.gradients import Gradients
from netbottleneck.torch.handles import synchronize
from netbottleneck.torch.ready import on_gradient

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before step(): "
    "increase backward_passes_per_step to add up gradients of several passes"
)


class Ways(NamedTuple):
    """How a gradient of this name travels; each starts it.

    dense: reduced in place; returns the handle. sparse: returns what waits for the sum, and gives it.
    """

    dense: Callable[[torch.Tensor, str], int]
    sparse: Callable[[torch.Tensor, str], Callable[[], torch.Tensor]]


class PerParameter:
    """Each gradient for itself.

    It serves compression by classes, whose compress and decompress are the user's, and sparse gradients, which stay
    sparse. sparse: whether these travel dense all the same, and whether all gradients are known to be sparse: then one
    that is missing is a sparse one without values, else it is zeros.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        compression: type[Compressor],
        ways: Ways,
        passes: int,
        sparse: tuple[bool, bool],
    ) -> None:
        self._parameters = {parameter: name for name, parameter in parameters if parameter.requires_grad}
        self._compression = compression
        self._ways = ways
        self._passes = passes
        self._sparse_as_dense, all_sparse = sparse
        self._sparse_dims = dict.fromkeys(self._parameters, 1) if all_sparse else {}  # of those that are sparse
        self._left = dict.fromkeys(self._parameters, passes)
        self._sent: dict[torch.Tensor, tuple[int, Any]] = {}
        self._sparse: dict[torch.Tensor, Callable[[], torch.Tensor]] = {}
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
        return len(self._sent) + len(self._sparse)

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._left[parameter] <= 0:
            raise AssertionError(TOO_MANY)
        self._left[parameter] -= 1
        if self._left[parameter] == 0:
            self._send(parameter)

    def _send(self, parameter: torch.Tensor) -> None:
        name = self._parameters[parameter]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            if parameter in self._sparse_dims:
                parameter.grad = parameter.grad.to_sparse(self._sparse_dims[parameter])
        gradient = parameter.grad
        if gradient.is_sparse:
            self._sparse_dims[parameter] = gradient.sparse_dim()
            if not self._sparse_as_dense:
                self._sparse[parameter] = self._ways.sparse(gradient, name)
                return
            gradient = gradient.to_dense()
        travelling, context = self._compression.compress(gradient)
        self._sent[parameter] = (self._ways.dense(travelling.contiguous(), name), context)

    def flush(self) -> None:
        """Send every gradient that is not, zeros where there is none."""
        for parameter in self._parameters:
            if parameter not in self._sent and parameter not in self._sparse:
                self._send(parameter)

    def wait(self) -> None:
        """Wait until all gradients are back, and put them in place."""
        sent, self._sent = self._sent, {}
        sparse, self._sparse = self._sparse, {}
        self._left = dict.fromkeys(self._parameters, self._passes)
        for parameter, (handle, context) in sent.items():
            result = self._compression.decompress(synchronize(handle), context)
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = result.to_sparse(self._sparse_dims[parameter])
            elif parameter.grad is not None and parameter.grad is not result:
                parameter.grad.copy_(result)
        for parameter, wait in sparse.items():
            parameter.grad = wait()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class SparseApart:
    """Gradients in buckets, and for themselves those that turn out to be sparse in the first step."""

    def __init__(self, gradients: Gradients, ways: Ways) -> None:
        self.gradients = gradients
        self._ways = ways
        self._sparse: PerParameter | None = None

    @property
    def passes(self) -> int:
        """Backward passes a step."""
        return self.gradients.passes

    @passes.setter
    def passes(self, value: int) -> None:
        self.gradients.passes = value
        if self._sparse is not None:
            self._sparse.passes = value

    @property
    def pending(self) -> int:
        """How much was sent and not waited for."""
        return self.gradients.pending + (0 if self._sparse is None else self._sparse.pending)

    def flush(self) -> None:
        """Send what is not sent."""
        self.gradients.flush()
        if self._sparse is not None:
            self._sparse.flush()

    def wait(self) -> None:
        """Wait until all gradients are back. After the first step also part with those that are sparse."""
        self.gradients.wait()
        if self._sparse is not None:
            self._sparse.wait()
        elif self.gradients.dropped:
            for _, parameter in self.gradients.dropped:
                parameter.grad = None if parameter.grad is None else parameter.grad.to_sparse(1)
            self._sparse = PerParameter(
                self.gradients.dropped, Compression.none, self._ways, self.passes, (False, True)
            )

    def close(self) -> None:
        """Remove the hooks."""
        self.gradients.close()
        if self._sparse is not None:
            self._sparse.close()


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
