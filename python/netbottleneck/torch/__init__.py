"""Horovod's API: `import netbottleneck.torch as hvd` in place of `import horovod.torch as hvd`."""

from netbottleneck.errors import HostsUpdatedInterrupt
from netbottleneck.runtime import job
from netbottleneck.torch import backend, elastic, mpi_ops
from netbottleneck.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from netbottleneck.torch.mpi_ops import *  # noqa: F403 - all names of horovod.torch.mpi_ops
from netbottleneck.torch.optimizer import DistributedOptimizer
from netbottleneck.torch.sync_batch_norm import SyncBatchNorm

job.register_backend(backend.create)

__all__ = [
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "mpi_ops",
]
__all__ += mpi_ops.__all__
