"""Operations in progress and the ranks they involve: the part that NumPy's and torch's front ends share.

An operation is a generator: it submits, yields the works it waits for, resumes when they are done, and returns its
result. So a collective of two rounds is polled like any other.
"""

import hashlib
import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from netbottleneck.errors import FAILURES, HorovodInternalError
from netbottleneck.runtime import job

# Process sets: the ranks of the job that take part in an operation.

GLOBAL = 0
# A name of at most 95 bytes travels. This many are left to a caller's name, as steps of an operation append theirs.
NAME_BYTES = 80


@dataclass(frozen=True, slots=True)
class Members:
    """The members of an operation's process set, as one of them sees it.

    number: of the engine's group; 0: all ranks. ranks: their ranks in the job, ascending. rank: this process's rank in
    the set.
    """

    number: int
    ranks: Sequence[int]
    rank: int

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def place(self, rank: int, what: str = "root_rank") -> int:
        """Return the rank in the set of a rank of the job. ValueError, which names `what`, if it is no member."""
        if rank not in self.ranks:
            among = f"a job of {self.size}" if self.number == GLOBAL else f"the process set of ranks {list(self.ranks)}"
            raise ValueError(f"{what}={rank} is not a rank of {among}")
        return self.ranks.index(rank)


class ProcessSet:
    """A subset of a job's ranks. Usable once all ranks have passed it to init() or add_process_set()."""

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        """Ranks in any order. ValueError unless they are a list of distinct ranks."""
        if hasattr(ranks_or_comm, "Get_size"):
            raise ValueError("a process set of an MPI communicator is not supported: pass the list of its ranks")
        ranks = [int(rank) for rank in ranks_or_comm]
        if not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks):
            raise ValueError(f"ProcessSet({ranks}): a list of distinct ranks, 0 or above, is required")
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(ranks)

    def _job(self) -> "job.Job | None":
        """The job in which it is registered; None if it is not registered."""
        if self.process_set_id is None or not job.is_started():
            return None
        return job.current()

    def size(self) -> int | None:
        """Return the number of its ranks; None if it is not registered."""
        return None if self._job() is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in it; None if it is not registered. ValueError if this rank is not a member."""
        registered = self._job()
        if registered is None or self.ranks is None:
            return None
        if registered.place.rank not in self.ranks:
            raise ValueError(f"rank {registered.place.rank} is not part of {self}")
        return self.ranks.index(registered.place.rank)

    def included(self) -> bool | None:
        """Return whether this process is a member; None if the set is not registered."""
        registered = self._job()
        return None if registered is None or self.ranks is None else registered.place.rank in self.ranks

    def __str__(self) -> str:
        """Show its number and ranks."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__


class _AllRanks(ProcessSet):
    """All ranks of the running job."""

    process_set_id: int | None = GLOBAL

    def __init__(self) -> None:
        pass

    @property
    def ranks(self) -> list[int] | None:
        """All ranks; None before init()."""
        return list(range(job.current().place.size)) if job.is_started() else None

    @ranks.setter
    def ranks(self, ranks: Any) -> None:
        raise AttributeError("the global process set has all ranks")


global_process_set: ProcessSet = _AllRanks()


def members_of(process_set: ProcessSet) -> Members:
    """Return the members of a process set.

    Raises ValueError before init(), if the set is not registered, and if this process is not a member.
    """
    this = job.current()
    if process_set is global_process_set:
        return Members(GLOBAL, range(this.place.size), this.place.rank)
    if process_set.process_set_id is None or process_set.ranks is None:
        raise ValueError(f"{process_set} is not registered: pass it to init() or add_process_set() on every rank")
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
NAMES = {str(kind): code for kind, code in CODES.items()}

T = TypeVar("T")
Array = npt.NDArray[Any]
Steps = Generator[list[Any], None, T]


class Pending(Generic[T]):
    """A pending operation. Threads may poll it while another one waits for it."""

    def __init__(self, steps: Steps[T]) -> None:
        self._job = job.current()
        self._steps = steps
        self._works: list[Any] = []
        self._kept: list[Any] = []  # done, and their names are taken
        self._result: T | None = None
        self._failure: Exception | None = None
        self._done = False
        self._lock = threading.Lock()  # of the steps: held while they run
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

    def poll(self, *, meanwhile: bool = False) -> bool:
        """Return True if `wait` would return, or raise, at once. False while another thread resumes the operation.

        meanwhile: nobody has asked for this operation, so the names of its last works stay taken.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while not self._done:
                works = self._works
                if not all(work.test() for work in works):
                    return False
                names = self._job.waited(works)
                self._advance_later()
                if meanwhile and self._done:
                    self._job.take(names)
                    self._kept = works
            if not meanwhile:
                self._release()
        except (*FAILURES, HorovodInternalError):
            return True  # of a work, which raises it again
        finally:
            self._lock.release()
        return True

    def _advance_later(self) -> None:
        """Resume the operation, and keep its failure for `wait`."""
        try:
            self.advance()
        except Exception as failure:
            self._failure, self._works, self._done = failure.with_traceback(None), [], True

    def _release(self) -> None:
        """Release the names that `poll` has kept."""
        kept, self._kept = self._kept, []
        if kept:
            self._job.waited(kept)

    def wait(self) -> T:
        """Return the result. Raises HorovodInternalError when the operation failed."""
        while not self._done:
            works = self._works
            self._job.wait(works)
            with self._lock:
                if self._works is works:
                    self.advance()
        self._release()
        if self._failure is not None:
            raise self._failure
        return cast(T, self._result)


def code_of(array: Array) -> int:
    """Return the engine's number for an array's type; ValueError for a type that cannot be reduced."""
    name = CODES.get(array.dtype)
    if name is None:
        raise ValueError(f"Array type {array.dtype} is not supported; supported: {', '.join(map(str, CODES))}.")
    return int(getattr(job.core(), name))


# An array below may also be a torch tensor on a device: the engine takes both, and slices are written alike.


def type_name(array: Any) -> str:
    """Return the name of an array's type, the same for NumPy and torch."""
    return str(array.dtype).removeprefix("torch.")


def zeros(shape: tuple[int, ...], like: Any) -> Any:
    """Return an array of zeros of the type of `like`, on its device."""
    return np.zeros(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_zeros(shape)


def as_bytes(array: Any) -> tuple[Any, int]:
    """Return an array and the number of its type; its bytes if the engine has no such type."""
    if array.dtype in CODES:
        return array, code_of(array)
    if not isinstance(array, np.ndarray):
        return array, int(getattr(job.core(), NAMES.get(type_name(array), "UINT8")))
    if array.dtype.hasobject:
        raise ValueError(f"Array type {array.dtype} is not supported.")
    return array.reshape(-1).view(np.uint8), int(job.core().UINT8)


def average_factor(size: int) -> float:
    """Return the factor by which the engine makes an average of `size` ranks from a sum."""
    return 1.0 / size


class Averaging(NamedTuple):
    """How the engine's sum becomes an average: by a factor, or by a division toward zero once it is back."""

    factor: float
    divided: bool


def averaging(code: int, size: int) -> Averaging:
    """Return how to average over `size` ranks values of the type with this number of the engine."""
    core = job.core()
    if code in (core.UINT8, core.INT8, core.INT32, core.INT64):
        return Averaging(1.0, True)
    return Averaging(average_factor(size), False)


def divide_toward_zero(array: Any, size: int) -> None:
    """Divide an array of integers in place, and truncate: exact, in contrast to a factor."""
    if size == 1:
        return
    wide = array.astype(np.int64) if isinstance(array, np.ndarray) else array.long()
    down = wide // size
    array[...] = down + ((down < 0) & (down * size != wide))


def reduction(op: int) -> int:
    """Return the engine's reduction for Horovod's `op`; ValueError for another value."""
    core = job.core()
    known: dict[int, int] = {Average: core.SUM, Sum: core.SUM, Min: core.MIN, Max: core.MAX, Product: core.PRODUCT}
    if op not in known:
        raise ValueError(f"op={op!r}: must be Average, Sum, Min, Max or Product, where this operation supports it")
    return known[op]


def fitted(name: str) -> str:
    """Return an operation's name with room for what is appended on the wire; a long one ends with its digest."""
    whole = name.encode()
    if len(whole) <= NAME_BYTES:
        return name
    digest = hashlib.blake2b(whole, digest_size=8).hexdigest()
    return f"{whole[: NAME_BYTES - len(digest) - 1].decode(errors='ignore')}~{digest}"


def label(kind: str, name: str | None, among: Members | None = None) -> str:
    """Return an operation's name on the wire: KIND.NAME, or KIND.noname and a count if it has no name.

    Each process set has its own count, because ranks outside it do not see its operations. After a join all counts
    restart, because ranks that had joined did not see the others' operations.
    """
    if name:
        return fitted(f"{kind}.{name}")
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
