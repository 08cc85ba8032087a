"""Horovod's reductions on torch tensors in host memory."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from netbottleneck import steps
from netbottleneck.steps import Average, Sum, label
from netbottleneck.torch.compression import Compression, Compressor
from netbottleneck.torch.handles import apply, copied, numbers, started, synchronize


def _reduction(average: bool | None, op: int | None) -> int:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("give op or average, not both; average is deprecated")
    warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def _allreduce_steps(
    tensors: Sequence[torch.Tensor], output: Any, op: int, name: str, factors: tuple[float, float]
) -> steps.Steps[Any]:
    yield from steps.allreduce_steps([numbers(tensor) for tensor in tensors], op, name, *factors)
    return output


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce a tensor in place; return the handle. ValueError when the name is in use by a pending one."""
    return _allreduce_async_(tensor, name, _reduction(average, op), (prescale_factor, postscale_factor))


def _allreduce_async_(tensor: torch.Tensor, name: str | None, op: int, factors: tuple[float, float]) -> int:
    return started(_allreduce_steps([tensor], tensor, op, label("allreduce", name), factors))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce into a new tensor; return the handle."""
    return _allreduce_async_(copied(tensor), name, _reduction(average, op), (prescale_factor, postscale_factor))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: int, name: str | None, prescale: float, postscale: float
    ) -> torch.Tensor:
        ctx.arguments = (op, prescale, postscale)
        result: torch.Tensor = synchronize(_allreduce_async_(copied(tensor), name, op, (prescale, postscale)))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, prescale, postscale = ctx.arguments
        reduced = allreduce(gradients[0].contiguous(), op=op, prescale_factor=prescale, postscale_factor=postscale)
        return reduced, None, None, None, None


def allreduce(  # noqa: PLR0913, PLR0917 - Horovod's signature
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the reduction of the tensors of all ranks; gradients flow through it.

    tensor: contiguous, in host memory, of the same shape and type on all ranks. op: Average (the default), Sum, Min,
    Max or Product. prescale_factor is applied before, postscale_factor after the reduction.
    """
    op = _reduction(average, op)
    travelling, context = compression.compress(tensor)
    result = apply(_Allreduce, travelling, op, name, prescale_factor, postscale_factor)
    return compression.decompress(result, context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor in place, and return it."""
    op = _reduction(average, op)
    result: torch.Tensor = synchronize(_allreduce_async_(tensor, name, op, (prescale_factor, postscale_factor)))
    return result


def _grouped_async_(tensors: Sequence[torch.Tensor], name: str | None, op: int, factors: tuple[float, float]) -> int:
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    return started(_allreduce_steps(tensors, tuple(tensors), op, label("grouped_allreduce", name), factors))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce several tensors in place, as one; return the handle, whose output is a tuple."""
    return _grouped_async_(tensors, name, _reduction(average, op), (prescale_factor, postscale_factor))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce several tensors into new ones, as one; return the handle, whose output is a tuple."""
    copies = [copied(tensor) for tensor in tensors]
    return _grouped_async_(copies, name, _reduction(average, op), (prescale_factor, postscale_factor))


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: int, name: str | None, prescale: float, postscale: float, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (op, prescale, postscale)
        copies = [copied(tensor) for tensor in tensors]
        result: tuple[torch.Tensor, ...] = synchronize(_grouped_async_(copies, name, op, (prescale, postscale)))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, prescale, postscale = ctx.arguments
        reduced = grouped_allreduce(
            [gradient.contiguous() for gradient in gradients],
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
        )
        return (None, None, None, None, *reduced)


def grouped_allreduce(  # noqa: PLR0913, PLR0917 - Horovod's signature
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors, which travel as one; gradients flow through it."""
    op = _reduction(average, op)
    packed = [compression.compress(tensor) for tensor in tensors]
    results = apply(_GroupedAllreduce, op, name, prescale_factor, postscale_factor, *[tensor for tensor, _ in packed])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors in place, as one, and return them."""
    op = _reduction(average, op)
    return list(synchronize(_grouped_async_(tensors, name, op, (prescale_factor, postscale_factor))))
