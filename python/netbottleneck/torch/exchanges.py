"""Horovod's operations on torch tensors in host memory that join, spread or exchange them, and those without any."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from netbottleneck.runtime import async_operations, collectives, job
from netbottleneck.runtime.async_operations import Average, label
from netbottleneck.runtime.members import Members, ProcessSet, global_process_set, members_of
from netbottleneck.torch.gradients import dtype_code
from netbottleneck.torch.handles import Memory, apply, check, copied, started, synchronize
from netbottleneck.torch.reductions import allreduce


def tensor_of(array: async_operations.Array, like: torch.Tensor) -> torch.Tensor:
    """Return what an array holds as a tensor of the type of another one, whose `Memory` it is like.

    The tensor's memory is torch's own: one over the array's could not be resized.
    """
    made = torch.empty(array.shape, dtype=like.dtype)
    (made.view(torch.int16) if like.dtype == torch.bfloat16 else made).copy_(torch.from_numpy(array))
    return made


def _broadcast_steps(
    tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> async_operations.Steps[torch.Tensor]:
    among = members_of(process_set)
    memory = Memory(tensor)
    array, code = (
        (memory.array, dtype_code(tensor.dtype))
        if tensor.dtype == torch.bfloat16
        else async_operations.as_bytes(memory.array)
    )
    yield from collectives.broadcast_steps(array, code, root_rank, label("broadcast", name, among), among)
    memory.over(written=True)
    return tensor


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to give every rank the root's tensor, in place; return the handle. root_rank: of the job, in any set."""
    return started(_broadcast_steps(tensor, root_rank, name, process_set))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to give every rank the root's tensor, in a new one; return the handle."""
    return broadcast_async_(copied(tensor), root_rank, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = allreduce(gradients[0].contiguous(), op=Average, process_set=ctx.process_set)
        here = job.current().place.rank == ctx.root_rank
        return (reduced if here else reduced.zero_()), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor; its gradient is the average of all ranks' on the root, and 0 elsewhere."""
    result: torch.Tensor = apply(_Broadcast, tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Give every rank the root's tensor in place, and return it."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def _allgather_steps(tensor: torch.Tensor, name: str, among: Members) -> async_operations.Steps[torch.Tensor]:
    memory = Memory(tensor)
    parts = yield from collectives.allgather_steps(memory.array, name, among)
    memory.over(written=False)
    return tensor_of(np.concatenate(parts), tensor)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to join the tensors of all ranks along the first dimension, which may differ; return the handle."""
    among = members_of(process_set)
    return started(_allgather_steps(tensor, label("allgather", name, among), among))


def grouped(
    of_one: Callable[[torch.Tensor, str], async_operations.Steps[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    base: str,
) -> async_operations.Steps[tuple[torch.Tensor, ...]]:
    """Return what an operation makes of each of several tensors, which go on side by side."""
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    for tensor in tensors:
        check(tensor)  # what cannot travel is known before any of them does
    count = len(tensors)
    each = [of_one(tensor, f"{base}_{index + 1}of{count}") for index, tensor in enumerate(tensors)]
    return tuple((yield from async_operations.together(each)))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to join several tensors, each with those in its place on the other ranks; return the handle."""
    among = members_of(process_set)
    base = label("grouped_allgather", name, among)
    return started(grouped(lambda tensor, one: _allgather_steps(tensor, one, among), tensors, base))


def _own_rows(gradient: torch.Tensor, rows: int, shape: torch.Size, process_set: ProcessSet) -> torch.Tensor:
    """Return this rank's part of the average of what all ranks say of a joined tensor."""
    reduced = allreduce(gradient.contiguous(), op=Average, process_set=process_set)
    told = allgather(torch.tensor([rows]), process_set=process_set)
    start = int(told[: members_of(process_set).rank].sum())
    return reduced.narrow(0, start, rows).reshape(shape)


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.rows, ctx.shape, ctx.process_set = _rows(tensor), tensor.shape, process_set
        result: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _own_rows(gradients[0], ctx.rows, ctx.shape, ctx.process_set), None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensors of all ranks joined along the first dimension; a gradient is the average over the ranks."""
    result: torch.Tensor = apply(_Allgather, tensor, name, process_set)
    return result


class _GroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.outlines, ctx.process_set = [(_rows(tensor), tensor.shape) for tensor in tensors], process_set
        result: tuple[torch.Tensor, ...] = synchronize(grouped_allgather_async(tensors, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        each = zip(gradients, ctx.outlines, strict=True)
        return None, None, *[_own_rows(gradient, rows, shape, ctx.process_set) for gradient, (rows, shape) in each]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return several tensors, each joined with those in its place on the other ranks; gradients flow as allgather's."""
    return list(apply(_GroupedAllgather, name, process_set, *tensors))
