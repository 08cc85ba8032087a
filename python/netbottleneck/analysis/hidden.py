"""What a step saves if work was shorter, which hides transfers: its operations are replayed, submitted earlier. Pure.

An operation begins when the last rank has submitted it and the one before is done, and lasts as long as recorded. So
transfers that work hides show once that work is shorter.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from statistics import fmean, median

import numpy as np

from netbottleneck.analysis.comparisons import Estimate, Floats, Paired
from netbottleneck.analysis.intervals import Split, passes
from netbottleneck.trace.model import ENDS_TOGETHER, Collective, Step, Trace
from netbottleneck.trace.transports import Arm

Call = Mapping[int, Collective]  # an operation on all ranks
Submits = Mapping[int, float]  # by rank, in ns


def saved_by_punctual(
    trace: Trace, arm: Arm, steps: Iterable[Mapping[int, Split]], late_ns: Mapping[int, float]
) -> Floats:
    """By step: ns by which its last operation would end earlier, if some ranks were less late.

    steps: each by rank. late_ns: by rank, how much earlier it submits its operations at most; never earlier than the
    median of the other ranks. Infinite for a step of which the record does not tell, see _calls_of.
    """
    if not late_ns:
        return np.array([math.inf for _ in steps])
    return _saved(trace, arm, steps, [lambda submits: _punctual(submits, late_ns)])


def saved_by_even(
    trace: Trace,
    arm: Arm,
    steps: Iterable[Mapping[int, Split]],
    late_ns: Mapping[int, float],
    long: Sequence[bool],
) -> Floats:
    """The same if all ranks were equally late, but for those of late_ns, which stay late.

    In steps that are `long` only the last rank is earlier: as early as the median of the others.
    """

    def even(submits: Submits) -> Submits:
        evened = _punctual(submits, late_ns)
        typical = fmean(evened.values())
        return {rank: at - evened[rank] + typical for rank, at in submits.items()}

    def without_last(submits: Submits) -> Submits:
        evened = _punctual(submits, late_ns)
        last = max(evened, key=lambda rank: evened[rank])
        others = median(at for rank, at in evened.items() if rank != last)
        return {**submits, last: submits[last] - evened[last] + others}

    return _saved(trace, arm, steps, [without_last if one else even for one in long])


def _punctual(submits: Submits, late_ns: Mapping[int, float]) -> Submits:
    """Times of submission, if some ranks were less late: see saved_by_punctual."""
    others = median(at for rank, at in submits.items() if rank not in late_ns)
    return {rank: at - min(max(at - others, 0.0), late_ns.get(rank, 0.0)) for rank, at in submits.items()}


def _saved(
    trace: Trace, arm: Arm, steps: Iterable[Mapping[int, Split]], moved: Sequence[Callable[[Submits], Submits]]
) -> Floats:
    """By step: ns by which its last operation would end earlier, with other times of submission."""
    by_step = _calls_of(trace, arm)
    calls = [by_step.get(next(iter(step.values())).index, ()) for step in steps]
    ends = [_ends(own, move) if own else (math.inf, 0.0) for own, move in zip(calls, cycle(moved))]
    return np.array([done - earlier for done, earlier in ends])


def saved_by_undisturbed(trace: Trace, arm: Arm, splits: Sequence[Split], slowed: Paired | None) -> Estimate | None:
    """What the mean step saves if traffic did not slow forward and backward; slowed: by how much it does.

    The time that a rank loses is spread evenly over its compute beside traffic. None if the record does not tell, see
    _calls_of.
    """
    if slowed is None:
        return None
    by_step = _calls_of(trace, arm)
    ends: dict[int, dict[int, float]] = defaultdict(dict)
    for step in trace.steps:
        if step.arm == arm:
            ends[step.index][step.rank] = max((end for _, end in passes(step)), default=step.begin_ns)
    indices = sorted({split.index for split in splits if by_step.get(split.index)})
    if not indices:
        return None

    def mean(slowed_ns: float) -> float:
        if slowed_ns <= 0:
            return slowed_ns
        return float(np.mean([_undisturbed(by_step[at], ends[at], slowed_ns) for at in indices]))

    less = slowed.difference_ns
    return Estimate(mean(less.value), mean(less.low), mean(less.high))


def _undisturbed(calls: Sequence[Call], ends: Submits, slowed_ns: float) -> float:
    """Ns that a step saves if each rank's passes, which end at `ends`, were shorter by so much."""
    begins, dones = _transfers(calls)
    before = np.concatenate([[0.0], np.cumsum(np.subtract(dones, begins))])

    def beside(at: float) -> float:
        """Ns of transfers before a moment."""
        place = bisect.bisect(begins, at)
        return float(before[place] - (max(0.0, dones[place - 1] - at) if place else 0.0))

    def earlier_by(rank: int, at: float) -> float:
        whole = beside(ends[rank])
        return slowed_ns * (min(1.0, beside(at) / whole) if whole > 0 else 1.0)

    done, earlier = _ends(calls, lambda submits: {rank: at - earlier_by(rank, at) for rank, at in submits.items()})
    last = max(ends.values())
    return max(0.0, max(done, last) - max(earlier, last - slowed_ns))


def _ends(calls: Sequence[Call], moved: Callable[[Submits], Submits]) -> tuple[float, float]:
    """(when the last operation ended, when it would have ended with other times of submission)."""
    done = earlier = -math.inf
    for own in calls:
        submits = {rank: float(one.submit_ns) for rank, one in own.items()}
        end = float(max(one.done_ns or 0 for one in own.values()))
        lasts = max(0.0, end - max(*submits.values(), done))
        earlier, done = max(*moved(submits).values(), earlier) + lasts, max(done, end)
    return done, earlier


def _transfers(calls: Sequence[Call]) -> tuple[list[float], list[float]]:
    """When the transfers of operations began and ended, one behind the other."""
    begins: list[float] = []
    dones: list[float] = []
    for own in calls:
        begin = float(max(one.submit_ns for one in own.values()))
        begins.append(max(begin, dones[-1]) if dones else begin)
        dones.append(max(begins[-1], float(max(one.done_ns or 0 for one in own.values()))))
    return begins, dones


def _calls_of(trace: Trace, arm: Arm) -> Mapping[int, Sequence[Call]]:
    """By step of an arm: its operations, in the order of their last arrivals; empty if the record does not tell.

    So it is with operations that do not end on all ranks at once, and with ranks that wait before they submit the last
    one, which then depends on those before.
    """
    if trace.recorder:
        return {}
    rows: dict[int, list[Collective]] = defaultdict(list)
    for one in trace.collectives:
        if one.arm == arm and one.step is not None:
            rows[one.step].append(one)
    steps: dict[int, list[Step]] = defaultdict(list)
    for step in trace.steps:
        if step.arm == arm:
            steps[step.index].append(step)
    return {index: _calls(own, steps[index]) for index, own in rows.items()}


def _calls(rows: Sequence[Collective], steps: Sequence[Step]) -> Sequence[Call]:
    """The operations of a step on all ranks, see _calls_of."""
    groups: dict[object, dict[int, Collective]] = defaultdict(dict)
    for one in rows:
        groups[one.match][one.rank] = one
    ranks = {step.rank for step in steps}
    if not all(own.keys() == ranks and all(map(_is_common, own.values())) for own in groups.values()):
        return ()
    calls = sorted(groups.values(), key=lambda own: max(one.submit_ns for one in own.values()))
    waits = any(begin < calls[-1][step.rank].submit_ns for step in steps for _, begin, _ in step.waits)
    return () if waits else calls


def _is_common(one: Collective) -> bool:
    """True for a finished operation of all ranks that ends on all of them at once."""
    return one.finished and one.done_ns is not None and one.kind in ENDS_TOGETHER and one.ranks is None
