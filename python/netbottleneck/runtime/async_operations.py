"""Operations under way: what NumPy's and torch's front ends share.

An operation is a generator: it submits, yields the works it waits for, goes on when they are done, and returns its
result. So a collective of two rounds can be polled like any other.
"""

from collections.abc import Generator
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from netbottleneck.errors import HorovodInternalError
from netbottleneck.runtime import job
from netbottleneck.runtime.members import GLOBAL, Members

# Horovod's numbers.
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
    """An operation under way."""

    def __init__(self, steps: Steps[T]) -> None:
        self._job = job.current()
        self._steps = steps
        self._works: list[Any] = []
        self._result: T | None = None
        self._done = False
        self.advance()

    @property
    def works(self) -> list[Any]:
        """What it waits for now; nothing where it is over."""
        return self._works

    def advance(self) -> None:
        """Go on, where what it waited for is done."""
        if self._done:
            return
        try:
            self._works = next(self._steps)
        except StopIteration as end:
            self._result, self._done, self._works = end.value, True, []

    def poll(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
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
    if op not in known:
        raise ValueError(f"op={op!r} is none of Average, Sum, Min, Max, Product, or is not possible here")
    return known[op], 1.0 / size if op == Average else 1.0


def label(kind: str, name: str | None, among: Members | None = None) -> str:
    """Return an operation's name on the wire: KIND.NAME, numbered by the unnamed ones of its kind where it has none.

    Each process set counts for itself: ranks that are none of it do not see its operations. After a join all count
    anew: ranks that had joined have not seen what the others did meanwhile.
    """
    if name:
        return f"{kind}.{name}"
    this = job.current()
    unnamed = f"{kind}.noname.{this.joins}" if this.joins else f"{kind}.noname"
    counter = unnamed if among is None or among.number == GLOBAL else f"{unnamed}@{among.number}"
    return f"{unnamed}.{this.number(counter)}"


def together(operations: list[Steps[T]]) -> Steps[list[T]]:
    """Return the results of several operations that go on side by side."""
    under_way = [Pending(operation) for operation in operations]
    while waited := [work for pending in under_way for work in pending.works]:
        yield waited
        for pending in under_way:
            pending.advance()
    return [pending.wait() for pending in under_way]
