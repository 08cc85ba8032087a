"""Reductions: by the engine where it has them, else by gathering what there is to reduce."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from netbottleneck.runtime import job
from netbottleneck.torch.backend.moves import (
    SEGMENTS_MAX,
    Move,
    Ranks,
    Rounds,
    Touched,
    bytes_code,
    engine_reduces,
    exchanged,
    gathered,
    memory_of,
    nonempty,
)
from netbottleneck.torch.gradients import dtype_code

# torch's name to the engine's. AVG: a factor follows.
ENGINE = {"SUM": "SUM", "AVG": "SUM", "MIN": "MIN", "MAX": "MAX", "PRODUCT": "PRODUCT"}
LOCAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def op_name(what: str, op: Any) -> str:
    """Return the name of a ReduceOp; NotImplementedError for one that is NCCL's alone."""
    name = str(getattr(op, "op", op).name)
    if name not in LOCAL:
        raise NotImplementedError(
            f"{what}: ReduceOp.{name} is NCCL's alone: scale the tensor yourself, and use ReduceOp.SUM or AVG"
        )
    return name


@functools.cache
def _by_engine(op: str, dtype: torch.dtype) -> bool:
    return op in ENGINE and engine_reduces(dtype)


@functools.cache
def _numbers(op: str, dtype: torch.dtype, size: int) -> Mapping[str, Any]:
    return {
        "code": dtype_code(dtype),
        "op": int(getattr(job.core(), ENGINE[op])),
        "factor": 1.0 / size if op == "AVG" else 1.0,
    }


def reduced_here(op: str, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Reduce parts, in their order, and write the result."""
    total = parts[0]
    for part in parts[1:]:
        total = LOCAL[op](total, part)
    if op == "AVG":
        whole = None if total.is_floating_point() or total.is_complex() else "trunc"
        total = torch.div(total, len(parts), rounding_mode=whole)
    into.copy_(total)


def all_reduce(ranks: Ranks, tensors: Sequence[torch.Tensor], op: str) -> Rounds:
    """Reduce each tensor in place, on all ranks. Those of one type travel together."""
    touched = Touched()
    moves: list[Move] = []
    later: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(touched.written(tensor))
    for dtype, members in by_type.items():
        if _by_engine(op, dtype):
            for start in range(0, len(members), SEGMENTS_MAX):
                some = members[start : start + SEGMENTS_MAX]
                memory = [memory_of(tensor) for tensor in some]
                moves.append(ranks.move("ALLREDUCE", memory, keep=some, **_numbers(op, dtype, ranks.size)))
            continue
        for tensor in members:
            parts = list(tensor.new_empty((ranks.size, *tensor.shape)))
            parts[ranks.rank].copy_(tensor)
            moves.append(gathered(ranks, parts, parts))
            later.append((tensor, parts))
    yield nonempty(moves)
    for tensor, parts in later:
        reduced_here(op, parts, tensor)
    touched.settle()


def reduce_to(ranks: Ranks, tensor: torch.Tensor, op: str, root: int) -> Rounds:
    """Reduce in place on the root alone. It costs what an all-reduce costs."""
    mine = tensor if ranks.rank == root else tensor.detach().clone(memory_format=torch.contiguous_format)
    return all_reduce(ranks, [mine], op)


def reduce_scatter(ranks: Ranks, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], op: str) -> Rounds:
    """Write to each output this rank's part of the reduction of an input, which is one tensor for each rank."""
    touched = Touched()
    moves = []
    later = []
    for output, parts in zip(outputs, inputs, strict=True):
        into = touched.written(output)
        if _by_engine(op, into.dtype):
            copies = [touched.read(part).clone() for part in parts]
            into.copy_(copies[ranks.rank].view_as(into))
            line = [into if at == ranks.rank else part for at, part in enumerate(copies)]
            numbers = _numbers(op, into.dtype, ranks.size)
            moves.append(ranks.move("REDUCESCATTER", ranks.line(line), keep=line, **numbers))
            continue
        out = [touched.read(part) for part in parts]
        came = list(into.new_empty((ranks.size, *into.shape)))
        moves.append(exchanged(ranks, out, came, (out, came)))
        later.append((into, came))
    yield nonempty(moves)
    for into, came in later:
        reduced_here(op, came, into)
    touched.settle()


def all_reduce_sparse(ranks: Ranks, tensor: torch.Tensor, op: str, outputs: list[Any]) -> Rounds:
    """Add up sparse tensors: their indices and values are gathered, at the length of the longest."""
    if op not in ("SUM", "AVG"):
        raise ValueError(f"all_reduce of a sparse tensor takes ReduceOp.SUM or AVG, not {op}")
    mine = tensor.detach().coalesce()
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = mine._nnz()
    yield [gathered(ranks, list(counts.split(1)), counts)]
    room = int(counts.max())
    indices = torch.zeros((ranks.size, mine.sparse_dim(), room), dtype=torch.int64)
    values = mine.values().new_zeros((ranks.size, room, *mine.values().shape[1:]))
    indices[ranks.rank, :, : mine._nnz()] = mine.indices()
    values[ranks.rank, : mine._nnz()] = mine.values()
    yield nonempty([gathered(ranks, list(indices), indices), gathered(ranks, list(values), values)])
    total = mine.new_zeros(mine.shape) if room == 0 else None
    for at, count in enumerate(counts.tolist()):
        part = torch.sparse_coo_tensor(indices[at, :, :count], values[at, :count], mine.shape, check_invariants=True)
        total = part if total is None else total + part
    assert total is not None, "there is one rank at least"
    total = total.coalesce() / ranks.size if op == "AVG" else total.coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    outputs[:] = [total]


def barrier(ranks: Ranks) -> Rounds:
    """Move nothing: it is over once all ranks have begun it."""
    yield [ranks.move("BARRIER", [], bytes_code())]
