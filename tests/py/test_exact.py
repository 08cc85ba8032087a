"""Every type, reduction and number of ranks from 1 to 9, at odd sizes: equal to NumPy byte for byte.

Ranks are threads of this process. Numbers are such that no order of additions rounds: what differs is wrong.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import RANKS_LIMIT_S, on_ranks
from numpy.typing import NDArray

from netbottleneck import _core

LIMIT_S = RANKS_LIMIT_S
SECRET = b"sixteen bytes..."
COUNTS = (0, 1, 1021, 20_003)
# What holds an element in NumPy, which knows no bfloat16.
STORED = {
    _core.UINT8: np.uint8,
    _core.INT8: np.int8,
    _core.INT32: np.int32,
    _core.INT64: np.int64,
    _core.FLOAT16: np.float16,
    _core.BFLOAT16: np.uint16,
    _core.FLOAT32: np.float32,
    _core.FLOAT64: np.float64,
}
FOLDS: dict[int, Callable[[Any, Any], Any]] = {
    _core.SUM: np.add,
    _core.MIN: np.minimum,
    _core.MAX: np.maximum,
    _core.PRODUCT: np.multiply,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "tcp": {"transport": "tcp", "shm": "0", "streams": 3},
    "ofi": {"transport": "ofi", "shm": "0", "streams": 2},
    "shared": {"transport": "tcp", "shm": "1", "streams": 1},
    "staged": {"transport": "tcp", "shm": "1", "streams": 1},
}


def inputs(rank: int, count: int, dtype: int, op: int) -> NDArray[Any]:
    """A rank's numbers: integers from 0 to 27 for sums, 1 and 2 for products, any bits if nothing rounds."""
    draw = np.random.default_rng([rank, count, dtype, op])
    stored = STORED[dtype]
    if np.issubdtype(stored, np.integer) and dtype != _core.BFLOAT16:
        limits = np.iinfo(stored)
        return draw.integers(limits.min, limits.max, count, stored, endpoint=True)
    if op == _core.SUM:
        numbers = draw.integers(0, 27, count, endpoint=True).astype(np.float32)
    elif op == _core.PRODUCT:
        numbers = draw.integers(1, 2, count, endpoint=True).astype(np.float32)
    else:
        numbers = draw.standard_normal(count).astype(np.float32)
    return kept(numbers, dtype)


def kept(numbers: NDArray[np.float32], dtype: int) -> NDArray[Any]:
    """Floating-point numbers in their storage type; bfloat16 is the upper half of float32."""
    if dtype == _core.BFLOAT16:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(STORED[dtype])


def folded(lines: list[NDArray[Any]], dtype: int, op: int) -> NDArray[Any]:
    """NumPy's reduction of all ranks' numbers, in rank order."""
    if dtype == _core.BFLOAT16:
        lines = [(line.astype(np.uint32) << 16).view(np.float32) for line in lines]
    whole = lines[0].copy()
    for line in lines[1:]:
        whole = FOLDS[op](whole, line)
    return kept(whole, dtype) if dtype == _core.BFLOAT16 else whole


def join(size: int, options: dict[str, Any]) -> list[_core.Comm]:
    """The communicators of `size` ranks on loopback."""
    listener = _core.Listener(ifname="lo")

    def open_rank(rank: int) -> _core.Comm:
        door = {"listener": listener} if rank == 0 else {"address": listener.address}
        return _core.Comm(
            rank, size, secret=SECRET, ifname="lo", timeout_s=LIMIT_S, host=b"one host".ljust(16), **door, **options
        )

    try:
        return on_ranks(list(range(size)), open_rank, LIMIT_S)
    finally:
        listener.close()


@pytest.fixture(params=[(name, size) for name in NETWORKS for size in range(1, 10)], ids=lambda p: f"{p[0]}-{p[1]}")
def job(request: pytest.FixtureRequest) -> Iterator[tuple[list[_core.Comm], bool]]:
    """The ranks of a job, and whether their memory is the core's own."""
    name, size = request.param
    comms = join(size, NETWORKS[name])
    yield comms, name == "shared"
    on_ranks(comms, lambda comm: comm.close(), LIMIT_S)


def memory_of(comm: _core.Comm, own: bool, count: int, dtype: int) -> NDArray[Any]:
    """Memory for `count` elements."""
    if not own or count == 0:
        return np.zeros(count, STORED[dtype])
    arena = _core.Arena(count * _core.dtype_size(dtype))
    if comm.size > 1:
        comm.map(arena)
    return np.frombuffer(arena, STORED[dtype], count)


def check(comm: _core.Comm, own: bool, lines: list[NDArray[Any]], right: NDArray[Any], label: str) -> None:
    """Reduce-scatter the lines of all ranks, and all-reduce their beginnings, on one rank."""
    count = right.size // comm.size
    dtype, op = map(int, label.split())
    whole = memory_of(comm, own, right.size, dtype)
    whole[:] = lines[comm.rank]
    comm.submit(f"part {label} {count}", _core.REDUCESCATTER, whole, dtype, op=op).wait()
    part = slice(comm.rank * count, (comm.rank + 1) * count)
    assert whole[part].tobytes() == right[part].tobytes(), f"part {label} of {count}, rank {comm.rank} of {comm.size}"
    line = memory_of(comm, own, count, dtype)
    line[:] = lines[comm.rank][:count]
    comm.submit(f"all {label} {count}", _core.ALLREDUCE, line, dtype, op=op).wait()
    assert line.tobytes() == right[:count].tobytes(), f"all {label} of {count}, rank {comm.rank} of {comm.size}"


def test_reductions_are_numpys_byte_for_byte(job: tuple[list[_core.Comm], bool]) -> None:
    comms, own = job
    for dtype, op, count in itertools.product(STORED, FOLDS, COUNTS):
        lines = [inputs(rank, count * len(comms), dtype, op) for rank in range(len(comms))]
        right = folded(lines, dtype, op)
        on_ranks(comms, functools.partial(check, own=own, lines=lines, right=right, label=f"{dtype} {op}"), LIMIT_S)
