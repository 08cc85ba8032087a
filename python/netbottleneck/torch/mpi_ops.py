"""Horovod's collectives on torch tensors in host and CUDA memory. Handles are numbers; operations match by name."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from netbottleneck.errors import HorovodInternalError
from netbottleneck.runtime import async_operations, collectives, job
from netbottleneck.runtime.async_operations import (
    Adasum,
    Average,
    Max,
    Members,
    Min,
    ProcessSet,
    Product,
    Sum,
    fitted,
    global_process_set,
    label,
    members_of,
)
from netbottleneck.runtime.collectives import adasum_steps, add_process_set, remove_process_set
from netbottleneck.runtime.horovod_common import (
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
    start_timeline,
    stop_timeline,
)
from netbottleneck.torch.compression import Compression, Compressor, check_compression
from netbottleneck.torch.gradients import dtype_code
from netbottleneck.torch.handles import Memory, apply, array_dtype, check, copied, poll, started, synchronize

# Reductions.

# ruff: noqa: PLR0913, PLR0917 - Horovod's signatures


Factors = tuple[float, float]  # before and after the reduction


class Reduction(NamedTuple):
    """How tensors are reduced, and among which ranks."""

    op: int
    factors: Factors
    process_set: ProcessSet


def _reduction(
    average: bool | None, op: int | None, prescale_factor: float, postscale_factor: float, process_set: ProcessSet
) -> Reduction:
    """Return the reduction of Horovod's arguments. Raises ValueError for both op and average.

    Called by the public functions themselves: the warning names the caller of its caller.
    """
    if average is not None:
        if op is not None:
            raise ValueError("give op or average, not both; average is deprecated")
        warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    return Reduction(Average if op is None else op, (prescale_factor, postscale_factor), process_set)


def _start_allreduce(tensors: Sequence[torch.Tensor], name: str | None, how: Reduction, *, grouped: bool) -> int:
    """Start to reduce tensors in place, as one operation; return the handle. Output: a tuple for a group."""
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    return started(_allreduce_steps(tuple(tensors), name, how, grouped), tensors)


def _allreduce_steps(
    tensors: tuple[torch.Tensor, ...], name: str | None, how: Reduction, grouped: bool
) -> async_operations.Steps[Any]:
    among = members_of(how.process_set)
    base = label("grouped_allreduce" if grouped else "allreduce", name, among)
    if how.op == Adasum:
        each = enumerate(tensors)
        yield from async_operations.together(
            [_adasum_steps(tensor, f"{base}.{i}", among, how.factors) for i, tensor in each]
        )
    else:
        memories = [Memory(tensor) for tensor in tensors]
        arrays = [(memory.array, dtype_code(tensor.dtype)) for memory, tensor in zip(memories, tensors, strict=True)]
        yield from collectives.allreduce_steps(arrays, how.op, base, among, how.factors)
        for memory in memories:
            memory.over(written=True)
    return tensors if grouped else tensors[0]


def _adasum_steps(tensor: torch.Tensor, name: str, among: Members, factors: Factors) -> async_operations.Steps[None]:
    wide = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy has no bfloat16
    if not wide.is_cpu:
        check(wide)
        wide = wide.detach().cpu()  # the host computes it
    memory = Memory(wide)
    dtype_code(wide.dtype)  # refuses a type that cannot be reduced, which the array may not show
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
    """Start to reduce a tensor in place; return the handle. ValueError if a pending operation has the name."""
    how = _reduction(average, op, prescale_factor, postscale_factor, process_set)
    return _start_allreduce([tensor], name, how, grouped=False)


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
    how = _reduction(average, op, prescale_factor, postscale_factor, process_set)
    return _start_allreduce([copied(tensor)], name, how, grouped=False)


def _compressed(
    tensors: Sequence[torch.Tensor], compression: type[Compressor], function: Any, *arguments: Any
) -> list[torch.Tensor]:
    """Return what an autograd function makes of the compressed tensors, decompressed. Its tensors come last."""
    check_compression(compression)
    packed = [compression.compress(tensor) for tensor in tensors]
    results = apply(function, *arguments, *[tensor for tensor, _ in packed])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, how: Reduction, grouped: bool, *tensors: torch.Tensor) -> Any:
        ctx.arguments = (how, grouped)
        result = synchronize(_start_allreduce([copied(tensor) for tensor in tensors], name, how, grouped=grouped))
        return result if grouped else (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = [gradient.contiguous() for gradient in gradients]
        return None, None, None, *apply(_Allreduce, None, *ctx.arguments, *whole)


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

    tensor: contiguous, in host or CUDA memory, of the same shape and type on all ranks. op: Average (the default),
    Sum, Min, Max, Product or Adasum. prescale_factor is applied before, postscale_factor after the reduction.
    """
    how = _reduction(average, op, prescale_factor, postscale_factor, process_set)
    return _compressed([tensor], compression, _Allreduce, name, how, False)[0]


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
    how = _reduction(average, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(_start_allreduce([tensor], name, how, grouped=False))
    return result


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
    how = _reduction(average, op, prescale_factor, postscale_factor, process_set)
    return _start_allreduce(tensors, name, how, grouped=True)


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
    how = _reduction(average, op, prescale_factor, postscale_factor, process_set)
    return _start_allreduce([copied(tensor) for tensor in tensors], name, how, grouped=True)


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
    """Return the reductions of several tensors, sent as one; differentiable."""
    how = _reduction(average, op, prescale_factor, postscale_factor, process_set)
    return _compressed(tensors, compression, _Allreduce, name, how, True)


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
    how = _reduction(average, op, prescale_factor, postscale_factor, process_set)
    return list(synchronize(_start_allreduce(tensors, name, how, grouped=True)))


# Operations that gather, broadcast or exchange tensors.


def joined(parts: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
    """Return arrays, joined along the first dimension, as a tensor of the type of `like`.

    The arrays come from a `Memory` of such a tensor. The tensor's memory is torch's own, because memory of an array
    could not be resized.
    """
    if not like.is_cpu:
        return torch.cat(list(parts)).view(like.dtype)
    array = np.concatenate(parts)
    made = torch.empty(array.shape, dtype=like.dtype, device="cpu")
    made.view(array_dtype(like.dtype)).copy_(torch.from_numpy(array))
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
    """Start to broadcast the root's tensor in place; return the handle. root_rank: in the job, for any set."""
    return started(_broadcast_steps(tensor, root_rank, name, process_set), [tensor])


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to broadcast the root's tensor to a new one; return the handle."""
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
    """Broadcast the root's tensor in place, and return it."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def _allgather_steps(tensor: torch.Tensor, name: str, among: Members) -> async_operations.Steps[torch.Tensor]:
    memory = Memory(tensor)
    parts = yield from collectives.allgather_steps(memory.array, name, among)
    memory.over(written=False)
    return joined(parts, tensor)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to join the tensors of all ranks along the first dimension, which may differ; return the handle."""
    among = members_of(process_set)
    return started(_allgather_steps(tensor, label("allgather", name, among), among), [tensor])


def grouped(
    of_one: Callable[[torch.Tensor, str], async_operations.Steps[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    base: str,
) -> async_operations.Steps[tuple[torch.Tensor, ...]]:
    """Return the results of one operation for each tensor; they run concurrently."""
    if not tensors:
        raise ValueError("a group needs at least one tensor")
    for tensor in tensors:
        check(tensor)  # refuse a tensor that cannot be sent before any is sent
    count = len(tensors)
    each = [of_one(tensor, fitted(f"{base}_{index + 1}of{count}")) for index, tensor in enumerate(tensors)]
    return tuple((yield from async_operations.together(each)))


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to join several tensors, each with its counterparts on the other ranks; return the handle."""
    among = members_of(process_set)
    base = label("grouped_allgather", name, among)
    return started(grouped(lambda tensor, one: _allgather_steps(tensor, one, among), tensors, base), tensors)


def _own_rows(gradient: torch.Tensor, rows: int, shape: torch.Size, process_set: ProcessSet) -> torch.Tensor:
    """Return this rank's rows of the averaged gradient of a joined tensor."""
    reduced = allreduce(gradient.contiguous(), op=Average, process_set=process_set)
    counts = allgather(torch.tensor([rows]), process_set=process_set)
    start = int(counts[: members_of(process_set).rank].sum())
    return reduced.narrow(0, start, rows).reshape(shape)


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        result: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        ctx.rows, ctx.shape, ctx.process_set = _rows(tensor), tensor.shape, process_set
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
        result: tuple[torch.Tensor, ...] = synchronize(grouped_allgather_async(tensors, name, process_set))
        ctx.outlines, ctx.process_set = [(_rows(tensor), tensor.shape) for tensor in tensors], process_set
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        each = zip(gradients, ctx.outlines, strict=True)
        return None, None, *[_own_rows(gradient, rows, shape, ctx.process_set) for gradient, (rows, shape) in each]


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return several tensors, each joined with its counterparts on the other ranks; differentiable like allgather."""
    return list(apply(_GroupedAllgather, name, process_set, *tensors))


# Operations that scatter their result, and operations without a tensor.


def _alltoall_steps(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> async_operations.Steps[tuple[torch.Tensor, torch.Tensor]]:
    among = members_of(process_set)
    whole = splits if splits is None or isinstance(splits, torch.Tensor) else torch.as_tensor(splits, device="cpu")
    if whole is not None and whole.is_floating_point():
        raise ValueError(f"splits must be whole numbers, not {whole.dtype}")
    rows = None if whole is None else whole.reshape(-1).tolist()
    counted = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32
    name = label("alltoall", name, among)
    memory = Memory(tensor)
    found, incoming = yield from collectives.alltoall_steps(memory.array, rows, name, among)
    memory.over(written=False)
    return joined(found, tensor), torch.tensor(incoming, dtype=counted, device="cpu")


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to send each rank its rows; return the handle. Output: (received rows, number of rows from each rank).

    splits: rows for each rank, by rank; None: equal parts. The received numbers have the type of a tensor of splits,
    else int32. ValueError if there is not one split for each rank, or if they exceed the rows.
    """
    return started(_alltoall_steps(tensor, splits, name, process_set), [tensor])


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        found, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.rows = received, process_set, len(tensor)
        ctx.mark_non_differentiable(received)
        return found, received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        back, _ = synchronize(alltoall_async(gradients[0].contiguous(), ctx.received, None, ctx.process_set))
        if len(back) < ctx.rows:  # rows that were not sent
            back = torch.cat((back, back.new_zeros((ctx.rows - len(back), *back.shape[1:]))))
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows received from all ranks, joined by rank; with splits, also the number of rows from each.

    See alltoall_async. Gradients take the same way back.
    """
    found, received = apply(_Alltoall, tensor, splits, name, process_set)
    return found if splits is None else (found, received)


def _reducescatter_steps(
    tensor: torch.Tensor, name: str, op: int, among: Members, factors: Factors
) -> async_operations.Steps[torch.Tensor]:
    memory, code = Memory(tensor), dtype_code(tensor.dtype)
    part = yield from collectives.reducescatter_steps(memory.array, code, op, name, among, factors)
    memory.over(written=False)
    return joined([part], tensor)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce and scatter rows; return the handle. op: Average or Sum, else HorovodInternalError.

    Raises ValueError for a tensor without dimensions.
    """
    among = members_of(process_set)
    name = label("reducescatter", name, among)
    return started(_reducescatter_steps(tensor, name, op, among, (prescale_factor, postscale_factor)), [tensor])


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce several tensors, and scatter the rows of each; return the handle."""
    among = members_of(process_set)
    factors = (prescale_factor, postscale_factor)
    base = label("grouped_reducescatter", name, among)
    return started(grouped(lambda t, one: _reducescatter_steps(t, one, op, among, factors), tensors, base), tensors)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, process_set: ProcessSet, factors: Factors, *tensors: Any) -> Any:
        ctx.process_set = process_set
        size = members_of(process_set).size
        ctx.factor = factors[0] * factors[1] * (size if op == Sum else 1)  # as in Horovod: of the average
        return synchronize(grouped_reducescatter_async(tensors, name, op, process_set, *factors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scaled = [(gradient * ctx.factor).contiguous() for gradient in gradients]
        return None, None, None, None, *grouped_allgather(scaled, process_set=ctx.process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor; the first (rows mod size) ranks get one row more."""
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of each of several reduced tensors; gradients flow through it."""
    factors = (prescale_factor, postscale_factor)
    return _compressed(tensors, compression, _Reducescatter, name, op, process_set, factors)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up sparse tensors; return a function that waits for the sum. op: Average or Sum, else ValueError.

    Indices and values of all ranks are joined: the sum is not coalesced.
    """
    if op not in (Average, Sum):
        raise ValueError("sparse tensors take Average or Sum")
    indices = allgather_async(tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values().contiguous(), f"{name}.values", process_set)
    size = members_of(process_set).size

    def wait() -> torch.Tensor:
        found, at = synchronize(values), synchronize(indices)
        found = found / size if op == Average else found
        total: torch.Tensor = torch.sparse_coo_tensor(
            at.transpose(0, 1), found, tensor.size(), dtype=tensor.dtype, check_invariants=False
        )
        return total

    return wait


def join(device: int = -1) -> int:
    """Wait until every rank has joined, contributing zeros to their reductions; return the last rank to join.

    device: of the zeros; always host memory.
    """
    return int(synchronize(started(collectives.join_steps(label("join", None)))))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called it."""
    among = members_of(process_set)
    synchronize(started(collectives.barrier_steps(label("barrier", None, among), among)))


# Names of horovod.torch.mpi_ops.

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
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
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
