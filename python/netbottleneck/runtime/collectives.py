"""The steps of each collective operation, on arrays, among the ranks of one process set.

Arrays are of one type on all ranks, and of one shape except where a text says otherwise.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from netbottleneck.errors import HorovodInternalError
from netbottleneck.runtime import job
from netbottleneck.runtime.async_operations import Array, Average, Steps, Sum, as_bytes, reduction
from netbottleneck.runtime.members import Members

SEGMENTS_MAX = 512  # of one operation of the engine


def submitted(among: Members, name: str, kind: int, memory: Any, code: int, **options: Any) -> Any:
    """Submit an operation of the ranks of a set."""
    return job.current().submit(name, kind, memory, code, group=among.number, **options)


def _shape(*arrays: Array) -> int:
    return shape_key(tuple(array.shape for array in arrays))


@lru_cache(maxsize=1024)
def shape_key(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return a number that is the same where the shapes are, whatever the ranks' versions of Python and NumPy."""
    text = ";".join(",".join(str(int(length)) for length in shape) for shape in shapes)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def allreduce_steps(
    arrays: Sequence[tuple[Array, int]], op: int, name: str, among: Members, factors: tuple[float, float] = (1.0, 1.0)
) -> Steps[None]:
    """Reduce (array, type) pairs in place, each type in one operation with a segment for each array.

    factors: before and after the reduction.
    """
    reduce, factor = reduction(op, among.size)
    before, after = factors
    groups: dict[int, list[Array]] = {}
    for array, code in arrays:
        groups.setdefault(code, []).append(array)
    works = []
    for code, members in groups.items():
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
                    postscale=after * factor,
                    shape=_shape(*part),
                    keep=part,
                )
            )
    yield works


def broadcast_steps(array: Array, code: int, root_rank: int, name: str, among: Members) -> Steps[None]:
    """Give every rank the root's array, in place. root_rank: of the job. ValueError where it is none of them."""
    root = among.place(root_rank)
    yield [submitted(among, name, job.core().BROADCAST, array, code, root=root, shape=_shape(array), keep=array)]


def _tail(array: Array) -> int:
    """Return what stands for an array's type and all its dimensions but the first."""
    about = hashlib.sha256(f"{array.dtype} {array.shape[1:]}".encode()).digest()[:8]
    return int.from_bytes(about, "little", signed=True)


def _rows_steps(mine: Sequence[int], array: Array, name: str, among: Members) -> Steps[Array]:
    """Return what each rank tells of its rows, by rank; HorovodInternalError where types or other dimensions differ."""
    core = job.core()
    told = np.zeros((among.size, len(mine) + 1), np.int64)
    told[among.rank] = [*mine, _tail(array)]
    yield [submitted(among, f"{name}.sizes", core.ALLGATHER, told, core.INT64, keep=told)]
    unlike = [among.ranks[at] for at in range(among.size) if told[at, -1] != told[0, -1]]
    if unlike:
        raise HorovodInternalError(
            f"{name}: type and all dimensions but the first must be the same on all ranks; here they are "
            f"{array.dtype} {list(array.shape[1:])}, and ranks {unlike} differ from rank {among.ranks[0]}"
        )
    return told[:, :-1]


def allgather_steps(array: Array, name: str, among: Members) -> Steps[list[Array]]:
    """Return the arrays of all ranks, by rank. Their first dimension may differ, all else must not."""
    if array.ndim == 0:
        array = array.reshape(1)
    told = yield from _rows_steps([len(array)], array, name, among)
    rows = told[:, 0].tolist()
    line = np.zeros((among.size, max(rows), *array.shape[1:]), array.dtype)
    line[among.rank, : len(array)] = array
    flat, code = as_bytes(line)
    if line.size:
        yield [submitted(among, name, job.core().ALLGATHER, flat, code, keep=line)]
    return [line[at, : rows[at]] for at in range(among.size)]


def _shares(rows: int, size: int) -> list[int]:
    """Return where each rank's rows begin, and their end; the first (rows mod size) ranks have one more."""
    least, more = divmod(rows, size)
    return [at * least + min(at, more) for at in range(size + 1)]


def reducescatter_steps(
    array: Array, code: int, op: int, name: str, among: Members, factors: tuple[float, float] = (1.0, 1.0)
) -> Steps[Array]:
    """Return this rank's rows of the reduced array; the first (rows mod size) ranks get one row more.

    factors: before and after the reduction. Raises ValueError for a number, HorovodInternalError for another op than
    Average and Sum.
    """
    size, rank = among.size, among.rank
    if array.ndim == 0:
        raise ValueError("reducescatter needs an array of at least one dimension")
    if op not in (Average, Sum):
        raise HorovodInternalError(f"{name}: reducescatter takes Average or Sum, not op={op}")
    reduce, factor = reduction(op, size)
    before, after = factors
    starts = _shares(len(array), size)
    line = np.zeros((size, starts[1] - starts[0], *array.shape[1:]), array.dtype)
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
            postscale=after * factor,
            shape=_shape(array),
            keep=line,
        )
    ]
    return line[rank, : starts[rank + 1] - starts[rank]].copy()


def _splits(array: Array, splits: Sequence[int] | None, name: str, size: int) -> list[int]:
    rows = len(array) if array.ndim else 0
    if splits is None:
        if array.ndim == 0 or rows % size:
            raise ValueError(f"{name}: a first dimension of {rows} is no {size} equal parts: give splits")
        return [rows // size] * size
    found = [int(split) for split in splits]
    if len(found) != size or any(split < 0 for split in found) or sum(found) > rows:
        raise ValueError(f"{name}: splits={found}: one for each of {size} ranks, {rows} in all at most, is required")
    return found


def alltoall_steps(
    array: Array, splits: Sequence[int] | None, name: str, among: Members
) -> Steps[tuple[Array, list[int]]]:
    """Return one part of each rank's array, joined by rank, and how many rows each has.

    splits: how many rows go to each rank; None: equal parts. Parts travel at the size of the largest. Raises ValueError
    for splits that the rows do not hold.
    """
    size = among.size
    outgoing = _splits(array, splits, name, size)
    told = yield from _rows_steps(outgoing, array, name, among)
    room = int(told.max())
    line = np.zeros((2, size, room, *array.shape[1:]), array.dtype)
    start = 0
    for other, rows in enumerate(outgoing):
        line[0, other, :rows] = array[start : start + rows]
        start += rows
    flat, code = as_bytes(line)
    if line.size:
        yield [submitted(among, name, job.core().ALLTOALL, flat, code, keep=line)]
    incoming = told[:, among.rank].tolist()
    return np.concatenate([line[1, other, :rows] for other, rows in enumerate(incoming)]), incoming


def barrier_steps(name: str, among: Members) -> Steps[None]:
    """Wait until all ranks are here."""
    core = job.core()
    yield [submitted(among, name, core.BARRIER, [], core.UINT8)]


def join_steps(name: str) -> Steps[int]:
    """Stand in with zeros for what other ranks reduce, until all have joined; return the one that came last."""
    core = job.core()
    last = np.full(1, -1, np.int32)
    yield [job.current().submit(name, core.JOIN, last, core.INT32, keep=last)]
    job.current().joins += 1
    return int(last[0])
