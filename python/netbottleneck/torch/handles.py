"""Tensors as the engine sees them, and operations under way by number."""

from typing import Any

import torch

from netbottleneck.runtime import async_operations, job
from netbottleneck.torch.gradients import dtype_code


def bare(tensor: torch.Tensor) -> async_operations.Array:
    """Return an array over the tensor's memory: of its type where NumPy has it, else of 16-bit integers."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"a {tensor.layout} tensor on {tensor.device} is not supported: tensors travel from host memory"
        )
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    plain = tensor.detach()
    array: async_operations.Array = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


def numbers(tensor: torch.Tensor) -> tuple[async_operations.Array, int]:
    """Return the tensor's memory and type, for a reduction."""
    return bare(tensor), dtype_code(tensor.dtype)


def started(operation: async_operations.Steps[Any]) -> int:
    """Start an operation and return its handle."""
    return job.current().hold(async_operations.Pending(operation))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, once it is sure that it can travel."""
    bare(tensor)
    return tensor.detach().clone()


def poll(handle: int) -> bool:
    """Return whether synchronize(handle) would return, or raise, at once."""
    pending = job.current().handles.get(handle)
    return pending is None or pending.poll()


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its output: a tensor, or a tuple for a group. None for an unknown handle.

    Raises HorovodInternalError when the operation failed.
    """
    if not job.is_started():
        return None
    pending = job.current().handles.pop(handle, None)
    return None if pending is None else pending.wait()


def apply(function: Any, *arguments: Any) -> Any:
    """Call an autograd function."""
    return function.apply(*arguments)
