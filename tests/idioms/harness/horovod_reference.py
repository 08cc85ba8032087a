"""What Horovod 0.28.1 computes, written out over torch.distributed: the untouched side of the Horovod idioms.

Gradients are reduced in synchronize(), in the order of the parameters: what a script may look at is the same then as
with reductions that run beside the backward pass. Sums are averaged by a product with 1/size after them, compressed
ones before they are decompressed; .grad stays the same tensor. backward_passes_per_step divides nothing.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Average, Sum, Adasum, Min, Max, Product = range(6)
_OPS = {Average: "SUM", Sum: "SUM", Min: "MIN", Max: "MAX", Product: "PRODUCT"}

follow: Callable[[Iterable[torch.Tensor]], None] = lambda _parameters: None  # noqa: E731 - set by the harness


def init(*_: Any, **__: Any) -> None:
    """Nothing: the process group is there."""


def shutdown() -> None:
    """Nothing: the process group stays."""


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


local_rank, local_size = rank, size


def allreduce_(
    tensor: torch.Tensor,
    average: Any = None,
    name: Any = None,
    op: int = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce in place: prescale, the operation over all ranks, then one product with postscale / size."""
    if prescale_factor != 1.0:
        tensor.mul_(prescale_factor)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, _OPS[op]))
    factor = postscale_factor / size() if op == Average else postscale_factor
    return tensor.mul_(factor) if factor != 1.0 else tensor


def allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return allreduce_(tensor.detach().clone(), *args, **kwargs)


def allgather(tensor: torch.Tensor, name: Any = None) -> torch.Tensor:
    """Return the tensors of all ranks joined on dimension 0, in which they may differ."""
    rows = [torch.zeros(1, dtype=torch.long) for _ in range(size())]
    dist.all_gather(rows, torch.tensor([tensor.shape[0]]))
    most = max(int(each) for each in rows)
    padded = tensor.new_zeros((most, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    made = [torch.empty_like(padded) for _ in range(size())]
    dist.all_gather(made, padded)
    return torch.cat([part[: int(each)] for part, each in zip(made, rows, strict=True)])


def broadcast_(tensor: torch.Tensor, root_rank: int, name: Any = None) -> torch.Tensor:
    dist.broadcast(tensor, root_rank)
    return tensor


def broadcast_object(value: Any, root_rank: int = 0, name: Any = None) -> Any:
    box = [value]
    dist.broadcast_object_list(box, root_rank)
    return box[0]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    items = sorted(params.items()) if isinstance(params, dict) else list(params)
    for _, tensor in items:
        dist.broadcast(tensor.detach(), root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give all ranks the state of one. State that is not there yet is made by a step with gradients of zero."""
    if not optimizer.state_dict()["state"]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        made = optimizer._base if hasattr(optimizer, "_base") else type(optimizer)
        made.step(optimizer)
    state = broadcast_object(pickle.dumps(optimizer.state_dict()), root_rank)
    optimizer.load_state_dict(pickle.loads(state))


class Compression:
    """Horovod's two compressors."""

    class none:
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor

    class fp16:
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.type(ctx)


class _Distributed:
    """What a distributed optimizer adds to the class of the optimizer that it is made from."""

    def _prepare(self, passes: int, how: dict[str, Any]) -> None:
        self._how, self.backward_passes_per_step = how, passes
        self._synchronized, self._should_synchronize = False, True
        self._passes: dict[torch.Tensor, int] = {}
        self._parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._count)
        follow(self._parameters)

    def _count(self, parameter: torch.Tensor) -> None:
        self._passes[parameter] = self._passes.get(parameter, 0) + 1
        if self._passes[parameter] > self.backward_passes_per_step:
            raise AssertionError("Gradients were computed more than backward_passes_per_step times before step()")

    def synchronize(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._reduce(parameter)
        self._passes.clear()
        self._synchronized = True

    def _reduce(self, parameter: torch.Tensor) -> None:
        compression, op, predivide = self._how["compression"], self._how["op"], self._how["predivide"]
        gradient = parameter.grad
        if gradient.is_sparse and not self._how["sparse_as_dense"]:
            indices, values = allgather(gradient._indices().t().contiguous()).t(), allgather(gradient._values())
            values = values / size() if op == Average else values
            gradient.zero_().add_(torch.sparse_coo_tensor(indices, values, gradient.size(), check_invariants=False))
            return
        small, ctx = compression.compress(gradient.to_dense() if gradient.is_sparse else gradient)
        factors = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        reduced = compression.decompress(allreduce_(small, None, None, op, *factors), ctx)
        if gradient.is_sparse:
            gradient.zero_().add_(reduced.to_sparse())
        else:
            gradient.set_(reduced)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        return self._base.step(self, closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._passes:
            raise AssertionError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step()")
        self._base.zero_grad(self, *args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._passes.clear()
        self._base.load_state_dict(self, *args, **kwargs)


def DistributedOptimizer(  # noqa: PLR0917 - Horovod's name and signature
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
) -> Any:
    base = type(optimizer)
    made = copy.copy(optimizer)
    made.__class__ = type(base.__name__, (_Distributed, base), {"_base": base})
    made._prepare(
        backward_passes_per_step,
        {
            "compression": compression,
            "op": op,
            "predivide": gradient_predivide_factor,
            "sparse_as_dense": sparse_as_dense,
        },
    )
    return made


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalisation over the batches of all ranks; weights of ranks differ by how many rows each has."""

    def _check_input_dim(self, inputs: torch.Tensor) -> None:
        return

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_reduce

        if not self.training:
            return torch.nn.functional.batch_norm(
                inputs, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        across = [axis for axis in range(inputs.dim()) if axis != 1]
        shape = [1, -1, *([1] * (inputs.dim() - 2))]
        count = all_reduce(torch.tensor(float(inputs.numel() // inputs.shape[1]), dtype=torch.float64))
        wide = inputs.double()
        mean = all_reduce(wide.sum(across)) / count
        variance = all_reduce((wide - mean.view(shape)).square().sum(across)) / count
        with torch.no_grad():
            rate = self.momentum
            self.running_mean.mul_(1 - rate).add_(mean.to(inputs.dtype), alpha=rate)
            unbiased = variance * count / (count - 1)
            self.running_var.mul_(1 - rate).add_(unbiased.to(inputs.dtype), alpha=rate)
            self.num_batches_tracked.add_(1)
        normal = (wide - mean.view(shape)) * (variance.view(shape) + self.eps).rsqrt()
        return (normal * self.weight.view(shape) + self.bias.view(shape)).to(inputs.dtype)
