"""The double of horovod.torch."""

from .mpi_ops import (
    HorovodInternalError,
    Sum,
    allreduce,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast_,
    init,
    join,
    mpi_lib,
    poll,
    rank,
    shutdown,
    size,
    synchronize,
)
from .optimizer import DistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "HorovodInternalError",
    "Sum",
    "allreduce",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast_",
    "init",
    "join",
    "mpi_lib",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
