# ruff: noqa: PLR0913, PLR0917 - Horovod's signatures
"""Horovod's operations on torch tensors in host memory that leave each rank its own, and those without a tensor."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from netbottleneck.runtime import async_operations, collectives
from netbottleneck.runtime.async_operations import Average, Sum, label
from netbottleneck.runtime.members import Members, ProcessSet, global_process_set, members_of
from netbottleneck.torch.compression import Compression, Compressor
from netbottleneck.torch.exchanges import allgather_async, grouped, grouped_allgather, tensor_of
from netbottleneck.torch.gradients import dtype_code
from netbottleneck.torch.handles import Memory, apply, started, synchronize
from netbottleneck.torch.reductions import Factors


def _alltoall_steps(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet
) -> async_operations.Steps[tuple[torch.Tensor, torch.Tensor]]:
    among = members_of(process_set)
    whole = None if splits is None else torch.as_tensor(splits)
    if whole is not None and whole.is_floating_point():
        raise ValueError(f"splits must be whole numbers, not {whole.dtype}")
    rows = None if whole is None else whole.reshape(-1).tolist()
    name = label("alltoall", name, among)
    memory = Memory(tensor)
    found, incoming = yield from collectives.alltoall_steps(memory.array, rows, name, among)
    memory.over(written=False)
    return tensor_of(found, tensor), torch.tensor(incoming, dtype=torch.int32 if whole is None else whole.dtype)


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to give each rank its rows; return the handle, whose output is (what came, how many rows from each).

    splits: how many rows go to each rank, by rank; without them the rows are cut into equal parts. ValueError for
    splits that are not one a rank, or more than the rows.
    """
    return started(_alltoall_steps(tensor, splits, name, process_set))


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
        if len(back) < ctx.rows:  # rows that went nowhere
            back = torch.cat((back, back.new_zeros((ctx.rows - len(back), *back.shape[1:]))))
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return what the other ranks gave this one, joined by rank; with splits also how many rows came from each.

    See alltoall_async; gradients go back the same way.
    """
    found, received = apply(_Alltoall, tensor, splits, name, process_set)
    return found if splits is None else (found, received)


def _reducescatter_steps(
    tensor: torch.Tensor, name: str, op: int, among: Members, factors: Factors
) -> async_operations.Steps[torch.Tensor]:
    memory, code = Memory(tensor), dtype_code(tensor.dtype)
    part = yield from collectives.reducescatter_steps(memory.array, code, op, name, among, factors)
    memory.over(written=False)
    return tensor_of(part, tensor)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce, and leave each rank its rows; return the handle. op: Average or Sum, else HorovodInternalError.

    Raises ValueError for a tensor without dimensions.
    """
    among = members_of(process_set)
    name = label("reducescatter", name, among)
    return started(_reducescatter_steps(tensor, name, op, among, (prescale_factor, postscale_factor)))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce several tensors, and leave each rank its rows of each; return the handle."""
    among = members_of(process_set)
    factors = (prescale_factor, postscale_factor)
    base = label("grouped_reducescatter", name, among)
    return started(grouped(lambda t, one: _reducescatter_steps(t, one, op, among, factors), tensors, base))


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, op: int, process_set: ProcessSet, factors: Factors, *tensors: Any) -> Any:
        ctx.process_set = process_set
        size = members_of(process_set).size
        ctx.factor = factors[0] * factors[1] * (size if op == Sum else 1)  # as Horovod has it: of the average
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
    packed = [compression.compress(tensor) for tensor in tensors]
    factors = (prescale_factor, postscale_factor)
    found = apply(_Reducescatter, name, op, process_set, factors, *[tensor for tensor, _ in packed])
    return [compression.decompress(part, context) for part, (_, context) in zip(found, packed, strict=True)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to add up sparse tensors; return what waits for the sum, and gives it. op: Average or Sum, else ValueError.

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
        total: torch.Tensor = torch.sparse_coo_tensor(at.transpose(0, 1), found, tensor.size(), dtype=tensor.dtype)
        return total

    return wait


def join(device: int = -1) -> int:
    """Wait until every rank has joined, with zeros for what the others reduce meanwhile; return the last one.

    device: of the zeros; host memory in any case.
    """
    return int(synchronize(started(collectives.join_steps(label("join", None)))))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called it."""
    among = members_of(process_set)
    synchronize(started(collectives.barrier_steps(label("barrier", None, among), among)))
