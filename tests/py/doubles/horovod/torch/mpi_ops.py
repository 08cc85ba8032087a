"""The double's Python layer: it looks its library up in this module, on every call, as Horovod does."""

from __future__ import annotations

import os
from typing import Any

import torch

from .library import Library

mpi_lib: Any = Library()
Average, Sum, Adasum = 0, 1, 2
_handle_map: dict[int, Any] = {}


class HorovodInternalError(RuntimeError):
    pass


def init() -> None:
    _handle_map.clear()


def shutdown() -> None:
    mpi_lib.horovod_torch_reset()


def rank() -> int:
    return int(os.environ["RANK"])


def size() -> int:
    return int(os.environ.get("HOROVOD_DOUBLE_SIZE", os.environ["WORLD_SIZE"]))


def mpi_enabled() -> bool:
    return False


def _called(kind: str, of: torch.Tensor, tensor: Any, output: Any, *rest: Any) -> int:
    function = f"horovod_torch_{kind}_async_{of.type().replace('.', '_')}"
    if not hasattr(mpi_lib, function):
        raise ValueError(f"Tensor type {of.type()} is not supported.")
    try:
        handle: int = getattr(mpi_lib, function)(tensor, output, *rest)
    except RuntimeError as error:
        raise HorovodInternalError(error) from error
    _handle_map[handle] = (tensor, output)
    return handle


def _label(name: str | None) -> Any:
    return name.encode() if name is not None else ""


def allreduce_async_(
    tensor: torch.Tensor, name: str | None = None, op: int = Average, before: float = 1.0, after: float = 1.0
) -> int:
    return _called("allreduce", tensor, tensor, tensor, 1, _label(name), op, before, after, 0)


def allreduce_async(tensor: torch.Tensor, name: str | None = None, op: int = Average, process_set: int = 0) -> int:
    output = tensor.new_empty(tensor.shape)
    return _called("allreduce", tensor, tensor, output, 1, _label(name), op, 1.0, 1.0, process_set)


def allreduce(tensor: torch.Tensor, name: str | None = None, op: int = Average, process_set: int = 0) -> torch.Tensor:
    found: torch.Tensor = synchronize(allreduce_async(tensor, name, op, process_set))
    return found


def grouped_allreduce_async_(tensors: list[torch.Tensor], name: str) -> int:
    return _called("grouped_allreduce", tensors[0], tensors, tensors, 1, _label(name), Average, 1.0, 1.0, 0)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str) -> Any:
    return synchronize(_called("broadcast", tensor, tensor, tensor, root_rank, _label(name), 0))


def poll(handle: int) -> bool:
    return bool(mpi_lib.horovod_torch_poll(handle) != 0)


def synchronize(handle: int) -> Any:
    if handle not in _handle_map:
        return None
    try:
        mpi_lib.horovod_torch_wait_and_clear(handle)
    except RuntimeError as error:
        _handle_map.pop(handle, None)
        raise HorovodInternalError(error) from error
    return _handle_map.pop(handle)[-1]


def barrier() -> None:
    handle = mpi_lib.horovod_torch_barrier(0)
    _handle_map[handle] = (None, None)
    synchronize(handle)


def join() -> int:
    output = torch.tensor(-1, dtype=torch.int32)
    try:
        handle = mpi_lib.horovod_torch_join(output, -1)
    except RuntimeError as error:
        raise HorovodInternalError(error) from error
    _handle_map[handle] = (None, output)
    return int(synchronize(handle))
