"""Horovod's collectives on torch tensors in host memory. Handles are numbers; operations match by name."""

from typing import Any

import numpy as np
import torch

from netbottleneck import ops, steps
from netbottleneck.steps import Adasum, Average, Max, Min, Product, Sum, label
from netbottleneck.torch.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from netbottleneck.torch.gradients import dtype_code
from netbottleneck.torch.handles import apply, bare, copied, poll, started, synchronize
from netbottleneck.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]


def _broadcast_steps(tensor: torch.Tensor, root_rank: int, name: str) -> steps.Steps[torch.Tensor]:
    array = bare(tensor)
    memory, code = (array, dtype_code(tensor.dtype)) if tensor.dtype == torch.bfloat16 else steps.as_bytes(array)
    yield from steps.broadcast_steps(memory, code, root_rank, name)
    return tensor


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Start to give every rank the root's tensor, in place; return the handle."""
    return started(_broadcast_steps(tensor, root_rank, label("broadcast", name)))


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> int:
    """Start to give every rank the root's tensor, in a new one; return the handle."""
    return broadcast_async_(copied(tensor), root_rank, name)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = allreduce(gradients[0].contiguous(), op=Average)
        return (reduced if rank() == ctx.root_rank else reduced.zero_()), None, None


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's tensor; its gradient is the average of all ranks' on the root, and 0 elsewhere."""
    result: torch.Tensor = apply(_Broadcast, tensor, root_rank, name)
    return result


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Give every rank the root's tensor in place, and return it."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name))
    return result


def _allgather_steps(tensor: torch.Tensor, name: str) -> steps.Steps[torch.Tensor]:
    parts = yield from steps.allgather_steps(bare(tensor), name)
    joined = torch.from_numpy(np.concatenate(parts))
    return joined.view(torch.bfloat16) if tensor.dtype == torch.bfloat16 else joined


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> int:
    """Start to join the tensors of all ranks along the first dimension, which may differ; return the handle."""
    return started(_allgather_steps(tensor, label("allgather", name)))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        ctx.rows = tensor.shape[0] if tensor.dim() else 1
        ctx.shape = tensor.shape
        result: torch.Tensor = synchronize(allgather_async(tensor, name))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reduced = allreduce(gradients[0].contiguous(), op=Average)
        rows = allgather(torch.tensor([ctx.rows]))
        start = int(rows[: rank()].sum())
        return reduced.narrow(0, start, ctx.rows).reshape(ctx.shape), None


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks joined along the first dimension; a gradient is the average over the ranks."""
    result: torch.Tensor = apply(_Allgather, tensor, name)
    return result


def barrier() -> None:
    """Return once every rank has called it."""
    ops.barrier()
