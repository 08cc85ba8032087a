"""Comparisons over a trace: arms by alternating blocks, their costs and algorithms, scaling factor, latency.

Pure: the same trace gives the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.bandwidth import stream_changes
from netbottleneck.analysis.changes import CHANGE_VALUES, alike, last_change, level_of
from netbottleneck.analysis.intervals import WARMUP_STEPS, Split, are_mixed, counted, middle_half, script_ns
from netbottleneck.analysis.thresholds import (
    DELAYED,
    FIT_ALONE_PART,
    FIT_OPERATIONS_MIN,
    FIT_SIZES_RATIO_MIN,
    GAIN_MIN,
    PAIRS_MIN,
)
from netbottleneck.trace.model import Collective, Step, Trace
from netbottleneck.trace.transports import BARE, NULL, SINGLE, Arm
from netbottleneck.units import percent

Floats = NDArray[np.float64]
Blocks = Mapping[int, Floats]

# Intervals of 95 %: of the middle of independent values, and of the mean of a sequence of steps.

# From this number of values on, the interval is the exact signed-rank interval; below, Student's.
SIGNED_RANK_MIN = 6
# Of more values, the Walsh averages are counted instead of kept: there are half as many as the square of the values.
WALSH_KEPT = 2000
# Two-sided 95 % quantiles of Student's distribution for 1 to 4 degrees of freedom, where the series below is not exact.
STUDENT = (12.706, 4.303, 3.182, 2.776)
NORMAL = 1.959964
# A sequence of steps is cut into at most this many parts, of this many steps if that leaves 5 parts.
BATCHES, BATCH_STEPS = 10, 4
# Largest correlation of neighbouring steps that an interval takes into account.
ALIKE_MOST = 0.9
# A run of one block is cut into at most this many parts.
PARTS = 5
# Largest number of pairs that is planned.
PLAN_MAX = 10_000
# Largest logarithm of a ratio whose exponential is finite.
LOG_MAX = 700.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval; the interval of a single value is infinite."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """True if both ends of the interval are known."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def as_dict(self, scale: float = 1.0) -> dict[str, float | None]:
        """Return value and ends, times a factor, as JSON values; None for what is not known."""
        low, high = (scale * self.low, scale * self.high) if self.known else (None, None)
        return {"value": scale * self.value if math.isfinite(self.value) else None, "low": low, "high": high}

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate times a factor of at least 0."""
        return Estimate(factor * self.value, factor * self.low, factor * self.high)


def student(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution; infinite without a degree of freedom.

    Cornish-Fisher expansion from 5 degrees on (Abramowitz and Stegun 26.7.5); its error there is below 0.001.
    """
    if degrees < 1:
        return math.inf
    if degrees <= len(STUDENT):
        return STUDENT[degrees - 1]
    z, n = NORMAL, float(degrees)
    terms = (
        z,
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return sum(terms)


def _student_interval(values: Floats) -> Estimate:
    """Mean, with Student's interval."""
    mean = float(values.mean())
    if len(values) < 2:
        return Estimate(mean, -math.inf, math.inf)
    half = student(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


@cache
def _walsh_cut(count: int) -> int:
    """Position, counted from each end, of the Walsh averages that end the 95 % interval of `count` >= 6 values.

    The largest k with P(W < k) <= 2.5 % for the signed-rank statistic W: by counting up to 50 values, then by its
    normal approximation.
    """
    if count > 50:
        mean, variance = count * (count + 1) / 4, count * (count + 1) * (2 * count + 1) / 24
        return math.floor(mean - NORMAL * math.sqrt(variance))
    ways = np.zeros(count * (count + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, count + 1):
        ways[rank:] = ways[rank:] + ways[:-rank].copy()
    return int(np.searchsorted(np.cumsum(ways) / 2.0**count, 0.025, side="right"))


def _walsh(values: Floats, places: Sequence[int]) -> list[float]:
    """Return the Walsh averages, means of two values or of one with itself, at these places in their order."""
    if len(values) <= WALSH_KEPT:
        row, column = np.triu_indices(len(values))
        walsh = np.sort((values[row] + values[column]) / 2)
        return [float(walsh[place]) for place in places]
    ordered = np.sort(values)
    return [_walsh_at(ordered, place) for place in places]


def _walsh_at(ordered: Floats, place: int) -> float:
    """Return one of them: the least number with more than `place` of them up to it, by bisection over all numbers."""
    low, high = _ordinal(ordered[0]), _ordinal(ordered[-1])
    while low < high:
        half = (low + high) // 2
        if _walsh_count(ordered, _number(half)) > place:
            high = half
        else:
            low = half + 1
    return _number(low)


def _walsh_count(ordered: Floats, limit: float) -> int:
    """Number of the Walsh averages up to a limit. For each value, by bisection over those that are not smaller."""
    first = np.arange(len(ordered))
    low, high = first.copy(), np.full(len(ordered), len(ordered))
    for _ in range(len(ordered).bit_length()):
        half = np.minimum((low + high) // 2, len(ordered) - 1)
        fits = (low < high) & ((ordered + ordered[half]) / 2 <= limit)
        low, high = np.where(fits, half + 1, low), np.where(fits, high, np.maximum(half, low))
    return int((low - first).sum())


def _ordinal(value: float) -> int:
    """Return the position of a number among all numbers of 64 bits, from 0.0 on."""
    size = int(np.float64(abs(value)).view(np.int64))
    return size if value >= 0 else -size


def _number(ordinal: int) -> float:
    """Return the number at a position: see _ordinal."""
    size = float(np.int64(abs(ordinal)).view(np.float64))
    return size if ordinal >= 0 else -size


def middle(values: Sequence[float] | Floats) -> Estimate:
    """Return the middle of independent values that are symmetric around it, with an interval of at least 95 % coverage.

    From 6 values on: the Hodges-Lehmann estimate (median of the Walsh averages) with its exact signed-rank interval;
    below: the mean with Student's interval. Source: Hollander, Wolfe, Chicken, Nonparametric Statistical Methods, 3.
    Raises ValueError without a value.
    """
    array = np.asarray(values, np.float64)
    if not array.size:
        raise ValueError("an estimate needs at least one value")
    if len(array) < SIGNED_RANK_MIN:
        return _student_interval(array)
    count, cut = len(array) * (len(array) + 1) // 2, _walsh_cut(len(array))
    before, behind, low, high = _walsh(array, ((count - 1) // 2, count // 2, cut - 1, count - cut))
    return Estimate((before + behind) / 2, low, high)


def middle_of_sequence(values: Sequence[float] | Floats) -> Estimate:
    """Return `middle` of values in order of time. The interval is wider where neighbouring values are alike.

    By sqrt((1 + r) / (1 - r)), for n values of a first-order autoregressive sequence of correlation r: the ratio of the
    deviation of their mean to that of independent ones. Raises ValueError without a value.
    """
    found, factor = middle(values), _of_alike(np.asarray(values, np.float64))
    low, high = (found.value + factor * (end - found.value) for end in (found.low, found.high))
    return Estimate(found.value, low, high)


def _of_alike(values: Floats) -> float:
    """Factor of the deviation of the mean of values if they are like their neighbours: see middle_of_sequence."""
    r = min(max(alike(values - values.mean()), 0.0), ALIKE_MOST)
    return math.sqrt((1 + r) / (1 - r))


def _chi2(probability_z: float, degrees: float) -> float:
    """Return the quantile of the chi-squared distribution at a normal quantile (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * max(1 - spread + probability_z * math.sqrt(spread), 0.0) ** 3


def mean_of_delays(values: Sequence[float] | Floats) -> Estimate:
    """Return the mean of delays, of which few may be large, with its 95 % interval.

    values: at least 0, one for each step. Their number in a time is taken as random: the gamma interval for a weighted
    sum of Poisson counts (Fay and Feuer, Confidence intervals for directly standardized rates, 1997). The upper end is
    too low if the values lack the longest delays. Raises ValueError without a value.
    """
    array = np.asarray(values, np.float64)
    if not array.size:
        raise ValueError("an estimate needs at least one value")
    total, squares, most = float(array.sum()), float((array**2).sum()), float(array.max())
    if total <= 0:
        return Estimate(0.0, 0.0, 0.0)
    low = squares / (2 * total) * _chi2(-NORMAL, 2 * total**2 / squares)
    more, wider = total + most, squares + most**2
    high = wider / (2 * more) * _chi2(NORMAL, 2 * more**2 / wider)
    return Estimate(total / len(array), low / len(array), high / len(array))


def above_usual(values: Sequence[float] | Floats) -> tuple[Floats, float]:
    """Return by how much each value exceeds the usual ones, 0 for these, and the 25th percentile.

    Usual is up to DELAYED times the distance of the 10th from the 25th percentile above the latter. values: one for
    each step. Raises ValueError without a value.
    """
    array = np.asarray(values, np.float64)
    if not array.size:
        raise ValueError("an estimate needs at least one value")
    low, quarter = (float(value) for value in np.percentile(array, [10, 25]))
    more: Floats = np.where(array > quarter + DELAYED * (quarter - low), array - quarter, 0.0)
    return more, quarter


@dataclass(frozen=True, slots=True)
class Changed:
    """The last change of the step time. before, step: the steps between which it is. factor: of the median."""

    before: int
    step: int
    factor: float

    @property
    def words(self) -> str:
        """Where it is, and by how much."""
        apart = self.step > self.before + 1
        where = f"between steps {self.before} and {self.step}" if apart else f"at step {self.step}"
        return f"the step time changed {where}, the median by {percent(self.factor - 1, signed=True)}"


def changed_at(trace: Trace) -> Changed | None:
    """Return the last change of the step time; None if there is none.

    One that is near steps without detailed records may be within them.
    """
    longest: dict[int, Step] = {}
    for step in trace.steps:
        if step.arm != SINGLE and (step.index not in longest or step.duration_ns > longest[step.index].duration_ns):
            longest[step.index] = step
    steps = [longest[index] for index in sorted(longest)]
    arms = {arm: number for number, arm in enumerate(dict.fromkeys(step.arm for step in steps))}
    groups = np.array([arms[step.arm] for step in steps], np.int64)
    times = np.array([max(step.duration_ns, 1) for step in steps], np.float64)
    place = last_change(times, groups)
    if place == 0:
        return None
    gaps = np.flatnonzero(np.diff([step.index for step in steps]) > 1) + 1
    place = next((int(gap) for gap in gaps if abs(gap - place) <= CHANGE_VALUES), place)
    logs = level_of(np.log(times), groups)
    factor = math.exp(float(np.median(logs[place:]) - np.median(logs[:place])))
    return Changed(steps[place - 1].index, steps[place].index, factor)


def mean_of_steps(values: Sequence[float] | Floats) -> Estimate:
    """Return the mean of a sequence of steps, in order of time, with Student's interval over means of its parts.

    Steps near each other are alike, so means over at most BATCHES parts of the sequence are compared (batch means: Law,
    Simulation Modeling and Analysis, 9.5), and the interval is wider where these are alike, too. Raises ValueError
    without a value.
    """
    array = np.asarray(values, np.float64)
    if not array.size:
        raise ValueError("an estimate needs at least one value")
    means = [float(part.mean()) for part in np.array_split(array, _batches(len(array)))]
    return _around(float(array.mean()), means, _widening(array, len(means)))


def _batches(steps: int) -> int:
    """Number of parts into which a sequence of steps is cut."""
    return min(BATCHES, max(5, steps // BATCH_STEPS), steps)


def _widening(values: Floats, parts: int) -> float:
    """Factor of the interval over parts of a sequence: their means are alike, so these differ less than the whole may.

    The values are taken as a first-order autoregressive sequence. The estimate of its correlation r is too small by (1
    + 3r) / n (Kendall, Note on bias in the estimation of autocorrelation, 1954), and its error, which is added, is
    sqrt((1 - r^2) / n): where r is taken as too small, the interval does not cover. The mean of m values has the
    variance ((1 + r) / (1 - r) - 2r (1 - r^m) / (m (1 - r)^2)) / m.
    """
    count = len(values)
    if parts < 2:
        return 1.0
    found = alike(values - values.mean())
    above = (1 + 3 * found) / count + math.sqrt(max(1 - found**2, 0.0) / count)
    r = min(max(found + above, 0.0), ALIKE_MOST)
    whole, part = (
        ((1 + r) / (1 - r) - 2 * r * (1 - r**m) / (m * (1 - r) ** 2)) / m for m in (float(count), count / parts)
    )
    return math.sqrt(whole * (parts - 1) / (part - whole))


def _around(value: float, parts: Sequence[float], factor: float) -> Estimate:
    """A value with Student's interval over the values of parts of a sequence, times a factor."""
    found = _student_interval(np.array(parts))
    half = factor * (found.high - found.low) / 2
    return Estimate(value, value - half, value + half)


def mean_of_typical(values: Sequence[float] | Floats, lengths: Sequence[float] | Floats) -> Estimate:
    """Return the mean of a value over the middle half of a sequence of steps by length, with its 95 % interval.

    The interval is that of mean_of_steps, over means of the middle half of each part: the steps were chosen by the
    lengths of all of them, so the chosen ones alone differ too little. Raises ValueError without a value.
    """
    array, long = np.asarray(values, np.float64), np.asarray(lengths, np.float64)
    if not array.size:
        raise ValueError("an estimate needs at least one value")
    parts = np.array_split(np.arange(len(array)), _batches(len(array)))
    means = [float(array[part][middle_half(long[part])].mean()) for part in parts]
    return _around(float(array[middle_half(long)].mean()), means, _widening(array, len(means)))


def pairs_needed(effect: float, spread: float) -> int:
    """Return how many pairs give an interval that excludes 0, if their mean is `effect` and their deviation `spread`.

    The least n of at least PAIRS_MIN with t(n - 1) x spread / sqrt(n) < |effect|; PLAN_MAX if there is none below.
    """
    for count in range(PAIRS_MIN, PLAN_MAX):
        if student(count - 1) * spread < abs(effect) * math.sqrt(count):
            return count
    return PLAN_MAX


def widened(value: float, sources: Iterable[Sequence[float]]) -> Estimate:
    """A value with an interval that combines its sources of error. Each source gives the value at its ends.

    Sources are taken as independent: with several of them, their deviations add in quadrature.
    """
    reached = [(min([value, *ends]), max([value, *ends])) for ends in sources]
    if len(reached) == 1:
        return Estimate(value, *reached[0])
    low, high = (math.hypot(*(abs(ends[side] - value) for ends in reached)) for side in (0, 1))
    return Estimate(value, value - low, value + high)


# Blocks of steps. Neighbouring blocks of two arms form pairs.


def by_block(rows: Iterable[tuple[Step, Sequence[float]]]) -> dict[int, Floats]:
    """By block: the values of each step, as medians over the ranks that recorded it."""
    by_step: dict[tuple[int, int], list[Sequence[float]]] = defaultdict(list)
    for step, value in rows:
        by_step[step.block, step.index].append(value)
    blocks: dict[int, list[Floats]] = defaultdict(list)
    for (block, _), of_ranks in sorted(by_step.items()):
        blocks[block].append(np.median(np.array(of_ranks, np.float64), axis=0))
    return {block: np.array(steps) for block, steps in blocks.items()}


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Middle steps of paired blocks: base[i] and other[i] are those of pair i. steps: number of steps in them."""

    steps: int
    base: Floats
    other: Floats


def block_pairs(base: Blocks, other: Blocks, middle: Callable[..., Floats] = np.median) -> BlockPairs | None:
    """Return the pairs of neighbouring blocks of two arms, each block used once; None if there is no pair.

    Blocks of other arms are ignored. A block is an array of its steps: one number each, or one row each. middle: makes
    the middle step of a block.
    """
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
    if not pairs:
        return None
    steps = [np.array([middle(pair[side], axis=0) for pair in pairs]) for side in (0, 1)]
    return BlockPairs(sum(len(a) + len(b) for a, b in pairs), *steps)


@dataclass(frozen=True, slots=True)
class Paired:
    """Steps under `other` against steps under `base`, over pairs of neighbouring blocks.

    ratio: other over base, by `middle_of_sequence` of the logarithms of the pairs' ratios, from the median step of each
    block, or its mean step: see `compare`. difference_ns: other minus base, of base's median block: so both say the
    same, also where steps get longer or shorter during the run. spread: standard deviation of the pairs' logarithms,
    larger if neighbours are alike, None if not known. until: the step of a probe that changed the streams of an arm, if
    the blocks are those before it; None: no such blocks are among the pairs. note: what single long steps change in the
    comparison; "": nothing.
    """

    base: Arm
    other: Arm
    pairs: int
    steps: int
    difference_ns: Estimate
    ratio: Estimate
    spread: float | None = None
    until: int | None = None
    note: str = ""

    @property
    def enough(self) -> bool:
        """True if there are enough pairs for a claim."""
        return self.pairs >= PAIRS_MIN

    @property
    def base_ns(self) -> float:
        """Base's step, of which the difference is; 0 if the arms do not differ."""
        return self.difference_ns.value / (self.ratio.value - 1) if self.ratio.value != 1 else 0.0

    @property
    def gain(self) -> Estimate:
        """Part of base's step that `other` saves."""
        return Estimate(1 - self.ratio.value, 1 - self.ratio.high, 1 - self.ratio.low)

    def more_pairs(self, limit: float) -> int:
        """Return how many more pairs are needed to tell whether the gain is above `limit`; 0 if it is known."""
        if self.enough and not self.gain.low <= limit <= self.gain.high:
            return 0
        if self.spread is None or self.ratio.value <= 0:
            return max(PAIRS_MIN - self.pairs, 1)
        needed = pairs_needed(math.log(self.ratio.value) - math.log(1 - limit), self.spread)
        return max(needed - self.pairs, PAIRS_MIN - self.pairs, 1)


def step_times(trace: Trace, arm: Arm, warmup: int = WARMUP_STEPS) -> dict[int, Floats]:
    """By block: ns of each counted step of an arm, as the median over the ranks that finished it."""
    own = [step for step in counted(trace, warmup) if step.arm == arm]
    return {block: steps[:, 0] for block, steps in by_block((step, (step.duration_ns,)) for step in own).items()}


def _own_times(trace: Trace, arm: Arm, warmup: int) -> dict[int, Floats]:
    """As step_times, without what input, evaluation and checkpoints add to single steps: the script's, not the arm's.

    In steps of the untouched script these are not known.
    """
    own = [step for step in counted(trace, warmup) if step.arm == arm]
    script: dict[int, int] = defaultdict(int)
    for step in own:
        script[step.index] = max(script[step.index], script_ns(step))
    usual = float(np.median([*script.values()])) if script else 0.0
    rows = ((step, (step.duration_ns - max(script[step.index] - usual, 0.0),)) for step in own)
    return {block: steps[:, 0] for block, steps in by_block(rows).items()}


def compare_blocks(
    base_arm: Arm, other_arm: Arm, base: Blocks, other: Blocks, middle: Callable[..., Floats] = np.median
) -> Paired | None:
    """Compare two arms by the ns of their steps, by block; None if they have no neighbouring blocks."""
    found = block_pairs(base, other, middle)
    if found is None:
        return None
    logs = np.log(np.maximum(found.other, 1.0) / np.maximum(found.base, 1.0))
    log, step_ns = middle_of_sequence(logs), float(np.median(found.base))
    ends = (log.value, log.low, log.high)
    ratio = Estimate(*(math.exp(end) if end < LOG_MAX else math.inf for end in ends))
    difference = Estimate(*(end if math.isinf(end) else step_ns * math.expm1(min(end, LOG_MAX)) for end in ends))
    spread = _of_alike(logs) * float(logs.std(ddof=1)) if len(logs) > 1 else None
    return Paired(base_arm, other_arm, len(logs), found.steps, difference, ratio, spread)


def _ratio_of_paired_means(found: BlockPairs) -> tuple[Estimate, float]:
    """Ratio of the mean steps of paired blocks, and the deviation of a pair from it, as a part of other's step.

    Student's interval, of a ratio estimator (Cochran, Sampling Techniques, 6). Unlike a mean of logarithms, it has the
    whole weight of long steps that are in few blocks.
    """
    step_ns = max(float(found.base.mean()), 1.0)
    ratio = max(float(found.other.mean()), 1.0) / step_ns
    apart = (found.other - ratio * found.base) / step_ns
    own, factor = _student_interval(apart), _of_alike(apart)
    half = factor * (own.high - own.low) / 2
    return Estimate(ratio, max(ratio - half, 0.0), ratio + half), factor * float(apart.std(ddof=1)) / ratio


def _without_longest(blocks: Blocks) -> Blocks:
    """The blocks with the median of its block in place of the longest step."""
    block = max(blocks, key=lambda one: blocks[one].max())
    steps = blocks[block].copy()
    steps[steps.argmax()] = np.median(steps)
    return {**blocks, block: steps}


def _apart(value: float, usual: Estimate) -> bool:
    """True if a ratio of mean steps is outside of the interval of that of median steps by more than GAIN_MIN."""
    return not usual.low - GAIN_MIN <= value <= usual.high + GAIN_MIN


def _with_long_steps(pair: Paired, base: Blocks, other: Blocks) -> Paired:
    """Return a comparison of median steps as one of mean steps where these surely differ from it.

    Where they may differ, its interval includes theirs on that side. One long step of an arm changes nothing.
    """
    of_medians, of_means = block_pairs(base, other), block_pairs(base, other, np.mean)
    rest = block_pairs(_without_longest(base), _without_longest(other), np.mean)
    if of_medians is None or of_means is None or rest is None or not pair.enough:
        return pair
    (means, spread), (without, _) = _ratio_of_paired_means(of_means), _ratio_of_paired_means(rest)
    usual = pair.ratio
    if not (_apart(means.value, usual) and _apart(without.value, usual)):
        return pair
    if means.low > usual.high or means.high < usual.low:
        ratio, step_ns, note = means, float(of_means.base.mean()), "by mean steps: single steps are much longer"
    else:
        low, high = (means.low, usual.high) if means.value < usual.value else (usual.low, means.high)
        ratio, step_ns = Estimate(usual.value, low, high), float(np.median(of_medians.base))
        note = "single steps are much longer: the interval includes that of mean steps"
    difference = Estimate(*(step_ns * (end - 1) for end in (ratio.value, ratio.low, ratio.high)))
    return replace(pair, ratio=ratio, difference_ns=difference, spread=spread, note=note)


def compare(trace: Trace, base: Arm, other: Arm, warmup: int = WARMUP_STEPS) -> Paired | None:
    """Paired comparison of two arms of one run; None if they have no neighbouring blocks.

    By the median step of each block, or by its mean step if the steps of an arm `are_mixed`, or if single long steps
    make the means differ from the medians. Evaluations may recur with the period of the blocks, and so fall to one arm:
    what the script adds to a step is left out, and steps of the untouched script are compared by medians alone. After a
    probe that changed the streams of an arm, by the blocks behind it; by those before it if these are too few.
    """
    mixed = any(sends_in_some(trace, arm, warmup) for arm in (base, other))

    bare = BARE in (base, other)

    def among(steps: Iterable[Step]) -> Paired | None:
        part = replace(trace, steps=tuple(steps))
        one, two = ((step_times if bare else _own_times)(part, arm, warmup) for arm in (base, other))
        pair = compare_blocks(base, other, one, two, np.mean if mixed else np.median)
        return pair if pair is None or mixed or bare else _with_long_steps(pair, one, two)

    changes = stream_changes(trace)
    until = max((changes[arm.transport].step for arm in (base, other) if arm.transport in changes), default=None)
    if until is None:
        return among(trace.steps)
    later = among(step for step in trace.steps if step.index > until)
    if later is not None and later.enough:
        return later
    earlier = among(step for step in trace.steps if step.index < until)
    return later if earlier is None else replace(earlier, until=until)


def sends_in_some(trace: Trace, arm: Arm, warmup: int = WARMUP_STEPS) -> bool:
    """True if an arm's counted steps with and without operations `are_mixed`: then their mean stands for them."""
    steps = {step.index for step in counted(trace, warmup) if step.arm == arm}
    sending = {one.step for one in trace.collectives if one.arm == arm}
    return are_mixed(len(steps - sending), len(steps))


def _parts_of_run(blocks: Blocks) -> tuple[list[Floats], float]:
    """The blocks of a run, or of a single block, PARTS parts of its steps; and the factor of an interval over them.

    Blocks are independent. The parts of a block are not: see _widening.
    """
    parts = [steps for _, steps in sorted(blocks.items())]
    if len(parts) > 1:
        return parts, 1.0
    (steps,) = parts
    count = min(PARTS, len(steps))
    return np.array_split(steps, count), _widening(steps, count)


def _levels(parts: Sequence[Floats]) -> Floats:
    """Logarithms of the medians of the parts of a run."""
    levels: Floats = np.log([max(float(np.median(part)), 1.0) for part in parts])
    return levels


def typical_step(blocks: Blocks) -> float:
    """Return ns of the step of a run as ratio_of_runs compares it: the geometric mean over its parts' medians."""
    return math.exp(float(_levels(_parts_of_run(blocks)[0]).mean()))


def ratio_of_runs(before: Blocks, after: Blocks) -> Estimate | None:
    """Return the step of one run over that of another, by the distributions of their blocks; None without steps.

    Welch's interval over the logarithms of the blocks' medians. It covers the noise within the runs, not a change of
    the machine between them; of a run of one block, the noise within that block.
    """
    if not before or not after:
        return None
    both = [_parts_of_run(blocks) for blocks in (before, after)]
    levels = [_levels(parts) for parts, _ in both]
    half = _welch(levels, [factor for _, factor in both])
    return _of_logarithm(float(levels[1].mean() - levels[0].mean()), half)


def ratio_of_means(before: Blocks, after: Blocks) -> Estimate | None:
    """Return the mean step of one run over that of another, as ratio_of_runs does for their medians.

    Welch's interval over the means of the blocks, each as a part of its run's.
    """
    if not before or not after:
        return None
    both = [_parts_of_run(blocks) for blocks in (before, after)]
    means = [max(float(np.concatenate(parts).mean()), 1.0) for parts, _ in both]
    levels = [np.array([part.mean() for part in parts]) / mean for (parts, _), mean in zip(both, means, strict=True)]
    return _of_logarithm(math.log(means[1] / means[0]), _welch(levels, [factor for _, factor in both]))


def _of_logarithm(value: float, half: float) -> Estimate:
    """A ratio, from its logarithm and half of the interval of that."""
    return Estimate(math.exp(value), math.exp(value - half), math.exp(value + half) if half < LOG_MAX else math.inf)


def _welch(samples: Sequence[Floats], factors: Sequence[float]) -> float:
    """Half of Welch's interval of the difference of two means. factors: of the deviation of each mean."""
    variances = [
        factor**2 * float(own.var(ddof=1)) / len(own) if len(own) > 1 else math.inf
        for own, factor in zip(samples, factors, strict=True)
    ]
    whole = sum(variances)
    if not 0 < whole < math.inf:
        return whole
    degrees = whole**2 / sum(part**2 / (len(own) - 1) for part, own in zip(variances, samples, strict=True))
    return student(int(degrees)) * math.sqrt(whole)


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
            sizes[one.arm, one.algorithm].append(one.known_bytes)
    found: dict[Arm, list[Travel]] = defaultdict(list)
    for (arm, algorithm), own in sizes.items():
        found[arm].append(Travel(algorithm, min(own), max(own), len(own)))
    return {name: tuple(sorted(all_of, key=lambda t: (t.most_bytes, t.least_bytes))) for name, all_of in found.items()}


MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scaling factor T_1 / T_n for equal work per worker. how: "measured" or "estimated from compute"."""

    factor: float
    t1_ns: float
    tn_ns: float
    how: str

    @property
    def measured(self) -> bool:
        """True if T_1 was measured, by steps of one rank alone."""
        return self.how == MEASURED


def scaling_factor(trace: Trace, arm: Arm, splits: Sequence[Split]) -> Scaling | None:
    """Scaling factor; None for one rank. T_1 is one rank alone in the same run, else steps minus exposed and wait.

    Both are of the median step, or of the mean one if the arm `sends_in_some`.
    """
    times = [t for lengths in step_times(trace, arm).values() for t in lengths.tolist()]
    alone = [t for lengths in step_times(trace, SINGLE).values() for t in lengths.tolist()]
    if not times or trace.size < 2:
        return None
    middle_ns = np.mean if sends_in_some(trace, arm) else np.median
    tn_ns = float(middle_ns(times))
    if alone:
        t1_ns, how = float(middle_ns(alone)), MEASURED
    else:
        own = [s.step_ns - s.exposed_ns - s.wait_ns for s in splits if s.arm == arm]
        if not own:
            return None
        t1_ns, how = float(middle_ns(own)), "estimated from compute"
    return Scaling(t1_ns / tn_ns, t1_ns, tn_ns, how)


BOOTSTRAP_DRAWS = 400
Last = Mapping[tuple[Arm, int, int, int], tuple[int, int]]


def latency_share(operations: Sequence[Collective], last: Last = MappingProxyType({})) -> Estimate | None:
    """Part of transfer time that does not depend on size: a in ns = a + b bytes, by least squares.

    The interval is that of the bootstrap over the steps of the ranks. Uses operations that ran alone on their rank, of
    sizes of which half or more did: where most overlap, those that do not are the short ones. None if they are too few
    or too similar in size, or if larger ones take no longer. last: as intervals.last_entries returns it: waiting for
    the last rank is not transfer.
    """
    alone = _alone(operations, last)
    if len(alone) < FIT_OPERATIONS_MIN:
        return None
    sizes, times = np.array([(c.known_bytes, ns) for c, ns in alone], np.float64).T
    if sizes.max() < FIT_SIZES_RATIO_MIN * sizes.min() or np.polyfit(sizes, times, 1)[0] <= 0:
        return None
    steps = {(c.rank, c.step): None for c, _ in alone}
    number = {step: place for place, step in enumerate(steps)}
    step_of = np.array([number[c.rank, c.step] for c, _ in alone])
    draw, count = np.random.default_rng(0), len(steps)
    drawn = (np.bincount(draw.integers(count, size=count), minlength=count) for _ in range(BOOTSTRAP_DRAWS))
    found = [_constant_part(sizes, times, weights[step_of].astype(float)) for weights in drawn]
    low, high = np.quantile(found, [0.025, 0.975])
    return Estimate(_constant_part(sizes, times, np.ones(len(sizes))), float(low), float(high))


def _constant_part(sizes: Floats, times: Floats, weights: Floats) -> float:
    """Of the sum of the weighted times, the part a in ns = a + b bytes; 1 if larger operations take no longer."""
    whole = weights.sum()
    if whole == 0:
        return 1.0
    mean, mean_ns = (weights @ sizes) / whole, (weights @ times) / whole
    spread = weights @ (sizes - mean) ** 2
    slope = (weights @ ((sizes - mean) * (times - mean_ns))) / spread if spread > 0 else 0.0
    return float(np.clip(1 - slope * mean / mean_ns, 0.0, 1.0))


def _alone_on_rank(rows: Sequence[tuple[int, int, Collective]]) -> Iterator[tuple[Collective, int]]:
    """Of (begin, end, operation) of one rank: the operations that overlap no other, and their ns."""
    spans = sorted(rows, key=lambda row: row[:2])
    busy_until = 0
    for place, (start, done, c) in enumerate(spans):
        followed = place + 1 < len(spans) and spans[place + 1][0] < done
        if busy_until <= start < done and not followed:
            yield c, done - start
        busy_until = max(busy_until, done)


def _alone(operations: Sequence[Collective], last: Last) -> list[tuple[Collective, int]]:
    """The finished operations that ran alone on their rank, and their ns; of sizes of which half or more did."""
    by_rank: dict[int, list[tuple[int, int, Collective]]] = defaultdict(list)
    for c in operations:
        if c.finished and c.known_bytes > 0:
            by_rank[c.rank].append((max(c.start_ns or 0, last.get(c.match, (0, 0))[0]), c.done_ns or 0, c))
    found = [one for rows in by_rank.values() for one in _alone_on_rank(rows)]
    every = Counter(c.known_bytes for rows in by_rank.values() for _, _, c in rows)
    some = Counter(c.known_bytes for c, _ in found)
    return [(c, ns) for c, ns in found if some[c.known_bytes] >= FIT_ALONE_PART * every[c.known_bytes]]


def headroom(trace: Trace, base: Arm) -> Paired | None:
    """Steps without communication against those of `base`, if the run recorded them."""
    return compare(trace, base, NULL)
