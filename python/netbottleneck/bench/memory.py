"""Memory as a path: our lanes on memory that is not the core's, and the limits that memory itself sets.

The limits work on private memory, on all ranks at once, as the ranks of one host do when they all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.bench.paths import Native, Path
from netbottleneck.launch import connect

if TYPE_CHECKING:
    from netbottleneck import _core


class Heap(Native):
    """Lanes of our own, on memory that a user brought."""

    def __init__(self, made: _core.Comm, name: str, streams: int, memory: _core.Arena, what: tuple[str, str]) -> None:
        super().__init__(made, name, streams, memory, what, mapped=False)
        whole: Any = memory
        self._checked: NDArray[np.uint8] = np.frombuffer(whole, np.uint8)
        self._own = np.zeros(memory.nbytes, np.uint8)

    def prepare(self, count: int) -> None:
        super().prepare(count)
        self._own[: self._bytes] = self._checked[: self._bytes]

    def region(self) -> tuple[int, Any]:
        return int(self._own.ctypes.data), self._own

    def finish(self) -> None:
        self._checked[: self._bytes] = self._own[: self._bytes]


class Limit(Path):
    """What memory allows: `go` moves `count` float32 of private memory in some way. Reduces nothing."""

    reduces = False
    arrays = 2
    provider = ""

    def __init__(self, name: str, memory: _core.Arena) -> None:
        self.name = name
        self.streams = 1
        self._core = connect.core()
        self._most = memory.nbytes // 4
        self._all = [np.ones(self._most, np.float32) for _ in range(self.arrays)]
        self._used = self._all

    def prepare(self, count: int) -> None:
        self._used = [array[:count] for array in self._all]

    def go(self, times: int) -> None:
        for _ in range(times):
            self.work(*self._used)

    def work(self, *arrays: NDArray[np.float32]) -> None:
        """Once through the memory."""
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        return {"provider": self.provider, "streams_used": 1, "wire_bits_per_s": None}

    def close(self) -> None:
        self._all, self._used = [], []


class Copy(Limit):
    """As memcpy has it: one array read, one written."""

    provider = "NumPy's copy"

    def work(self, *arrays: NDArray[np.float32]) -> None:
        np.copyto(arrays[0], arrays[1])


class Add(Limit):
    """A vector added to another by the core's kernel: two read, one written."""

    provider = "the core's kernel"

    def work(self, *arrays: NDArray[np.float32]) -> None:
        self._core.reduce(arrays[0], arrays[1], self._core.FLOAT32, self._core.SUM)


class Pair(Limit):
    """The least work of an all-reduce of two ranks in shared memory: of half the elements the sum, written to both."""

    provider = "the core's kernel for two"

    def prepare(self, count: int) -> None:
        self._used = [array[: (count + 1) // 2] for array in self._all]

    def work(self, *arrays: NDArray[np.float32]) -> None:
        self._core.reduce_pair(arrays[0], arrays[1], self._core.FLOAT32, self._core.SUM)


LIMITS: Mapping[str, type[Limit]] = {"memcpy": Copy, "add": Add, "pair": Pair}
