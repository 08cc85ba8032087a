"""Exact port of the simulator of "Is Network the Bottleneck of Distributed Training?" (2020), in float64 seconds.

docs/explanation/what-if.md lists what that simulator leaves out (latency, several ranks on a host, a codec's cost).
This port adds none of it. The original waits in real time, stretched by `slowdown`, and skips waits that are 30 us or
shorter when stretched. So its results depend slightly on that number.
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
    """Bytes sent at once, and the time at which they are ready."""

    ready_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of a bucket: network_s is one of its two stages, reduce_s the additions of the first."""

    bytes: int
    ready_s: float
    start_s: float
    network_s: float
    reduce_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """One cell of a sweep; the names are those of its JSON row.

    compute_end_s: sum of the waits of the backward pass. communication_end_s: end of the backward pass or of the last
    bucket, whichever is later. overhead_s: communication_end_s - compute_end_s. step_s: the single device's step plus
    overhead_s. buckets: of a batch.
    """

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
    """Raises ValueError naming the first value that is not a finite number above 0."""
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{what} {value!r}: must be a finite number above 0")


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a sweep. Raises ValueError for fewer than 1 worker, or a value that is not above 0."""

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
    """(buckets of the backward pass, its end): the tensor that reaches a limit closes the bucket.

    The time limit is checked when a tensor arrives, not by a timer. A bucket may exceed FUSION_BYTES.
    """
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
    """Seconds of an addition: linear between the table's rows in float32, clamped at both ends."""
    known = np.array(table.bytes, np.float32), np.array(table.seconds, np.float32)
    return np.asarray(np.interp(np.asarray(sizes, np.float64), *known), np.float64)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A batch cut into buckets, and its additions for a number of workers."""

    sent: tuple[Bucket, ...]
    end_s: float
    waits_s: float
    adds_s: tuple[float, ...]


def _pass(tensors: Tensors, table: VecTable, workers: int, slowdown: float) -> _Pass:
    sent, end_s = buckets(tensors, slowdown)
    adds = (workers - 1) * add_seconds(table, [bucket.bytes / workers for bucket in sent])
    return _Pass(sent, end_s, float(np.sum(np.array(tensors, np.float64)[:, 0])), tuple(adds.tolist()))


def _transfers(batch: _Pass, at: _At, slowdown: float) -> Iterator[Transfer]:
    """Transfers one after the other over one flat ring: reduce-scatter with additions, then all-gather."""
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
    """End of the backward pass or of the last bucket, whichever is later."""
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
    """Transfers of all buckets of a batch. Raises ValueError for fewer than 1 worker, or a value not above 0."""
    Grid((workers,), (link_bps,), (compression,), slowdown)
    batch = _pass(tensors, table, workers, slowdown)
    return tuple(_transfers(batch, _At(compression, workers, link_bps), slowdown))


def _cell(log: LayerLog, passes: Sequence[_Pass], ends_s: Sequence[float], step_s: float, at: _At) -> Prediction:
    """Means over batches; `ends_s` holds each batch's end."""
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

    Raises ValueError if step_s is not above 0."""
    above_zero("step", [step_s])
    passes = {n: [_pass(batch, table, n, grid.slowdown) for batch in log.batches] for n in grid.workers}
    rows = []
    for at in starmap(_At, product(grid.compression, grid.workers, grid.link_bps)):
        ends_s = [_end_s(batch, at, grid.slowdown) for batch in passes[at.workers]]
        rows.append(_cell(log, passes[at.workers], ends_s, step_s, at))
    return tuple(rows)
