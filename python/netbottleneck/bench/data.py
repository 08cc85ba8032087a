"""What a benchmark's buffers hold, and whether a result is right.

Inputs repeat after a prime number of elements, so that data moved to a wrong place by any round number of bytes shows,
and a buffer of any length is checked against one period of expected values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PERIOD = 1_000_003
SEED = 1
REDUCTIONS = ("sum", "min", "max", "product")
_FOLD: dict[str, Callable[..., Any]] = {
    "sum": np.add.reduce,
    "product": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
}


@dataclass(frozen=True)
class Kind:
    """An element type: how NumPy stores it, in what its sums are bounded, and its machine epsilon (0: exact)."""

    name: str
    store: np.dtype[Any]
    epsilon: float = 0.0
    tiny: float = 0.0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.store.itemsize

    def decode(self, stored: NDArray[Any]) -> NDArray[Any]:
        """Return values that can be compared; integers, float32 and float64 as they are."""
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32) if self.name == "float16" else stored

    def encode(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return float values as they are stored, rounded to nearest even."""
        if self.name == "bfloat16":
            bits = values.astype(np.float32).view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return values.astype(self.store)


DTYPES: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("float32", np.dtype(np.float32), 2.0**-23, 2.0**-149),
        Kind("float64", np.dtype(np.float64), 2.0**-52, 2.0**-1074),
        Kind("float16", np.dtype(np.float16), 2.0**-10, 2.0**-24),
        Kind("bfloat16", np.dtype(np.uint16), 2.0**-7, 2.0**-133),
        Kind("int8", np.dtype(np.int8)),
        Kind("int32", np.dtype(np.int32)),
        Kind("int64", np.dtype(np.int64)),
        Kind("uint8", np.dtype(np.uint8)),
    )
}


class Data:
    """Inputs of `rank` and the outputs that all ranks must have, for buffers of up to `count` elements.

    Integers are exact, wrapping as two's complement does. A float may differ from the exact result by ranks × epsilon
    × the sum of the magnitudes (for a product: of the magnitude): twice what any order of additions can do.
    """

    def __init__(self, dtype: str, op: str, rank: int, ranks: int, count: int) -> None:
        self.kind = DTYPES[dtype]
        count = min(count, PERIOD)
        inputs = [self._values(op, count, np.random.default_rng([SEED, other])) for other in range(ranks)]
        self._input = inputs[rank]
        exact = op in ("min", "max") or self.kind.epsilon == 0
        if exact:
            folded = _FOLD[op](np.stack([self.kind.decode(x) for x in inputs]), axis=0, **_as_stored(self.kind))
            self._low = self._high = folded
        else:
            self._low, self._high = self._bounds(op, inputs)

    def _values(self, op: str, count: int, random: np.random.Generator) -> NDArray[Any]:
        if self.kind.epsilon == 0:
            info = np.iinfo(self.kind.store)
            return random.integers(info.min, info.max, count, dtype=self.kind.store, endpoint=True)
        low, high = (0.5, 1.5) if op == "product" else (-1.0, 1.0)
        return self.kind.encode(random.uniform(low, high, count))

    def _bounds(self, op: str, inputs: list[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
        wide = np.longdouble if self.kind.name == "float64" else np.float64
        values = np.stack([self.kind.decode(x).astype(wide) for x in inputs])
        exact = _FOLD[op](values, axis=0)
        size = np.add.reduce(np.abs(values), axis=0) if op == "sum" else np.abs(exact)
        margin = len(inputs) * (self.kind.epsilon * size + self.kind.tiny)
        compared = np.float64 if self.kind.name == "float64" else np.float32
        return (exact - margin).astype(compared), (exact + margin).astype(compared)

    def fill(self, buffer: NDArray[Any]) -> None:
        """Write this rank's input over the whole buffer (as stored)."""
        for start in range(0, len(buffer), PERIOD):
            part = buffer[start : start + PERIOD]
            part[:] = self._input[: len(part)]

    def wrong(self, buffer: NDArray[Any]) -> int:
        """Return how many elements of a result are wrong."""
        found = 0
        for start in range(0, len(buffer), PERIOD):
            part = self.kind.decode(buffer[start : start + PERIOD])
            right = (part >= self._low[: len(part)]) & (part <= self._high[: len(part)])
            found += len(part) - int(np.count_nonzero(right))
        return found


def _as_stored(kind: Kind) -> dict[str, Any]:
    """Integers are folded in their own type: NumPy would widen them."""
    return {"dtype": kind.store} if kind.epsilon == 0 else {}
