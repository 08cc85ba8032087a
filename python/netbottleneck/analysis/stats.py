"""Comparisons over a trace: transports by alternating blocks, achieved and achievable bandwidth, scaling factor.

Pure and seeded: the same trace gives the same numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.blocks import BOOTSTRAP_SEED, by_block, redrawn
from netbottleneck.analysis.scaling import WARMUP_STEPS, Split, counted
from netbottleneck.trace.model import NULL, SINGLE, Collective, Trace

# Fewer pairs of blocks than this carry no claim.
PAIRS_MIN = 2
# Fewest operations, and smallest ratio of sizes, that a latency can be fitted to.
FIT_OPERATIONS_MIN = 8
FIT_SIZES_RATIO_MIN = 2.0
# Of the probe, the fewest streams within this of the best are named.
PROBE_NEAR_BEST = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def widened(value: float, sources: Iterable[Sequence[float]]) -> Estimate:
    """A value with the interval of all its sources of error, each given by what the value is at its ends.

    Sources know nothing of each other: how far they reach is added in squares."""
    reached = [(min([value, *ends]), max([value, *ends])) for ends in sources]
    if len(reached) == 1:
        return Estimate(value, *reached[0])
    low, high = (math.hypot(*(abs(ends[side] - value) for ends in reached)) for side in (0, 1))
    return Estimate(value, value - low, value + high)


@dataclass(frozen=True, slots=True)
class Paired:
    """Steps under `other` against steps under `base`, over pairs of neighbouring blocks.

    difference_ns: other minus base; ratio: other over base. Both are medians over the pairs of the difference or ratio
    of the blocks' median steps; intervals by bootstrap over pairs and over the steps within each block.
    """

    base: str
    other: str
    pairs: int
    steps: int
    difference_ns: Estimate
    ratio: Estimate

    @property
    def enough(self) -> bool:
        """Whether there are pairs enough for a claim."""
        return self.pairs >= PAIRS_MIN

    @property
    def gain(self) -> Estimate:
        """The part of base's step that other saves."""
        return Estimate(1 - self.ratio.value, 1 - self.ratio.high, 1 - self.ratio.low)


def step_times(trace: Trace, transport: str, warmup: int = WARMUP_STEPS) -> dict[int, NDArray[np.float64]]:
    """By block: ns of each counted step under a transport, the median over the ranks that finished it."""
    own = [step for step in counted(trace, warmup) if step.transport == transport]
    return {block: steps[:, 0] for block, steps in by_block((step, (step.duration_ns,)) for step in own).items()}


def median_of(pairs: NDArray[np.float64], draws: NDArray[np.float64]) -> Estimate:
    """The median over pairs of blocks, and the middle 95 % of what it is over those that were drawn again."""
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Estimate(float(np.median(pairs)), float(low), float(high))


def compare(
    trace: Trace, base: str, other: str, warmup: int = WARMUP_STEPS, seed: int = BOOTSTRAP_SEED
) -> Paired | None:
    """The paired comparison of two transports of one run; None where no two of their blocks are neighbours."""
    found = redrawn(step_times(trace, base, warmup), step_times(trace, other, warmup), seed)
    if found is None:
        return None
    difference = median_of(found.other - found.base, found.other_drawn - found.base_drawn)
    ratio = median_of(found.other / found.base, found.other_drawn / found.base_drawn)
    return Paired(base, other, len(found.base), found.steps, difference, ratio)


@dataclass(frozen=True, slots=True)
class Achieved:
    """What a transport did, one direction, in busbw (tensor bits times 2(n-1)/n for an all-reduce).

    active: over the time in transfer; average: over whole steps. Never one without the other. p10, p90: of single
    steps' active rate. wire_bps: active, from completions; None where the transport does not tell.
    """

    transport: str
    active_bps: float
    average_bps: float
    p10_bps: float
    p90_bps: float
    wire_bps: float | None
    steps: int


def achieved(transport: str, splits: Iterable[Split]) -> Achieved | None:
    """Over the steps of a transport; None where nothing moved."""
    moved = [s for s in splits if s.transport == transport and s.transfer_ns > 0 and s.bus_bytes > 0]
    if not moved:
        return None
    transfer_ns = sum(s.transfer_ns for s in moved)
    rates = [8e9 * s.bus_bytes / s.transfer_ns for s in moved]
    wire = [s.wire_bytes for s in moved if s.wire_bytes is not None]
    p10, p90 = np.percentile(rates, [10, 90])
    return Achieved(
        transport,
        8e9 * sum(s.bus_bytes for s in moved) / transfer_ns,
        8e9 * sum(s.bus_bytes for s in moved) / sum(s.step_ns for s in moved),
        float(p10),
        float(p90),
        8e9 * sum(wire) / transfer_ns if len(wire) == len(moved) else None,
        len(moved),
    )


@dataclass(frozen=True, slots=True)
class Achievable:
    """What a probe reached: (streams, bits/s) points, medians over ranks; best: the fewest streams near the top."""

    transport: str
    points: tuple[tuple[int, float], ...]
    best: tuple[int, float]


def achievable(trace: Trace) -> Achievable | None:
    """The probe of the transport that reached most; None without a probe."""
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank in trace.ranks:
        for info in rank.transports:
            for point in info.probe:
                if point.bits_per_s > 0:
                    rates[info.name][point.lanes].append(point.bits_per_s)
    found = []
    for name, by_lanes in rates.items():
        points = tuple((lanes, float(np.median(values))) for lanes, values in sorted(by_lanes.items()))
        top = max(rate for _, rate in points)
        found.append(Achievable(name, points, next(p for p in points if p[1] >= PROBE_NEAR_BEST * top)))
    return max(found, key=lambda a: a.best[1], default=None)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step of an all-reduce, a byte on the wire and a byte that is added cost: medians over ranks."""

    step_ns: float
    byte_ns: float
    added_ns: float
    levels_ns: float | None = None  # two levels beside what their bytes cost on the wire, where they can be had
    levels_byte_ns: float | None = None


def costs(trace: Trace) -> dict[str, Costs]:
    """By transport, where the job measured them."""
    told: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for rank in trace.ranks:
        for info in rank.transports:
            if info.costs:
                told[info.name].append(info.costs)
    return {name: Costs(*np.median(rows, axis=0).tolist()) for name, rows in told.items()}


@dataclass(frozen=True, slots=True)
class Travel:
    """All-reduces that took one algorithm: how many on one rank, and of which sizes."""

    algorithm: str
    least_bytes: int
    most_bytes: int
    operations: int


def travels(trace: Trace) -> dict[str, tuple[Travel, ...]]:
    """By transport, how the all-reduces of the first rank travelled, small ones first."""
    first = min((rank.rank for rank in trace.ranks), default=0)
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in trace.collectives:
        if one.rank == first and one.kind == "allreduce" and one.algorithm is not None:
            sizes[one.transport, one.algorithm].append(one.tensor_bytes)
    found: dict[str, list[Travel]] = defaultdict(list)
    for (transport, algorithm), own in sizes.items():
        found[transport].append(Travel(algorithm, min(own), max(own), len(own)))
    return {name: tuple(sorted(all_of, key=lambda t: (t.most_bytes, t.least_bytes))) for name, all_of in found.items()}


@dataclass(frozen=True, slots=True)
class Scaling:
    """T_1 / T_n for equal work per worker. how: "measured" or "estimated from compute"."""

    factor: float
    t1_ns: float
    tn_ns: float
    how: str


def scaling_factor(trace: Trace, transport: str, splits: Sequence[Split]) -> Scaling | None:
    """T_1 by one rank alone in the same run, else by the steps less exposed communication and waiting."""
    times = [t for lengths in step_times(trace, transport).values() for t in lengths.tolist()]
    alone = [t for lengths in step_times(trace, SINGLE).values() for t in lengths.tolist()]
    if not times:
        return None
    tn_ns = float(np.median(times))
    if alone:
        t1_ns, how = float(np.median(alone)), "measured"
    else:
        own = [s.step_ns - s.exposed_ns - s.wait_ns for s in splits if s.transport == transport]
        if not own:
            return None
        t1_ns, how = float(np.median(own)), "estimated from compute"
    return Scaling(t1_ns / tn_ns, t1_ns, tn_ns, how)


def latency_share(operations: Sequence[Collective]) -> float | None:
    """The part of transfer time that does not depend on size: a of ns = a + b bytes, by least squares.

    Over operations that ran alone on their rank; None where these are too few or too alike in size.
    """
    points = []
    by_rank: dict[int, list[Collective]] = defaultdict(list)
    for c in operations:
        if c.finished and c.tensor_bytes > 0:
            by_rank[c.rank].append(c)
    for rows in by_rank.values():
        spans = sorted(((c.start_ns or 0), (c.done_ns or 0), c.tensor_bytes) for c in rows)
        busy_until = 0
        for place, (start, done, nbytes) in enumerate(spans):
            followed = place + 1 < len(spans) and spans[place + 1][0] < done
            if start >= busy_until and not followed:
                points.append((nbytes, done - start))
            busy_until = max(busy_until, done)
    if len(points) < FIT_OPERATIONS_MIN:
        return None
    sizes, times = np.array(points, np.float64).T
    if sizes.max() < FIT_SIZES_RATIO_MIN * sizes.min():
        return None
    slope, constant = np.polyfit(sizes, times, 1)
    if slope < 0:
        return 1.0
    return float(np.clip(constant * len(times) / times.sum(), 0.0, 1.0))


def headroom(trace: Trace, base: str) -> Paired | None:
    """Steps in which nothing moved against those of `base`, where the run had them."""
    return compare(trace, base, NULL)
