"""What carries the gradients of a distributed optimizer, in the job that runs: buckets, or each gradient for itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from netbottleneck.runtime import async_operations, collectives, job
from netbottleneck.runtime.members import Members, ProcessSet, global_process_set, members_of
from netbottleneck.torch.compression import Compression, Compressor
from netbottleneck.torch.gradients import Gradients, own_type
from netbottleneck.torch.one_by_one import PassGuard, PerParameter, SparseApart, Ways
from netbottleneck.torch.reductions import allreduce_async_
from netbottleneck.torch.scatters import sparse_allreduce_async


class Carrier(Protocol):
    """What carries an optimizer's gradients."""

    passes: int

    @property
    def pending(self) -> int:
        """How much was sent and not waited for."""

    def flush(self) -> None:
        """Send what is not sent."""

    def wait(self) -> None:
        """Wait until all gradients are back."""

    def close(self) -> None:
        """Remove the hooks."""


@dataclass(frozen=True)
class Wanted:
    """How an optimizer's gradients are to be reduced, in every job: what DistributedOptimizer was called with."""

    label: str  # of its operations, the same on all ranks and another's never
    compression: type[Compressor]
    op: int
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet


class Guarded:
    """Another carrier, and what keeps autograd from adding to memory that is being reduced."""

    def __init__(self, inner: Carrier, guard: PassGuard) -> None:
        self.inner = inner
        self._guard = guard

    @property
    def passes(self) -> int:
        """Backward passes a step."""
        return self.inner.passes

    @passes.setter
    def passes(self, value: int) -> None:
        self.inner.passes = value
        self._guard.limit = value

    @property
    def pending(self) -> int:
        """How much was sent and not waited for."""
        return self.inner.pending

    def flush(self) -> None:
        """Send what is not sent."""
        self.inner.flush()

    def wait(self) -> None:
        """Wait until all gradients are back."""
        try:
            self.inner.wait()
        finally:
            self._guard.reset()

    def close(self) -> None:
        """Remove the hooks."""
        self.inner.close()
        self._guard.close()


def carrier(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], passes: int, wanted: Wanted
) -> Carrier | None:
    """Return what carries the gradients of an optimizer in the job that runs; None where they stay as they are.

    Raises ValueError for a process set that this job does not know, and as Gradients.
    """
    if wanted.process_set.included() is False:
        return None
    among = members_of(wanted.process_set)
    async_operations.reduction(wanted.op, among.size)  # an op that is none is refused on one rank, too
    if among.size == 1 and job.current().recorder is None:
        return None
    all_sparse = isinstance(optimizer, torch.optim.SparseAdam)  # which takes no others
    alone = all_sparse or wanted.sparse_as_dense or any(map(own_type, names))
    if alone or wanted.compression is not Compression.none:
        named = ((name, parameter) for parameter, name in names.items())
        each = PerParameter(named, wanted.compression, _ways(wanted), passes, (wanted.sparse_as_dense, all_sparse))
        if wanted.process_set is global_process_set:
            job.current().observer.gradients(each, optimizer)
        return each
    guard = PassGuard([parameter for parameter in names if parameter.requires_grad], passes)  # its hooks come first
    try:
        return Guarded(_buckets(optimizer, names, passes, wanted), guard)
    except BaseException:
        guard.close()
        raise


def _buckets(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], passes: int, wanted: Wanted) -> Carrier:
    this, among = job.current(), members_of(wanted.process_set)
    everybody = wanted.process_set is global_process_set
    apart = wanted.op in (async_operations.Average, async_operations.Sum)
    gradients = Gradients(
        ((name, parameter) for parameter, name in names.items()),
        recorder=this.recorder,
        passes=passes,
        direct_bytes=this.settings.direct_bytes,
        label=wanted.label,
        agree=_agreement(wanted.label, among) if not everybody else _rank_0s if among.size > 1 else None,
        among=None if everybody else among,
        drop_sparse=apart,
    )
    moved = among.size > 1 and this.settings.transports[0] != "null"
    reduction, _ = async_operations.reduction(wanted.op, among.size)
    average = wanted.op == async_operations.Average
    gradients.target(this.comm if moved else None, average, predivide=wanted.predivide, op=reduction)
    if everybody:  # who looks on may have to agree with all ranks
        this.observer.gradients(gradients, optimizer)
    return SparseApart(gradients, _ways(wanted)) if apart else gradients


def _rank_0s(mine: bytes) -> bytes:
    """Return the bytes of rank 0, whatever moves the gradients."""
    return job.current().comm.exchange(mine)[0]


def _agreement(label: str, among: Members) -> Callable[[bytes], bytes]:
    """Return what gives all ranks of a set the bytes of its first one."""

    def agree(mine: bytes) -> bytes:
        array = np.frombuffer(bytearray(mine), np.uint8)
        code = int(job.core().UINT8)
        name = async_operations.label("order", f"{label}.{job.current().number(label)}", among)
        async_operations.Pending(collectives.broadcast_steps(array, code, among.ranks[0], name, among)).wait()
        return array.tobytes()

    return agree


def _ways(wanted: Wanted) -> Ways:
    """Return how gradients travel one by one."""

    def dense(tensor: torch.Tensor, name: str) -> int:
        return allreduce_async_(
            tensor,
            name=f"{wanted.label}.{name}",
            op=wanted.op,
            prescale_factor=1.0 / wanted.predivide,
            postscale_factor=wanted.predivide,
            process_set=wanted.process_set,
        )

    def sparse(tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        return sparse_allreduce_async(tensor, f"{wanted.label}.{name}", wanted.op, wanted.process_set)

    among = members_of(wanted.process_set)
    reduction, _ = async_operations.reduction(wanted.op, among.size)
    factors = (wanted.op == async_operations.Average, wanted.predivide, reduction)
    return Ways(
        dense, sparse, lambda name: async_operations.label("allreduce", f"{wanted.label}.{name}", among), factors
    )
