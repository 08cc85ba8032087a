"""Collectives of the backend on tensors, and point-to-point messages."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from netbottleneck.runtime import job
from netbottleneck.runtime.async_operations import averaging, divide_toward_zero
from netbottleneck.torch.backend.operations import (
    SEGMENTS_MAX,
    Move,
    Operation,
    Ranks,
    Rounds,
    Touched,
    bytes_code,
    check_root,
    engine_reduces,
    equal_sizes,
    exchanged,
    gathered,
    nonempty,
    one_for_each,
    parts_of,
)
from netbottleneck.torch.gradients import dtype_code
from netbottleneck.torch.handles import memory_of

if TYPE_CHECKING:
    from netbottleneck.torch.backend.operations import Link


# Collectives that move tensors unchanged, and point-to-point messages.

PAIRS_MAX = 60_000  # most two-rank groups in a job


def broadcast(ranks: Ranks, tensors: Sequence[torch.Tensor], root: int) -> Rounds:
    """Broadcast the root's tensors, in place."""
    check_root("broadcast", root, ranks.size)
    touched = Touched()
    taken = touched.read if ranks.rank == root else touched.written
    place = list(ranks.order).index(root)
    moves = []
    for tensor in tensors:
        found = taken(tensor)
        moves.append(ranks.move("BROADCAST", [memory_of(found)], bytes_code(), root=place, keep=found))
    yield nonempty(moves)
    touched.settle()


def all_gather(ranks: Ranks, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> Rounds:
    """Write each rank's input to its output. outputs: for each input a list with one tensor for each rank."""
    touched = Touched()
    moves = []
    for given, mine in zip(outputs, inputs, strict=True):
        equal_sizes("all_gather", given, ranks.size, mine)
        parts = [touched.written(part) for part in given]
        _own(parts[ranks.rank], mine)
        moves.append(gathered(ranks, parts, parts))
    yield nonempty(moves)
    touched.settle()


def all_gather_whole(ranks: Ranks, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Rounds:
    """As all_gather, with one tensor for the outputs of all ranks."""
    touched = Touched()
    moves = []
    for given, mine in zip(outputs, inputs, strict=True):
        parts_of("all_gather", given, mine, ranks.size)
        whole = touched.written(given)
        parts = whole.view(-1).split(mine.numel()) if mine.numel() else [whole] * ranks.size
        _own(parts[ranks.rank], mine)
        moves.append(gathered(ranks, parts, whole))
    yield nonempty(moves)
    touched.settle()


def _own(place: torch.Tensor, mine: torch.Tensor) -> None:
    """Copy this rank's part to its place, unless it is already there."""
    if place.data_ptr() != mine.data_ptr() or not mine.is_contiguous() or mine.is_neg() or mine.is_conj():
        place.copy_(mine.detach().reshape(place.shape))


class Pairs:
    """Point-to-point moves in a process group. Each is a broadcast in a group of two ranks."""

    def __init__(self, link: "Link", ranks: Ranks) -> None:
        self._link = link
        self._ranks = ranks

    def move(self, tensor: torch.Tensor, source: int, target: int, about: str) -> Move:
        """Return the move of a tensor from one rank to another; this rank is one of them."""
        ranks, link = self._ranks, self._link
        members = sorted((ranks.jobs[source], ranks.jobs[target]))
        return Move(
            "BROADCAST",
            [memory_of(tensor)],
            bytes_code(),
            root=members.index(ranks.jobs[source]),
            keep=tensor,
            group=link.pair(*members),
            members=members,
            way=f"{about}{source}>{target}",
        )

    def message(self, tensor: torch.Tensor, source: int, target: int, tag: int) -> Rounds:
        """Send or receive."""
        touched = Touched()
        found = touched.read(tensor) if source == self._ranks.rank else touched.written(tensor)
        yield nonempty([self.move(found, source, target, f"{tag}:")])
        touched.settle()

    def gather(self, outputs: Sequence[torch.Tensor], mine: torch.Tensor, root: int) -> Rounds:
        """Write each rank's tensor to the root's outputs."""
        check_root("gather", root, self._ranks.size)
        touched, rank = Touched(), self._ranks.rank
        if rank != root:
            yield nonempty([self.move(touched.read(mine), rank, root, "g")])
            return
        equal_sizes("gather", outputs, self._ranks.size, mine)
        parts = [touched.written(part) for part in outputs]
        _own(parts[root], mine)
        yield nonempty([self.move(part, at, root, "g") for at, part in enumerate(parts) if at != root])
        touched.settle()

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Rounds:
        """Write to each rank's output its tensor of the root's inputs."""
        check_root("scatter", root, self._ranks.size)
        touched, rank = Touched(), self._ranks.rank
        into = touched.written(output)
        if rank != root:
            yield nonempty([self.move(into, root, rank, "s")])
        else:
            equal_sizes("scatter", inputs, self._ranks.size, output)
            parts = [touched.read(part) for part in inputs]
            _own(into, parts[root])
            yield nonempty([self.move(part, root, at, "s") for at, part in enumerate(parts) if at != root])
        touched.settle()

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Rounds:
        """Send one tensor, of any size, to each rank, and write the tensors received to the outputs."""
        touched, ranks = Touched(), self._ranks
        if self._link.size * (self._link.size - 1) // 2 > PAIRS_MAX:
            raise NotImplementedError(f"all_to_all of parts of different sizes among {self._link.size} ranks")
        one_for_each("all_to_all: inputs", inputs, ranks.size)
        one_for_each("all_to_all: outputs", outputs, ranks.size)
        out = [touched.read(part) for part in inputs]
        into = [touched.written(part) for part in outputs]
        if out[ranks.rank].numel() != into[ranks.rank].numel():
            raise ValueError(
                f"all_to_all: rank {ranks.rank} sends itself {out[ranks.rank].numel()} elements, but receives "
                f"{into[ranks.rank].numel()}"
            )
        _own(into[ranks.rank], out[ranks.rank])
        others = [at for at in range(ranks.size) if at != ranks.rank]
        moves = [self.move(out[at], ranks.rank, at, "a") for at in others]
        moves += [self.move(into[at], at, ranks.rank, "a") for at in others]
        yield nonempty(moves)
        touched.settle()


def all_to_all_even(ranks: Ranks, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Rounds:
    """As all_to_all, with parts of equal size. ValueError if those to send and to receive differ in size."""
    equal_sizes("all_to_all_single", inputs, ranks.size, *outputs)
    touched = Touched()
    out = [touched.read(part) for part in inputs]
    into = [touched.written(part) for part in outputs]
    yield nonempty([exchanged(ranks, out, into, (out, into))])
    touched.settle()


def rows(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[torch.Tensor]:
    """Return a part for each rank; equal parts if splits is empty. ValueError for impossible splits."""
    length = tensor.size(0) if tensor.dim() else 0
    if not splits:
        if length % size:
            raise ValueError(f"all_to_all_single: {length} rows cannot be split into {size} equal parts: pass splits")
        return list(tensor.split(length // size)) if length else [tensor] * size
    if len(splits) != size or sum(splits) != length:
        raise ValueError(
            f"all_to_all_single: splits {list(splits)} of {length} rows: pass one for each of {size} ranks"
        )
    return list(tensor.split(list(splits)))


# Reductions: by the engine if it supports them, else by gathering the values and reducing them here.

# torch's name to the engine's. AVG is a sum followed by a factor.
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
    """Return the name of a ReduceOp; NotImplementedError for one that only NCCL supports."""
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
    code = dtype_code(dtype)
    factor = averaging(code, size).factor if op == "AVG" else 1.0
    return {"code": code, "op": int(getattr(job.core(), ENGINE[op])), "factor": factor}


def _divided(op: str, dtype: torch.dtype, size: int) -> bool:
    """Return True if the engine's sum is still to be divided."""
    return op == "AVG" and averaging(dtype_code(dtype), size).divided


@functools.cache
def _is_reducible(op: str, dtype: torch.dtype) -> bool:
    if op == "AVG" and dtype == torch.bool:
        return False
    try:
        one = torch.ones(1, device="cpu").to(dtype)
        LOCAL[op](one, one)
    except RuntimeError:
        return False
    return True


def _check_reducible(what: str, op: str, dtype: torch.dtype) -> None:
    """Raise ValueError for a type that neither the engine nor torch reduces in this way."""
    if not _by_engine(op, dtype) and not _is_reducible(op, dtype):
        raise ValueError(f"{what}: ReduceOp.{op} of {dtype} is not supported: convert the tensor first")


def reduced_here(op: str, parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Reduce parts in their order, and write the result."""
    total = parts[0]
    for part in parts[1:]:
        total = LOCAL[op](total, part)
    if op == "AVG":
        whole = None if total.is_floating_point() or total.is_complex() else "trunc"
        total = torch.div(total, len(parts), rounding_mode=whole)
    into.copy_(total)


def all_reduce(ranks: Ranks, tensors: Sequence[torch.Tensor], op: str) -> Rounds:
    """Reduce each tensor in place, on all ranks. Tensors of one type are sent together."""
    touched = Touched()
    moves: list[Move] = []
    averages: list[torch.Tensor] = []
    later: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        _check_reducible("all_reduce", op, tensor.dtype)
        by_type.setdefault(tensor.dtype, []).append(touched.written(tensor))
    for dtype, members in by_type.items():
        if _by_engine(op, dtype):
            averages += members if _divided(op, dtype, ranks.size) else []
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
    for tensor in averages:
        divide_toward_zero(tensor, ranks.size)
    for tensor, parts in later:
        reduced_here(op, parts, tensor)
    touched.settle()


def reduce_to(ranks: Ranks, tensor: torch.Tensor, op: str, root: int) -> Rounds:
    """Reduce in place, with the result on the root only. It costs as much as an all-reduce."""
    check_root("reduce", root, ranks.size)
    mine = tensor if ranks.rank == root else tensor.detach().clone(memory_format=torch.contiguous_format)
    return all_reduce(ranks, [mine], op)


def reduce_scatter(ranks: Ranks, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], op: str) -> Rounds:
    """Write to each output this rank's part of the reduction of an input. An input has one tensor for each rank."""
    touched = Touched()
    moves = []
    averages: list[torch.Tensor] = []
    later = []
    for output, parts in zip(outputs, inputs, strict=True):
        equal_sizes("reduce_scatter", parts, ranks.size, output)
        _check_reducible("reduce_scatter", op, output.dtype)
        into = touched.written(output)
        if _by_engine(op, into.dtype):
            copies = [touched.read(part).clone() for part in parts]
            into.copy_(copies[ranks.rank].view_as(into))
            line = [into if at == ranks.rank else part for at, part in enumerate(copies)]
            numbers = _numbers(op, into.dtype, ranks.size)
            averages += [into] if _divided(op, into.dtype, ranks.size) else []
            moves.append(ranks.move("REDUCESCATTER", ranks.line(line), keep=line, **numbers))
            continue
        out = [touched.read(part) for part in parts]
        came = list(into.new_empty((ranks.size, *into.shape)))
        moves.append(exchanged(ranks, out, came, (out, came)))
        later.append((into, came))
    yield nonempty(moves)
    for tensor in averages:
        divide_toward_zero(tensor, ranks.size)
    for into, came in later:
        reduced_here(op, came, into)
    touched.settle()


def all_reduce_sparse(ranks: Ranks, tensor: torch.Tensor, op: str, outputs: list[Any]) -> Rounds:
    """Add up sparse tensors: gather their indices and values, padded to the greatest length."""
    if op not in ("SUM", "AVG"):
        raise ValueError(f"all_reduce of a sparse tensor takes ReduceOp.SUM or AVG, not {op}")
    mine = tensor.detach().coalesce()
    counts = torch.zeros(ranks.size, dtype=torch.int64, device="cpu")
    counts[ranks.rank] = mine._nnz()
    yield [gathered(ranks, list(counts.split(1)), counts)]
    longest = int(counts.max())
    indices = torch.zeros((ranks.size, mine.sparse_dim(), longest), dtype=torch.int64)
    values = mine.values().new_zeros((ranks.size, longest, *mine.values().shape[1:]))
    indices[ranks.rank, :, : mine._nnz()] = mine.indices()
    values[ranks.rank, : mine._nnz()] = mine.values()
    yield nonempty([gathered(ranks, list(indices), indices), gathered(ranks, list(values), values)])
    total = mine.new_zeros(mine.shape) if longest == 0 else None
    for at, count in enumerate(counts.tolist()):
        part = torch.sparse_coo_tensor(indices[at, :, :count], values[at, :count], mine.shape, check_invariants=True)
        total = part if total is None else total + part
    assert total is not None, "a group has at least one rank"
    total = total.coalesce() / ranks.size if op == "AVG" else total.coalesce()
    with torch.no_grad():
        tensor.copy_(total)
    outputs[:] = [total]


def barrier(ranks: Ranks) -> Rounds:
    """Move nothing; complete once all ranks have begun it."""
    yield [ranks.move("BARRIER", [], bytes_code())]


# Operation names: the same on all ranks that make the same calls, and reused so that the engine knows them by number.

SLOTS = 16  # pending operations with equal signatures; further ones wait for these
KEPT_MAX = 4096  # series, and labels, above which those that can be made again are dropped


class _Series:
    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last: dict[int, Operation] = {}

    def is_as_new(self) -> bool:
        """Forget operations that are over. True if a new series would go on in the same way: on every rank alike."""
        self.last = {at: operation for at, operation in self.last.items() if not operation.is_past()}
        return self.count % SLOTS == 0 and not self.last


class Names:
    """The names of a process group's operations.

    Operations with equal signatures take names in turn, in the order in which they begin, which is the same on all
    their ranks. Other operations may begin in a different order on each rank, for example from callbacks of futures.
    So each signature has a series of its own, which all ranks continue alike.
    """

    def __init__(self, number: int) -> None:
        self._group = f"torch group {number}"
        self._labels: dict[Hashable, str] = {}
        self._series: dict[Hashable, _Series] = {}
        self._series_max = KEPT_MAX

    def take(self, moves: Sequence[Move], operation: Operation) -> tuple[list[str], list[Operation]]:
        """Return a name for each move of an operation, and the pending operations that still hold the names.

        Moves with equal signatures share a place in their series, so an operation never waits for itself.
        """
        taken: dict[Hashable, list[str]] = {}
        names: list[str] = []
        busy: list[Operation] = []
        for move in moves:
            key = (move.way, move.signature())
            equal = taken.setdefault(key, [])
            if equal:
                equal.append(f"{equal[0]}.{len(equal)}")
            else:
                name, before = self._place(key, move, operation)
                equal.append(name)
                busy += [] if before is None else [before]
            names.append(equal[-1])
        return names, busy

    def _place(self, key: Hashable, move: Move, operation: Operation) -> tuple[str, Operation | None]:
        """Return the next name of a series, and the pending operation that still holds it, or None."""
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= self._series_max:
                self._series = {known: one for known, one in self._series.items() if not one.is_as_new()}
                self._series_max = max(KEPT_MAX, 2 * len(self._series))
            series = self._series[key] = _Series()
        at = series.count % SLOTS
        series.count += 1
        before, series.last[at] = series.last.get(at), operation
        return f"{self._label(key, move)}.{at}", None if before is None or before.is_past() else before

    def _label(self, key: Hashable, move: Move) -> str:
        """Return a text that differs between signatures; the factor of a group's moves is 1 or its average's."""
        found = self._labels.get(key)
        if found is None:
            numbers = f"#{move.code}.{move.op}.{move.root}{'' if move.factor == 1.0 else '.avg'}"
            parts = (self._group, move.way, move.kind.lower(), f"{move.nbytes} B", numbers)
            if len(self._labels) >= KEPT_MAX:
                self._labels.clear()
            found = self._labels[key] = " ".join(filter(None, parts))
        return found
