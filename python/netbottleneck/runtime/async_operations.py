"""Operations in progress and the ranks they involve: the part that NumPy's and torch's front ends share.

An operation is a generator: it submits, yields the works it waits for, resumes when they are done, and returns its
result. So a collective of two rounds is polled like any other.
"""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from netbottleneck.errors import HorovodInternalError
from netbottleneck.runtime import job

# Process sets: the ranks of the job that take part in an operation.

GLOBAL = 0


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that an operation is of, on one of them.

    number: of the engine's group, 0: all ranks. ranks: of the job, rising. rank: this process's place among them.
    """

    number: int
    ranks: Sequence[int]
    rank: int

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def place(self, rank: int, what: str = "root_rank") -> int:
        """Return the place of a rank of the job among them; ValueError naming `what` where it has none."""
        if rank not in self.ranks:
            among = f"a job of {self.size}" if self.number == GLOBAL else f"the process set of ranks {list(self.ranks)}"
            raise ValueError(f"{what}={rank} is no rank of {among}")
        return self.ranks.index(rank)


class ProcessSet:
    """Some of a job's ranks. It can be used once all ranks have given it to init() or add_process_set()."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Name the ranks, in any order; ValueError for what is no list of different ranks."""
        if hasattr(ranks_or_comm, "Get_size"):
            raise ValueError("a process set of an MPI communicator is not supported: give the list of its ranks")
        given = [int(rank) for rank in ranks_or_comm]
        if not given or min(given) < 0 or len(set(given)) < len(given):
            raise ValueError(f"ProcessSet({given}): a list of different ranks, 0 or above, is required")
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(given)

    def _known(self) -> "job.Job | None":
        if self.process_set_id is None or not job.is_started():
            return None
        return job.current()

    def size(self) -> int | None:
        """Return the number of its ranks; None where it is not registered."""
        return None if self._known() is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's place in it; None where it is not registered, ValueError where it is none of it."""
        known = self._known()
        if known is None or self.ranks is None:
            return None
        if known.place.rank not in self.ranks:
            raise ValueError(f"rank {known.place.rank} is not part of {self}")
        return self.ranks.index(known.place.rank)

    def included(self) -> bool | None:
        """Return whether this process is part of it; None where it is not registered."""
        known = self._known()
        return None if known is None or self.ranks is None else known.place.rank in self.ranks

    def __str__(self) -> str:
        """Name number and ranks."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _AllRanks(ProcessSet):
    """All ranks of the job that runs."""

    process_set_id: int | None = GLOBAL

    def __init__(self) -> None:
        pass

    @property
    def ranks(self) -> list[int] | None:
        """All of them; None before init()."""
        return list(range(job.current().place.size)) if job.is_started() else None

    @ranks.setter
    def ranks(self, ranks: Any) -> None:
        raise AttributeError("the global process set has all ranks")


global_process_set: ProcessSet = _AllRanks()


def members_of(process_set: ProcessSet) -> Members:
    """Return its ranks as operations need them.

    Raises ValueError before init(), where the set is not registered, and where this process is none of it.
    """
    this = job.current()
    if process_set is global_process_set:
        return Members(GLOBAL, range(this.place.size), this.place.rank)
    if process_set.process_set_id is None or process_set.ranks is None:
        raise ValueError(f"{process_set} is not registered: give it to init() or add_process_set() on every rank")
    if this.place.rank not in process_set.ranks:
        raise ValueError(f"rank {this.place.rank} is not part of {process_set}")
    return Members(process_set.process_set_id, process_set.ranks, process_set.ranks.index(this.place.rank))


# Operations in progress.

# Horovod's values.
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

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
    """A pending operation."""

    def __init__(self, steps: Steps[T]) -> None:
        self._job = job.current()
        self._steps = steps
        self._works: list[Any] = []
        self._result: T | None = None
        self._done = False
        self.advance()

    @property
    def works(self) -> list[Any]:
        """The works it waits for; empty when it is done."""
        return self._works

    def advance(self) -> None:
        """Resume the operation. The works it waits for must be done."""
        if self._done:
            return
        try:
            self._works = next(self._steps)
        except StopIteration as end:
            self._result, self._done, self._works = end.value, True, []

    def poll(self) -> bool:
        """Return True if `wait` would return, or raise, at once."""
        try:
            while not self._done:
                if not all(work.test() for work in self._works):
                    return False
                self._job.waited(self._works)
                self.advance()
        except (OSError, HorovodInternalError):
            return True
        return True

    def wait(self) -> T:
        """Return the result. Raises HorovodInternalError when the operation failed."""
        while not self._done:
            self._job.wait(self._works)
            self.advance()
        return cast(T, self._result)


def code_of(array: Array) -> int:
    """Return the engine's number for an array's type; ValueError for a type that cannot be reduced."""
    name = CODES.get(array.dtype)
    if name is None:
        raise ValueError(f"Array type {array.dtype} is not supported: one of {', '.join(map(str, CODES))} is.")
    return int(getattr(job.core(), name))


def as_bytes(array: Array) -> tuple[Array, int]:
    """Return an array and the number of its type; its bytes if the engine has no such type."""
    if array.dtype in CODES:
        return array, code_of(array)
    if array.dtype.hasobject:
        raise ValueError(f"Array type {array.dtype} is not supported.")
    return array.reshape(-1).view(np.uint8), int(job.core().UINT8)


def average_factor(size: int) -> float:
    """Return the factor by which the engine makes an average of `size` ranks from a sum."""
    return 1.0 / size


def reduction(op: int, size: int) -> tuple[int, float]:
    """Return the engine's reduction for Horovod's `op`, and the factor to apply after it."""
    core = job.core()
    known = {Average: core.SUM, Sum: core.SUM, Min: core.MIN, Max: core.MAX, Product: core.PRODUCT}
    if op not in known:
        raise ValueError(f"op={op!r} is none of Average, Sum, Min, Max, Product, or is not possible here")
    return known[op], average_factor(size) if op == Average else 1.0


def label(kind: str, name: str | None, among: Members | None = None) -> str:
    """Return an operation's name on the wire: KIND.NAME, or KIND.noname and a count if it has no name.

    Each process set has its own count, because ranks outside it do not see its operations. After a join all counts
    restart, because ranks that had joined did not see the others' operations.
    """
    if name:
        return f"{kind}.{name}"
    this = job.current()
    unnamed = f"{kind}.noname.{this.joins}" if this.joins else f"{kind}.noname"
    counter = unnamed if among is None or among.number == GLOBAL else f"{unnamed}@{among.number}"
    return f"{unnamed}.{this.number(counter)}"


def together(operations: list[Steps[T]]) -> Steps[list[T]]:
    """Return the results of several operations that run concurrently."""
    under_way = [Pending(operation) for operation in operations]
    while waited := [work for pending in under_way for work in pending.works]:
        yield waited
        for pending in under_way:
            pending.advance()
    return [pending.wait() for pending in under_way]
