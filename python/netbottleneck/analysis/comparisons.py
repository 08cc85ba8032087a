"""Comparisons over a trace: arms by alternating blocks, their costs and algorithms, scaling factor, latency.

Pure and seeded: the same trace gives the same numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.intervals import WARMUP_STEPS, Split, counted
from netbottleneck.trace.model import Collective, Step, Trace
from netbottleneck.trace.transports import NULL, SINGLE, Arm

# Blocks of steps. Neighbouring blocks form pairs; a bootstrap over pairs and steps gives the interval.

BOOTSTRAP_DRAWS = 2000
BOOTSTRAP_SEED = 0


def by_block(rows: Iterable[tuple[Step, Sequence[float]]]) -> dict[int, NDArray[np.float64]]:
    """By block: the values of each step, as medians over the ranks that recorded it."""
    by_step: dict[tuple[int, int], list[Sequence[float]]] = defaultdict(list)
    for step, value in rows:
        by_step[step.block, step.index].append(value)
    blocks: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
    for (block, _), of_ranks in sorted(by_step.items()):
        blocks[block].append(np.median(np.array(of_ranks, np.float64), axis=0))
    return {block: np.array(steps) for block, steps in blocks.items()}


def _pairs(
    base: Mapping[int, NDArray[np.float64]], other: Mapping[int, NDArray[np.float64]]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Pairs of neighbouring blocks of two arms, each block used once. Blocks of other arms are ignored."""
    blocks = sorted([(block, 0) for block in base] + [(block, 1) for block in other])
    pairs = []
    place = 0
    while place + 1 < len(blocks):
        (left, is_other), (right, next_is_other) = blocks[place], blocks[place + 1]
        if is_other == next_is_other:
            place += 1
            continue
        pairs.append((base[right], other[left]) if is_other else (base[left], other[right]))
        place += 2
    return pairs


@dataclass(frozen=True, slots=True)
class Drawn:
    """Median steps of paired blocks: measured, shape (pairs, …), and bootstrapped, shape (draws, pairs, …)."""

    steps: int
    base: NDArray[np.float64]
    other: NDArray[np.float64]
    base_drawn: NDArray[np.float64]
    other_drawn: NDArray[np.float64]


def redrawn(
    base: Mapping[int, NDArray[np.float64]], other: Mapping[int, NDArray[np.float64]], seed: int = BOOTSTRAP_SEED
) -> Drawn | None:
    """Bootstrap over pairs of neighbouring blocks and over the steps within each; None if there is no pair.

    A block is an array of its steps: one number each, or one row each. A row is always drawn as a whole.
    """
    pairs = _pairs(base, other)
    if not pairs:
        return None
    random = np.random.default_rng(seed)

    def redraw(steps: NDArray[np.float64]) -> NDArray[np.float64]:
        picks: NDArray[np.int64] = random.integers(len(steps), size=(BOOTSTRAP_DRAWS, len(steps)))
        return np.asarray(np.median(steps[picks], axis=1), np.float64)

    found = [[np.median(steps, axis=0) for steps in pair] for pair in pairs]
    drawn = [[redraw(steps) for steps in pair] for pair in pairs]
    which = random.integers(len(pairs), size=(BOOTSTRAP_DRAWS, len(pairs)))
    column = random.integers(BOOTSTRAP_DRAWS, size=which.shape)
    sides = [np.array([pair[side] for pair in drawn])[which, column] for side in (0, 1)]
    steps = sum(len(a) + len(b) for a, b in pairs)
    return Drawn(steps, *(np.array([pair[side] for pair in found]) for side in (0, 1)), *sides)


# Fewest pairs of blocks that support a claim.
PAIRS_MIN = 2
# Fewest operations, and smallest ratio of largest to smallest size, for a latency fit.
FIT_OPERATIONS_MIN = 8
FIT_SIZES_RATIO_MIN = 2.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def widened(value: float, sources: Iterable[Sequence[float]]) -> Estimate:
    """A value with an interval that combines its sources of error. Each source gives the value at its ends.

    Sources are taken as independent: with several of them, their deviations add in quadrature.
    """
    reached = [(min([value, *ends]), max([value, *ends])) for ends in sources]
    if len(reached) == 1:
        return Estimate(value, *reached[0])
    low, high = (math.hypot(*(abs(ends[side] - value) for ends in reached)) for side in (0, 1))
    return Estimate(value, value - low, value + high)


@dataclass(frozen=True, slots=True)
class Paired:
    """Steps under `other` against steps under `base`, over pairs of neighbouring blocks.

    difference_ns: other minus base; ratio: other over base. Both are medians over the pairs, computed from the median
    step of each block. Intervals: bootstrap over pairs and over the steps within each block.
    """

    base: Arm
    other: Arm
    pairs: int
    steps: int
    difference_ns: Estimate
    ratio: Estimate

    @property
    def enough(self) -> bool:
        """True if there are enough pairs for a claim."""
        return self.pairs >= PAIRS_MIN

    @property
    def gain(self) -> Estimate:
        """Part of base's step that `other` saves."""
        return Estimate(1 - self.ratio.value, 1 - self.ratio.high, 1 - self.ratio.low)


def step_times(trace: Trace, arm: Arm, warmup: int = WARMUP_STEPS) -> dict[int, NDArray[np.float64]]:
    """By block: ns of each counted step of an arm, as the median over the ranks that finished it."""
    own = [step for step in counted(trace, warmup) if step.arm == arm]
    return {block: steps[:, 0] for block, steps in by_block((step, (step.duration_ns,)) for step in own).items()}


def median_of(pairs: NDArray[np.float64], draws: NDArray[np.float64]) -> Estimate:
    """Median over pairs of blocks, with the middle 95 % of its bootstrap draws."""
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Estimate(float(np.median(pairs)), float(low), float(high))


def compare(
    trace: Trace, base: Arm, other: Arm, warmup: int = WARMUP_STEPS, seed: int = BOOTSTRAP_SEED
) -> Paired | None:
    """Paired comparison of two arms of one run; None if they have no neighbouring blocks."""
    found = redrawn(step_times(trace, base, warmup), step_times(trace, other, warmup), seed)
    if found is None:
        return None
    difference = median_of(found.other - found.base, found.other_drawn - found.base_drawn)
    ratio = median_of(found.other / found.base, found.other_drawn / found.base_drawn)
    return Paired(base, other, len(found.base), found.steps, difference, ratio)


@dataclass(frozen=True, slots=True)
class Costs:
    """All-reduce costs, medians over ranks: ns of a step, of a byte on the wire, of an added byte."""

    step_ns: float
    byte_ns: float
    added_ns: float
    levels_ns: float | None = None  # extra cost of the two-level algorithm beside its bytes on the wire, if available
    levels_byte_ns: float | None = None


def costs(trace: Trace) -> dict[str, Costs]:
    """Costs by transport, where the job measured them."""
    recorded: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for rank in trace.ranks:
        for info in rank.transports:
            if info.costs:
                recorded[info.name].append(info.costs)
    return {name: Costs(*np.median(rows, axis=0).tolist()) for name, rows in recorded.items()}


@dataclass(frozen=True, slots=True)
class Travel:
    """All-reduces of one algorithm: their number on one rank, and the range of their sizes."""

    algorithm: str
    least_bytes: int
    most_bytes: int
    operations: int


def travels(trace: Trace) -> dict[Arm, tuple[Travel, ...]]:
    """By arm: the algorithms of the first rank's all-reduces, small sizes first."""
    first = min((rank.rank for rank in trace.ranks), default=0)
    sizes: dict[tuple[Arm, str], list[int]] = defaultdict(list)
    for one in trace.collectives:
        if one.rank == first and one.kind == "allreduce" and one.algorithm is not None:
            sizes[one.arm, one.algorithm].append(one.tensor_bytes)
    found: dict[Arm, list[Travel]] = defaultdict(list)
    for (arm, algorithm), own in sizes.items():
        found[arm].append(Travel(algorithm, min(own), max(own), len(own)))
    return {name: tuple(sorted(all_of, key=lambda t: (t.most_bytes, t.least_bytes))) for name, all_of in found.items()}


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling factor T_1 / T_n for equal work per worker. how: "measured" or "estimated from compute"."""

    factor: float
    t1_ns: float
    tn_ns: float
    how: str


def scaling_factor(trace: Trace, arm: Arm, splits: Sequence[Split]) -> Scaling | None:
    """Scaling factor. T_1 comes from one rank alone in the same run, else from steps minus exposed and wait."""
    times = [t for lengths in step_times(trace, arm).values() for t in lengths.tolist()]
    alone = [t for lengths in step_times(trace, SINGLE).values() for t in lengths.tolist()]
    if not times:
        return None
    tn_ns = float(np.median(times))
    if alone:
        t1_ns, how = float(np.median(alone)), "measured"
    else:
        own = [s.step_ns - s.exposed_ns - s.wait_ns for s in splits if s.arm == arm]
        if not own:
            return None
        t1_ns, how = float(np.median(own)), "estimated from compute"
    return Scaling(t1_ns / tn_ns, t1_ns, tn_ns, how)


def latency_share(operations: Sequence[Collective]) -> float | None:
    """Part of transfer time that does not depend on size: a in ns = a + b bytes, by least squares.

    Uses operations that ran alone on their rank; None if they are too few or too similar in size.
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


def headroom(trace: Trace, base: Arm) -> Paired | None:
    """Steps without communication against those of `base`, if the run recorded them."""
    return compare(trace, base, NULL)
