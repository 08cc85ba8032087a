"""The steps of each collective operation, on arrays: what NumPy's and torch's front ends share.

An operation is a generator: it submits, yields the works it waits for, goes on when they are done, and returns its
result. So a collective of two rounds can be polled like any other.
"""

import hashlib
from collections.abc import Generator, Sequence
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from netbottleneck import job
from netbottleneck.errors import HorovodInternalError

# Horovod's numbers.
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

SEGMENTS_MAX = 512  # of one operation of the engine

CODES = {
    np.dtype(np.uint8): "UINT8",
    np.dtype(np.int8): "INT8",
    np.dtype(np.int32): "INT32",
    np.dtype(np.int64): "INT64",
    np.dtype(np.float16): "FLOAT16",
    np.dtype(np.float32): "FLOAT32",
    np.dtype(np.float64): "FLOAT64",
}

T = TypeVar("T")
Array = npt.NDArray[Any]
Steps = Generator[list[Any], None, T]


class Pending(Generic[T]):
    """An operation under way."""

    def __init__(self, steps: Steps[T]) -> None:
        self._job = job.current()
        self._steps = steps
        self._works: list[Any] = []
        self._result: T | None = None
        self._done = False
        self._advance()

    def _advance(self) -> None:
        try:
            self._works = next(self._steps)
        except StopIteration as end:
            self._result, self._done = end.value, True

    def poll(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        try:
            while not self._done:
                if not all(work.test() for work in self._works):
                    return False
                self._advance()
        except (OSError, HorovodInternalError):
            return True
        return True

    def wait(self) -> T:
        """Return the result. Raises HorovodInternalError when the operation failed."""
        while not self._done:
            self._job.wait(self._works)
            self._advance()
        return cast(T, self._result)


def code_of(array: Array) -> int:
    """Return the engine's number for an array's type; ValueError for one that cannot be reduced."""
    name = CODES.get(array.dtype)
    if name is None:
        raise ValueError(f"Array type {array.dtype} is not supported: one of {', '.join(map(str, CODES))} is.")
    return int(getattr(job.core(), name))


def as_bytes(array: Array) -> tuple[Array, int]:
    """Return an array and the number of its type; where the engine has none for it, its bytes."""
    if array.dtype in CODES:
        return array, code_of(array)
    if array.dtype.hasobject:
        raise ValueError(f"Array type {array.dtype} is not supported.")
    return array.reshape(-1).view(np.uint8), int(job.core().UINT8)


def reduction(op: int, size: int) -> tuple[int, float]:
    """Return the engine's reduction for Horovod's `op`, and the factor that follows it."""
    core = job.core()
    known = {Average: core.SUM, Sum: core.SUM, Min: core.MIN, Max: core.MAX, Product: core.PRODUCT}
    if op == Adasum:
        raise NotImplementedError("op=Adasum is not there: use Average or Sum")
    if op not in known:
        raise ValueError(f"op={op!r} is none of Average, Sum, Min, Max, Product")
    return known[op], 1.0 / size if op == Average else 1.0


def allreduce_steps(
    arrays: Sequence[tuple[Array, int]], op: int, name: str, prescale: float = 1.0, postscale: float = 1.0
) -> Steps[None]:
    """Reduce (array, type) pairs in place, each type in one operation with a segment for each array."""
    this = job.current()
    reduce, factor = reduction(op, this.place.size)
    groups: dict[int, list[Array]] = {}
    for array, code in arrays:
        groups.setdefault(code, []).append(array)
    works = []
    for code, members in groups.items():
        for start in range(0, len(members), SEGMENTS_MAX):
            part = members[start : start + SEGMENTS_MAX]
            single = len(arrays) == 1
            works.append(
                this.submit(
                    name if single else f"{name}.{code}.{start}",
                    job.core().ALLREDUCE,
                    part[0] if single else part,
                    code,
                    op=reduce,
                    prescale=prescale,
                    postscale=postscale * factor,
                    keep=part,
                )
            )
    yield works


def broadcast_steps(array: Array, code: int, root_rank: int, name: str) -> Steps[None]:
    """Give every rank the root's array, in place."""
    this = job.current()
    if not 0 <= root_rank < this.place.size:
        raise ValueError(f"root_rank={root_rank} is no rank of a job of {this.place.size}")
    yield [this.submit(name, job.core().BROADCAST, array, code, root=root_rank, keep=array)]


def allgather_steps(array: Array, name: str) -> Steps[list[Array]]:
    """Return the arrays of all ranks, by rank. Their first dimension may differ, all else must not."""
    this = job.current()
    size, rank = this.place.size, this.place.rank
    if array.ndim == 0:
        array = array.reshape(1)
    tail = array.shape[1:]
    about = hashlib.sha256(f"{array.dtype} {tail}".encode()).digest()[:8]
    shapes = np.zeros((size, 2), np.int64)
    shapes[rank] = len(array), int.from_bytes(about, "little", signed=True)
    core = job.core()
    yield [this.submit(f"{name}.sizes", core.ALLGATHER, shapes, core.INT64, keep=shapes)]
    if len(set(shapes[:, 1].tolist())) > 1:
        unlike = [r for r in range(size) if shapes[r, 1] != shapes[0, 1]]
        raise HorovodInternalError(
            f"{name}: type and all dimensions but the first must be the same on all ranks; here they are "
            f"{array.dtype} {list(tail)}, and ranks {unlike} differ from rank 0"
        )
    rows = shapes[:, 0].tolist()
    most = max(rows)
    line = np.zeros((size, most, *tail), array.dtype)
    line[rank, : len(array)] = array
    flat, code = as_bytes(line)
    if line.size:
        yield [this.submit(name, core.ALLGATHER, flat, code, keep=line)]
    return [line[other, : rows[other]] for other in range(size)]


def reducescatter_steps(
    array: Array, code: int, op: int, name: str, prescale: float = 1.0, postscale: float = 1.0
) -> Steps[Array]:
    """Return this rank's rows of the reduced array; the first (rows mod size) ranks get one row more."""
    this = job.current()
    size, rank = this.place.size, this.place.rank
    if array.ndim == 0:
        raise ValueError("reducescatter needs an array of at least one dimension")
    if op not in (Average, Sum):
        raise ValueError("reducescatter takes Average or Sum")
    reduce, factor = reduction(op, size)
    least, more = divmod(len(array), size)
    starts = [other * least + min(other, more) for other in range(size + 1)]
    line = np.zeros((size, least + (more > 0), *array.shape[1:]), array.dtype)
    for other in range(size):
        part = array[starts[other] : starts[other + 1]]
        line[other, : len(part)] = part
    yield [
        this.submit(
            name,
            job.core().REDUCESCATTER,
            line,
            code,
            op=reduce,
            prescale=prescale,
            postscale=postscale * factor,
            keep=line,
        )
    ]
    return line[rank, : starts[rank + 1] - starts[rank]].copy()


def alltoall_steps(array: Array, code: int, name: str) -> Steps[Array]:
    """Return one part of each rank's array, by rank. The first dimension is cut into as many equal parts as ranks."""
    this = job.current()
    size = this.place.size
    if array.ndim == 0 or len(array) % size:
        raise ValueError(f"{name}: a first dimension of {len(array) if array.ndim else 0} is no {size} equal parts")
    line = np.concatenate((array, np.zeros_like(array)))
    if line.size:
        yield [this.submit(name, job.core().ALLTOALL, line, code, keep=line)]
    return line[len(array) :]


def barrier_steps(name: str) -> Steps[None]:
    """Wait until all ranks are here."""
    core = job.core()
    yield [job.current().submit(name, core.BARRIER, [], core.UINT8)]


def label(kind: str, name: str | None) -> str:
    """Return an operation's name on the wire: KIND.NAME, numbered by the unnamed ones of its kind where it has none."""
    return f"{kind}.{name}" if name else f"{kind}.noname.{job.current().number(kind)}"
