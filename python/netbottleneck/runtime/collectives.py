"""Collective operations as steps, on arrays, among the ranks of one process set; registration of process sets.

An array is NumPy's or, except for Adasum, a torch tensor on a device. Arrays have one type on all ranks, and one shape
unless a docstring says otherwise.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from netbottleneck.errors import HorovodInternalError
from netbottleneck.runtime import job
from netbottleneck.runtime.async_operations import (
    GLOBAL,
    Array,
    Average,
    Members,
    Pending,
    ProcessSet,
    Steps,
    Sum,
    as_bytes,
    averaging,
    divide_toward_zero,
    global_process_set,
    label,
    members_of,
    reduction,
    type_name,
    zeros,
)

SEGMENTS_MAX = 512  # segments of one engine operation
# Up to this size, padded parts cost less than an operation for each part.
PADDED_BYTES = 1 << 20


def submitted(among: Members, name: str, kind: int, memory: Any, code: int, **options: Any) -> Any:
    """Submit an operation of a set's ranks."""
    return job.current().submit(name, kind, memory, code, group=among.number, **options)


def _shape(*arrays: Array) -> int:
    return shape_key(tuple(array.shape for array in arrays))


@lru_cache(maxsize=1024)
def shape_key(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return a hash of the shapes that is the same for every version of Python and NumPy."""
    text = ";".join(",".join(str(int(length)) for length in shape) for shape in shapes)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def allreduce_steps(
    arrays: Sequence[tuple[Array, int]], op: int, name: str, among: Members, factors: tuple[float, float] = (1.0, 1.0)
) -> Steps[None]:
    """Reduce (array, type) pairs in place, each type in one operation with a segment for each array.

    factors: before and after the reduction.
    """
    reduce = reduction(op)
    averages: list[Array] = []
    groups: dict[int, list[Array]] = {}
    for array, code in arrays:
        groups.setdefault(code, []).append(array)
    works = []
    for code, members in groups.items():
        before, after, divided = _factors(op, code, among.size, factors)
        averages += members if divided else []
        for start in range(0, len(members), SEGMENTS_MAX):
            part = members[start : start + SEGMENTS_MAX]
            works.append(
                submitted(
                    among,
                    name if len(arrays) == 1 else f"{name}.{code}.{start}",
                    job.core().ALLREDUCE,
                    part[0] if len(arrays) == 1 else part,
                    code,
                    op=reduce,
                    prescale=before,
                    postscale=after,
                    shape=_shape(*part),
                    keep=part,
                )
            )
    yield works
    for array in averages:
        divide_toward_zero(array, among.size)


def _factors(op: int, code: int, size: int, given: tuple[float, float]) -> tuple[float, float, bool]:
    """Return the factors before and after the reduction, and True if the result is still to be divided by the size."""
    factor, divided = averaging(code, size) if op == Average else (1.0, False)
    return given[0], given[1] * factor, divided


def broadcast_steps(array: Array, code: int, root_rank: int, name: str, among: Members) -> Steps[None]:
    """Broadcast the root's array in place. root_rank: in the job. Raises ValueError if it is not in the set."""
    root = among.place(root_rank)
    yield [submitted(among, name, job.core().BROADCAST, array, code, root=root, shape=_shape(array), keep=array)]


def _tail(array: Array) -> int:
    """Return a hash of an array's type and of all dimensions but the first."""
    about = hashlib.sha256(f"{type_name(array)} {tuple(array.shape[1:])}".encode()).digest()[:8]
    return int.from_bytes(about, "little", signed=True)


def _rows_steps(mine: Sequence[int], array: Array, name: str, among: Members) -> Steps[Array]:
    """Return each rank's row counts, by rank; HorovodInternalError if types or other dimensions differ."""
    core = job.core()
    rows = np.zeros((among.size, len(mine) + 1), np.int64)
    rows[among.rank] = [*mine, _tail(array)]
    yield [submitted(among, f"{name}.sizes", core.ALLGATHER, rows, core.INT64, keep=rows)]
    different = [among.ranks[at] for at in range(among.size) if rows[at, -1] != rows[0, -1]]
    if different:
        raise HorovodInternalError(
            f"{name}: type and all dimensions but the first must be the same on all ranks; here they are "
            f"{type_name(array)} {list(array.shape[1:])}, and ranks {different} differ from rank {among.ranks[0]}"
        )
    return rows[:, :-1]


def allgather_steps(array: Array, name: str, among: Members) -> Steps[list[Array]]:
    """Return the arrays of all ranks, by rank. Only their first dimension may differ.

    Parts are padded to the largest, unless that would more than double their size: then each one is broadcast.
    """
    if array.ndim == 0:
        array = array.reshape(1)
    counts = yield from _rows_steps([len(array)], array, name, among)
    rows = counts[:, 0].tolist()
    padded = max(rows) * among.size
    if padded > 2 * sum(rows) and padded * zeros((1, *array.shape[1:]), array).nbytes > PADDED_BYTES:
        return (yield from _each_broadcast(array, rows, name, among))
    line = zeros((among.size, max(rows), *array.shape[1:]), array)
    line[among.rank, : len(array)] = array
    flat, code = as_bytes(line)
    if line.nbytes:
        yield [submitted(among, name, job.core().ALLGATHER, flat, code, keep=line)]
    return [line[at, : rows[at]] for at in range(among.size)]


def _each_broadcast(array: Array, rows: Sequence[int], name: str, among: Members) -> Steps[list[Array]]:
    """Return the arrays of all ranks, by rank, which have so many rows."""
    parts = [zeros((count, *array.shape[1:]), array) for count in rows]
    parts[among.rank][:] = array
    sent = []
    for at, part in enumerate(parts):
        flat, code = as_bytes(part)
        if part.nbytes:
            sent.append(submitted(among, f"{name}.{at}", job.core().BROADCAST, flat, code, root=at, keep=part))
    yield sent
    return parts


def _shares(rows: int, size: int) -> list[int]:
    """Return the offsets of each rank's rows, and their end; the first (rows mod size) ranks have one row more."""
    least, more = divmod(rows, size)
    return [at * least + min(at, more) for at in range(size + 1)]


def reducescatter_steps(
    array: Array, code: int, op: int, name: str, among: Members, factors: tuple[float, float] = (1.0, 1.0)
) -> Steps[Array]:
    """Return this rank's rows of the reduced array; the first (rows mod size) ranks get one row more.

    They are part of a larger array. factors: before and after the reduction. Raises ValueError for a scalar,
    HorovodInternalError for another op than Average and Sum.
    """
    size, rank = among.size, among.rank
    if array.ndim == 0:
        raise ValueError("reducescatter needs an array of at least one dimension")
    if op not in (Average, Sum):
        raise HorovodInternalError(f"{name}: reducescatter supports only Average or Sum, not op={op}")
    reduce = reduction(op)
    before, after, divided = _factors(op, code, size, factors)
    starts = _shares(len(array), size)
    line = zeros((size, starts[1] - starts[0], *array.shape[1:]), array)
    for other in range(size):
        part = array[starts[other] : starts[other + 1]]
        line[other, : len(part)] = part
    yield [
        submitted(
            among,
            name,
            job.core().REDUCESCATTER,
            line,
            code,
            op=reduce,
            prescale=before,
            postscale=after,
            shape=_shape(array),
            keep=line,
        )
    ]
    mine: Array = line[rank, : starts[rank + 1] - starts[rank]]
    if divided:
        divide_toward_zero(mine, size)
    return mine


def _splits(array: Array, splits: Sequence[int] | None, name: str, size: int) -> list[int]:
    rows = len(array) if array.ndim else 0
    if splits is None:
        if array.ndim == 0 or rows % size:
            raise ValueError(
                f"{name}: a first dimension of {rows} cannot be split into {size} equal parts: pass splits"
            )
        return [rows // size] * size
    counts = [int(split) for split in splits]
    if len(counts) != size or any(count < 0 for count in counts) or sum(counts) > rows:
        raise ValueError(
            f"{name}: splits={counts}: one for each of {size} ranks, with a sum of at most {rows}, is required"
        )
    return counts


def alltoall_steps(
    array: Array, splits: Sequence[int] | None, name: str, among: Members
) -> Steps[tuple[list[Array], list[int]]]:
    """Return one part of each rank's array, by rank, and how many rows each has.

    splits: number of rows for each rank; None: equal parts. Parts are padded to the largest. Raises ValueError if
    splits do not fit the rows.
    """
    size = among.size
    outgoing = _splits(array, splits, name, size)
    counts = yield from _rows_steps(outgoing, array, name, among)
    line = zeros((2, size, int(counts.max()), *array.shape[1:]), array)
    start = 0
    for other, rows in enumerate(outgoing):
        line[0, other, :rows] = array[start : start + rows]
        start += rows
    flat, code = as_bytes(line)
    if line.nbytes:
        yield [submitted(among, name, job.core().ALLTOALL, flat, code, keep=line)]
    incoming = counts[:, among.rank].tolist()
    return [line[1, other, :rows] for other, rows in enumerate(incoming)], incoming


def barrier_steps(name: str, among: Members) -> Steps[None]:
    """Wait for all ranks."""
    core = job.core()
    yield [submitted(among, name, core.BARRIER, [], core.UINT8)]


def join_steps(name: str) -> Steps[int]:
    """Contribute zeros to other ranks' reductions until all have joined; return the last rank to join."""
    core, this = job.core(), job.current()
    comms = this.observer.joining(this)
    last = np.full(1, -1, np.int32)
    works = [this.submit(name, core.JOIN, last, core.INT32, keep=last)]
    for comm in comms:
        other = np.full(1, -1, np.int32)
        works.append(comm.submit(name, core.JOIN, other, core.INT32, keep=other))
    yield works
    this.joins += 1
    return this.observer.joined(this, int(last[0]))


# Adasum: a sum that counts the common part of two ranks' vectors once.
#
# For two vectors it is (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum if they are orthogonal, their average if
# they are equal. Neighbouring ranks form pairs, then pairs of pairs, and so on. A rank without a partner enters the
# next level unchanged. Maleki et al.: Scaling Distributed Training with Adaptive Summation, 2020.

Doubles = npt.NDArray[np.float64]


def _combined(vectors: Doubles, dots: Doubles) -> Doubles:
    """Return the Adasum of each pair of adjacent vectors; an odd last vector is kept.

    dots: a.b, |a|^2 and |b|^2 of each pair.
    """
    both, first, second = dots
    pairs = 2 * len(both)
    with np.errstate(divide="ignore", invalid="ignore"):
        of_first = np.where(first > 0, 1 - both / (2 * first), 1.0)
        of_second = np.where(second > 0, 1 - both / (2 * second), 1.0)
    joined = of_first[:, None] * vectors[0:pairs:2] + of_second[:, None] * vectors[1:pairs:2]
    result: Doubles = np.concatenate([joined, vectors[pairs:]])
    return result


def adasum_steps(array: Array, name: str, among: Members, factors: tuple[float, float] = (1.0, 1.0)) -> Steps[None]:
    """Replace each rank's array by the Adasum of all. factors: applied before and after it.

    Each rank works on its part of all vectors, in float64. One all-reduce for each level adds up the dot products.
    Raises ValueError for types that are not floating point.
    """
    core = job.core()
    size = among.size
    if array.dtype.kind != "f":
        raise ValueError(f"{name}: Adasum needs floating-point numbers, not {array.dtype}")
    before, after = factors
    flat = array.reshape(-1)
    code = int(getattr(core, array.dtype.name.upper()))
    line = np.zeros((2, size, -(-flat.size // size)), array.dtype)
    line[0].reshape(-1)[: flat.size] = flat
    if line.size:
        yield [submitted(among, f"{name}.parts", core.ALLTOALL, line, code, shape=_shape(array), keep=line)]
    vectors: Doubles = line[1].astype(np.float64) * before
    level = 0
    while len(vectors) > 1:
        pairs = len(vectors) // 2 * 2
        one, other = vectors[0:pairs:2], vectors[1:pairs:2]
        dots = np.stack([np.einsum("ij,ij->i", *pair) for pair in ((one, other), (one, one), (other, other))])
        summed = reduction(Sum)
        yield [submitted(among, f"{name}.{level}", core.ALLREDUCE, dots, core.FLOAT64, op=summed, keep=dots)]
        vectors = _combined(vectors, dots)
        level += 1
    line[0, among.rank] = vectors[0] * after
    if line.size:
        yield [submitted(among, f"{name}.whole", core.ALLGATHER, line[0], code, keep=line)]
    flat[:] = line[0].reshape(-1)[: flat.size]


# Process sets: each gets the same number on all ranks, or none on any.

DYNAMIC = "dynamic"


def _agree(sets: Sequence[ProcessSet], what: str) -> None:
    """Raise ValueError on every rank if ranks name different sets, or request different changes."""
    among = members_of(global_process_set)
    request = f"{what} {[process_set.ranks for process_set in sets]}".encode()
    name = label("process_sets", None)
    pending = Pending(allgather_steps(np.frombuffer(request, np.uint8), name, among))
    requests = [part.tobytes().decode() for part in pending.wait()]
    different = [rank for rank in range(among.size) if requests[rank] != requests[0]]
    if different:
        raise ValueError(
            f"all ranks must name the same process sets: rank 0 requests {requests[0]}, "
            f"rank {different[0]} {requests[different[0]]}"
        )


def _check(sets: Sequence[ProcessSet], size: int) -> None:
    known = {tuple(one.ranks or ()) for one in job.current().process_sets.values()} | {tuple(range(size))}
    for process_set in sets:
        ranks = tuple(process_set.ranks or ())
        if not ranks or ranks[-1] >= size:
            raise ValueError(f"{process_set}: ranks from 0 to {size - 1} are required")
        if ranks in known:
            raise ValueError(f"a process set of ranks {list(ranks)} already exists")
        known.add(ranks)


def register(sets: Sequence[ProcessSet]) -> None:
    """Assign numbers to sets. Every rank calls it with the same sets, in the same order.

    Raises ValueError, and registers none, if ranks name different sets, if two sets have the same ranks, or if a set
    has ranks outside the job.
    """
    this = job.current()
    _agree(sets, "add")
    _check(sets, this.place.size)
    for process_set in sets:
        number = this.number("process_set") + 1
        ranks = process_set.ranks or []
        if this.place.size > 1 and this.place.rank in ranks:
            this.comm.group(number, ranks)
        process_set.process_set_id = number
        this.process_sets[number] = process_set


def _check_dynamic() -> None:
    if not job.current().settings.dynamic_process_sets:
        raise ValueError(
            "process sets can be added and removed after init() only with HOROVOD_DYNAMIC_PROCESS_SETS=1 or "
            'init(process_sets="dynamic")'
        )


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set after init(), and return it. Every rank calls it, members or not.

    Raises ValueError as register(), and if dynamic process sets are not enabled.
    """
    _check_dynamic()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    register([added])
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set. Returns True if it was registered and is not the global set. Every rank calls it.

    Raises ValueError, and removes none, if ranks name different sets or dynamic process sets are not enabled.
    """
    _check_dynamic()
    number = process_set.process_set_id
    if number is None or number == GLOBAL:
        return False
    _agree([process_set], "remove")
    process_set.process_set_id = None
    return job.current().process_sets.pop(number, None) is not None
