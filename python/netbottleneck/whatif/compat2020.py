"""The simulator of "Is Network the Bottleneck of Distributed Training?" (2020), exactly: functions in float64 seconds.

What it holds and what it leaves out (latency, hosts of several ranks, a codec's cost) is docs/what-if.md's matter: here
nothing is better than it was. The original waits in real time, stretched by `slowdown`, and passes over waits that are
30 us or shorter when stretched; so its results depend a little on that number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, starmap

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace.layer_log import LayerLog, Tensors, VecTable

CYCLE_S = 0.005
FUSION_BYTES = 64 << 20
SHORTEST_S = 0.00003
SLOWDOWN = 10.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bytes handed over at once, and when."""

    ready_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A bucket's way: network_s is one of its two stages, reduce_s the additions of the first."""

    bytes: int
    ready_s: float
    start_s: float
    network_s: float
    reduce_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """One cell of a sweep; the names are those of its JSON row.

    compute_end_s: the waits of the backward pass, summed; communication_end_s: of backward pass and last bucket, what
    ends last; overhead_s: the second less the first; step_s: the single device's step and that. buckets: of a batch."""

    model: str
    workers: int
    link_bps: float
    compression: float
    compute_end_s: float
    communication_end_s: float
    overhead_s: float
    step_s: float
    scaling_factor: float
    buckets: int


def above_zero(what: str, values: Iterable[float]) -> None:
    """Raises ValueError naming the first that is not a finite number above 0."""
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{what} {value!r}: must be a finite number above 0")


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a sweep. Raises ValueError for fewer than 1 worker, or what is not above 0."""

    workers: tuple[int, ...]
    link_bps: tuple[float, ...]
    compression: tuple[float, ...] = (1.0,)
    slowdown: float = SLOWDOWN

    def __post_init__(self) -> None:
        for count in self.workers:
            if count < 1:
                raise ValueError(f"{count} workers: must be 1 or more")
        above_zero("link", self.link_bps)
        above_zero("compression", self.compression)
        above_zero("slowdown", [self.slowdown])


@dataclass(frozen=True, slots=True)
class _At:
    compression: float
    workers: int
    link_bps: float


def buckets(tensors: Tensors, slowdown: float = SLOWDOWN) -> tuple[tuple[Bucket, ...], float]:
    """(what the backward pass hands over, when it ends): a bucket goes with the tensor that fills it or its time.

    Waits since the last bucket are looked at when a tensor comes, not by a timer; a bucket may exceed FUSION_BYTES."""
    sent = []
    now_s = held_s = 0.0
    held = 0
    for wait_s, size in tensors:
        if wait_s * slowdown > SHORTEST_S:
            now_s += wait_s
        held_s += wait_s
        held += size
        if held_s >= CYCLE_S or held >= FUSION_BYTES:
            sent.append(Bucket(now_s, held))
            held_s, held = 0.0, 0
    if held > 0:
        sent.append(Bucket(now_s, held))
    return tuple(sent), now_s


def add_seconds(table: VecTable, sizes: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of an addition: linear between the table's rows as float32 holds them, clamped at both ends."""
    known = np.array(table.bytes, np.float32), np.array(table.seconds, np.float32)
    return np.asarray(np.interp(np.asarray(sizes, np.float64), *known), np.float64)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A batch that has been cut into buckets, and its additions for a number of workers."""

    sent: tuple[Bucket, ...]
    end_s: float
    waits_s: float
    adds_s: tuple[float, ...]


def _pass(tensors: Tensors, table: VecTable, workers: int, slowdown: float) -> _Pass:
    sent, end_s = buckets(tensors, slowdown)
    adds = (workers - 1) * add_seconds(table, [bucket.bytes / workers for bucket in sent])
    return _Pass(sent, end_s, float(np.sum(np.array(tensors, np.float64)[:, 0])), tuple(adds.tolist()))


def _transfers(batch: _Pass, at: _At, slowdown: float) -> Iterator[Transfer]:
    """All buckets one after the other over one flat ring: reduce-scatter with its additions, then all-gather."""
    free_s = 0.0
    for bucket, add_s in zip(batch.sent, batch.adds_s, strict=True):
        network_s = (bucket.bytes * 8 * (at.workers - 1) / at.workers) / at.link_bps / at.compression
        start_s = max(free_s, bucket.ready_s)
        free_s = start_s
        for stage_s in (network_s + add_s, network_s):
            if stage_s * slowdown > SHORTEST_S:
                free_s += stage_s
        yield Transfer(bucket.bytes, bucket.ready_s, start_s, network_s, add_s, free_s)


def _end_s(batch: _Pass, at: _At, slowdown: float) -> float:
    """When both the backward pass and the last bucket are done."""
    last_s = batch.end_s
    for moved in _transfers(batch, at, slowdown):
        last_s = max(last_s, moved.end_s)
    return last_s


def timeline(
    tensors: Tensors,
    table: VecTable,
    workers: int,
    link_bps: float,
    compression: float = 1.0,
    slowdown: float = SLOWDOWN,
) -> tuple[Transfer, ...]:
    """Every bucket of a batch on its way. Raises ValueError for fewer than 1 worker, or what is not above 0."""
    Grid((workers,), (link_bps,), (compression,), slowdown)
    batch = _pass(tensors, table, workers, slowdown)
    return tuple(_transfers(batch, _At(compression, workers, link_bps), slowdown))


def _cell(log: LayerLog, passes: Sequence[_Pass], ends_s: Sequence[float], step_s: float, at: _At) -> Prediction:
    """Means over batches, each of which ends at one of `ends_s`."""
    overhead_s = float(np.mean([end - batch.waits_s for end, batch in zip(ends_s, passes, strict=True)]))
    return Prediction(
        model=log.name,
        workers=at.workers,
        link_bps=at.link_bps,
        compression=at.compression,
        compute_end_s=float(np.mean([batch.waits_s for batch in passes])),
        communication_end_s=float(np.mean(ends_s)),
        overhead_s=overhead_s,
        step_s=step_s + overhead_s,
        scaling_factor=step_s / (step_s + overhead_s),
        buckets=max(len(batch.sent) for batch in passes),
    )


def sweep(log: LayerLog, table: VecTable, step_s: float, grid: Grid) -> tuple[Prediction, ...]:
    """A prediction for each compression, then number of workers, then link; step_s: the step of a single device.

    Raises ValueError where step_s is not above 0."""
    above_zero("step", [step_s])
    passes = {n: [_pass(batch, table, n, grid.slowdown) for batch in log.batches] for n in grid.workers}
    rows = []
    for at in starmap(_At, product(grid.compression, grid.workers, grid.link_bps)):
        ends_s = [_end_s(batch, at, grid.slowdown) for batch in passes[at.workers]]
        rows.append(_cell(log, passes[at.workers], ends_s, step_s, at))
    return tuple(rows)
