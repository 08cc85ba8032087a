# ruff: noqa: PLR0913, PLR0917 - Horovod's signatures
"""Horovod's reductions on torch tensors in host memory."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from netbottleneck.runtime import async_operations, collectives
from netbottleneck.runtime.adasum import adasum_steps
from netbottleneck.runtime.async_operations import Adasum, Average, Sum, label
from netbottleneck.runtime.members import Members, ProcessSet, global_process_set, members_of
from netbottleneck.torch.compression import Compression, Compressor
from netbottleneck.torch.gradients import dtype_code
from netbottleneck.torch.handles import Memory, apply, copied, started, synchronize


def _reduction(average: bool | None, op: int | None) -> int:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("give op or average, not both; average is deprecated")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


Factors = tuple[float, float]  # before the reduction, and after


def _allreduce_steps(
    tensors: Sequence[torch.Tensor],
    output: Any,
    op: int,
    name: str | None,
    factors: Factors,
    process_set: ProcessSet,
) -> async_operations.Steps[Any]:
    among = members_of(process_set)
    kind = "allreduce" if output is tensors[0] else "grouped_allreduce"
    base = label(kind, name, among)
    if op == Adasum:
        each = enumerate(tensors)
        yield from async_operations.together(
            [_adasum_steps(tensor, f"{base}.{i}", among, factors) for i, tensor in each]
        )
    else:
        memories = [Memory(tensor) for tensor in tensors]
        arrays = [(memory.array, dtype_code(tensor.dtype)) for memory, tensor in zip(memories, tensors, strict=True)]
        yield from collectives.allreduce_steps(arrays, op, base, among, factors)
        for memory in memories:
            memory.over(written=True)
    return output


def _adasum_steps(tensor: torch.Tensor, name: str, among: Members, factors: Factors) -> async_operations.Steps[None]:
    wide = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy has no bfloat16
    memory = Memory(wide)
    yield from adasum_steps(memory.array, name, among, factors)
    memory.over(written=True)
    if wide is not tensor:
        tensor.detach().copy_(wide)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor in place; return the handle. ValueError when the name is in use by a pending one."""
    return _allreduce_async_(tensor, name, _reduction(average, op), (prescale_factor, postscale_factor), process_set)


def _allreduce_async_(
    tensor: torch.Tensor, name: str | None, op: int, factors: Factors, process_set: ProcessSet
) -> int:
    return started(_allreduce_steps([tensor], tensor, op, name, factors, process_set))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce into a new tensor; return the handle."""
    return _allreduce_async_(
        copied(tensor), name, _reduction(average, op), (prescale_factor, postscale_factor), process_set
    )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: int, name: str | None, factors: Factors, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.arguments = (op, factors, process_set)
        result: torch.Tensor = synchronize(_allreduce_async_(copied(tensor), name, op, factors, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, factors, process_set = ctx.arguments
        reduced = apply(_Allreduce, gradients[0].contiguous(), op, None, factors, process_set)
        return reduced, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of the tensors of all ranks; gradients flow through it.

    tensor: contiguous, in host memory, of the same shape and type on all ranks. op: Average (the default), Sum, Min,
    Max, Product or Adasum. prescale_factor is applied before, postscale_factor after the reduction.
    """
    op = _reduction(average, op)
    travelling, context = compression.compress(tensor)
    result = apply(_Allreduce, travelling, op, name, (prescale_factor, postscale_factor), process_set)
    return compression.decompress(result, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place, and return it."""
    op = _reduction(average, op)
    result: torch.Tensor = synchronize(
        _allreduce_async_(tensor, name, op, (prescale_factor, postscale_factor), process_set)
    )
    return result


def _grouped_async_(
    tensors: Sequence[torch.Tensor], name: str | None, op: int, factors: Factors, process_set: ProcessSet
) -> int:
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    return started(_allreduce_steps(tensors, tuple(tensors), op, name, factors, process_set))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce several tensors in place, as one; return the handle, whose output is a tuple."""
    return _grouped_async_(tensors, name, _reduction(average, op), (prescale_factor, postscale_factor), process_set)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce several tensors into new ones, as one; return the handle, whose output is a tuple."""
    copies = [copied(tensor) for tensor in tensors]
    return _grouped_async_(copies, name, _reduction(average, op), (prescale_factor, postscale_factor), process_set)


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: int, name: str | None, factors: Factors, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (op, factors, process_set)
        copies = [copied(tensor) for tensor in tensors]
        result: tuple[torch.Tensor, ...] = synchronize(_grouped_async_(copies, name, op, factors, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, factors, process_set = ctx.arguments
        whole = [gradient.contiguous() for gradient in gradients]
        return (None, None, None, None, *apply(_GroupedAllreduce, op, None, factors, process_set, *whole))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors, which travel as one; gradients flow through it."""
    op = _reduction(average, op)
    packed = [compression.compress(tensor) for tensor in tensors]
    factors = (prescale_factor, postscale_factor)
    results = apply(_GroupedAllreduce, op, name, factors, process_set, *[tensor for tensor, _ in packed])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors in place, as one, and return them."""
    op = _reduction(average, op)
    return list(synchronize(_grouped_async_(tensors, name, op, (prescale_factor, postscale_factor), process_set)))
