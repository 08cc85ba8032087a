"""Arrivals of ranks at their operations: clocks aligned by operations, a straggling rank or host, jitter. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.changes import last_shift
from netbottleneck.analysis.comparisons import Estimate, Floats, mean_of_delays, mean_of_steps
from netbottleneck.analysis.hidden import saved_by_even, saved_by_punctual
from netbottleneck.analysis.intervals import Split, host_count, intersection, intervals, total
from netbottleneck.analysis.thresholds import (
    CHANCE_MAX,
    DELAYED,
    DELAYED_STEPS_MIN,
    STRAGGLER_LEAST,
    STRAGGLER_OWN,
    STRAGGLER_STEPS_MIN,
)
from netbottleneck.trace.heartbeats import JUMPED
from netbottleneck.trace.model import ALONE, ENDS_TOGETHER, Clock, Collective, NcclOperation, Rank, Step, Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.units import listed, ms

# Clocks from wall times, or not compared at all, may be off by milliseconds.
UNSURE_METHODS = ("wall", "none", JUMPED)
# Clocks without an error: rank 0's own, and the same clock of one host.
EXACT_METHODS = ("rank 0", "same clock")
# The method of a clock that is aligned by the ends of operations.
BY_OPERATIONS = "operations"
# The shortest operations bound the error of a clock that is aligned by operations: this part of them.
SHORTEST_PART = 0.1
# Below this correlation, neighbouring steps are taken as independent: it is within the error of a few dozen steps.
CORRELATED = 0.1
# If this part of the steps holds most of a wait, its interval is that of single delays.
FEW_STEPS = 0.1
# Of the delay of the steps in which a rank is late by much more than usual, this part may be of any rank.
LITTLE = 0.05


def _matched(trace: Trace) -> list[dict[int, Collective]]:
    """By rank: the finished operations of all ranks that end on all at once."""
    groups: dict[tuple[Arm, int, int, int], dict[int, Collective]] = defaultdict(dict)
    for one in trace.collectives:
        if one.finished and one.kind in ENDS_TOGETHER and one.ranks in (None, trace.size):
            groups[one.match][one.rank] = one
    return [group for group in groups.values() if len(group) == trace.size]


def _offset(groups: Sequence[Mapping[int, Collective]], rank: int) -> tuple[int, int]:
    """(ns by which a rank's clock is ahead of rank 0's, its error), from operations that end on both at once.

    One of ENDS_TOGETHER ends on every rank within the time that it took the rank that arrived last, so the shortest
    operations bound the error: half of that time, and half of the spread of the ends.
    """
    ends = np.array([(group[rank].done_ns or 0) - (group[0].done_ns or 0) for group in groups], np.float64)
    took = np.array(
        [min((c.done_ns or 0) - c.submit_ns for c in (group[rank], group[0])) for group in groups], np.float64
    )
    shortest = took <= np.quantile(took, SHORTEST_PART)
    low, high = np.quantile(ends[shortest], [0.1, 0.9])
    error = (np.median(took[shortest]) + (high - low)) / 2
    return int(np.median(ends[shortest])), int(error)


def aligned(trace: Trace) -> Trace:
    """The trace with uncertain clocks aligned by the ends of its operations.

    The clocks whose error is not known are aligned if all ranks recorded an operation of ENDS_TOGETHER; their method
    is then "operations". A clock that has jumped stays as it is. Simulated traces have one clock.
    """
    steady = [rank for rank in trace.ranks if rank.rank and rank.clock.method != JUMPED]
    unsure = [rank.rank for rank in steady if math.isinf(_error_ns(rank.clock))]
    groups = _matched(trace) if unsure and trace.origin == "measured" else []
    if not groups or 0 not in groups[0]:
        return trace
    moved = {rank: _offset(groups, rank) for rank in unsure}
    for rank, (by, error) in moved.items():
        trace = _moved(trace, rank, by, error)
    return trace


def _earlier(step: Step, by: int) -> Step:
    """The step with all its times `by` ns earlier."""

    def spans(values: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((begin - by, end - by) for begin, end in values)

    return replace(
        step,
        begin_ns=step.begin_ns - by,
        end_ns=step.end_ns - by,
        forward=spans(step.forward),
        optimizer=spans(step.optimizer),
        evaluation=spans(step.evaluation),
        checkpoints=spans(step.checkpoints),
        modules=tuple((module, begin - by, end - by) for module, begin, end in step.modules),
        grad_ready=tuple((index, at - by) for index, at in step.grad_ready),
        waits=tuple((key, begin - by, end - by) for key, begin, end in step.waits),
    )


def _earlier_nccl(one: NcclOperation, by: int) -> NcclOperation:
    """The operation with all its times on the host's clock `by` ns earlier."""
    return replace(
        one,
        submit_ns=one.submit_ns - by,
        called_ns=None if one.called_ns is None else one.called_ns - by,
        kernel=tuple(
            replace(each, start_seen_ns=each.start_seen_ns - by, stop_seen_ns=each.stop_seen_ns - by)
            for each in one.kernel
        ),
        network=tuple(
            replace(each, times_ns=(begin - by, first - by, second - by, end - by))
            for each in one.network
            for begin, first, second, end in [each.times_ns]
        ),
    )


def _moved(trace: Trace, rank: int, by: int, error: int) -> Trace:
    """The trace with one rank's times `by` ns earlier."""

    def less(at: int | None) -> int | None:
        return None if at is None else at - by

    return replace(
        trace,
        steps=tuple(_earlier(step, by) if step.rank == rank else step for step in trace.steps),
        collectives=tuple(
            replace(
                one,
                submit_ns=one.submit_ns - by,
                agreed_ns=less(one.agreed_ns),
                start_ns=less(one.start_ns),
                first_byte_ns=less(one.first_byte_ns),
                done_ns=less(one.done_ns),
                start_seen_ns=less(one.start_seen_ns),
                done_seen_ns=less(one.done_seen_ns),
            )
            if one.rank == rank
            else one
            for one in trace.collectives
        ),
        nccl=tuple(_earlier_nccl(one, by) if one.rank == rank else one for one in trace.nccl),
        ranks=tuple(
            replace(one, clock=Clock(BY_OPERATIONS, one.clock.offset_ns + by, error)) if one.rank == rank else one
            for one in trace.ranks
        ),
        faults=tuple(replace(one, time_ns=one.time_ns - by) if one.rank == rank else one for one in trace.faults),
    )


def clock_error_ns(trace: Trace) -> float:
    """Largest possible error of a time difference between two ranks; infinite if a clock was not compared."""
    return _largest_error_ns(trace, trace.ranks)


def transfer_error_ns(trace: Trace) -> float:
    """clock_error_ns of the clocks that are not aligned by operations.

    An aligned clock is exact enough for a transfer, which then lasts as long as on the last rank.
    """
    return _largest_error_ns(trace, [rank for rank in trace.ranks if rank.clock.method != BY_OPERATIONS])


def _largest_error_ns(trace: Trace, ranks: Iterable[Rank]) -> float:
    if trace.origin != "measured":
        return 0.0
    errors = sorted((_error_ns(rank.clock) + (rank.device_error_ns or 0) for rank in ranks), reverse=True)
    return sum(errors[:2])


def _error_ns(clock: Clock) -> float:
    """Error of a clock; infinite if it is not known."""
    if clock.method in UNSURE_METHODS:
        return math.inf
    if clock.error_ns is None:
        return 0.0 if clock.method in EXACT_METHODS else math.inf
    return float(clock.error_ns)


@dataclass(frozen=True, slots=True)
class Rare:
    """Steps in which a rank is late by much more than usual; the others wait then for most of what they wait at all.

    count: of these steps, of `steps`. rank: the one that is last in `times` of them, more than chance allows; None if
    there is none. cause: what takes most of that time on it, or on whoever is last: "checkpoint", "evaluation",
    "input", or "" if not known.
    perhaps: the rank that is last in all of them, too few to exclude chance; None if several are, or if rank is set.
    """

    count: int
    steps: int
    rank: int | None
    times: int
    cause: str
    perhaps: int | None = None

    @property
    def why(self) -> str:
        """Sentences: how often, who, and what it does then."""
        often = f"In {self.count} of {self.steps} steps a rank is late by much more than usual"
        does = {
            "checkpoint": "it writes a checkpoint then",
            "evaluation": "it evaluates then",
            "input": "more time passes before its forward then",
        }
        what = f": {does[self.cause]}" if self.cause else ""
        if self.perhaps is not None:
            return f"{often}, each time rank {self.perhaps}, which may be chance with so few steps{what}."
        if self.rank is None:
            return f"{often}, now one, now another{what}."
        return f"{often}, in {self.times} of these rank {self.rank}{what}."

    @property
    def look(self) -> str:
        """Sentence, with a space behind it: where to look for a cause that was not recorded. "" if nobody knows."""
        rank = self.perhaps if self.rank is None else self.rank
        return "" if rank is None else f"Look at what rank {rank} does in these steps (trace.json.gz shows them). "


@dataclass(frozen=True, slots=True)
class Lateness:
    """What uneven arrival costs a step, and whether some ranks or hosts cause it.

    last: the latest of the ranks that arrive last persistently, None if there is none. ranks: these ranks; hosts: if
    they are whole hosts of several ranks, the name and the ranks of each. chance: probability that ranks of equal speed
    differ as much. persistent_ns: how long the others wait for `ranks`, beyond the typical other rank; saved_ns: what a
    step saves without that, less where transfers then last longer than the work; jitter_ns: saved if, but for that, all
    steps of all ranks were equally long, or the rank of `rare` as fast as the typical one in its steps. All are
    differences at the last operation of a step, see _arrivals. even_ns: jitter_ns, and without a straggler the waits
    that even out within a step, which may be saved, too. random_ns: the wait of the mean rank for any rank but
    `ranks`, at all operations of a step, at least jitter_ns. longer: how much longer than on the typical other rank
    each of PHASES of `ranks` is, in ns a step that is not `rare`; own_ns: the same of all that is not communication.
    step_ns: of the mean step. rare: if most of the wait is in single steps; left_out: the number of these steps, if
    they are too few to support a claim. since: the first of `steps`, if `ranks` are late from there on; None: steps of
    the whole record.
    """

    steps: int
    last: int | None
    chance: float
    persistent_ns: Estimate
    saved_ns: Estimate
    jitter_ns: Estimate
    even_ns: Estimate
    random_ns: Estimate
    longer: Mapping[str, float]
    own_ns: float
    ranks: tuple[int, ...] = ()
    hosts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    step_ns: float = 0.0
    rare: Rare | None = None
    left_out: int = 0
    since: int | None = None

    @property
    def counted(self) -> str:
        """The number of steps as text, and where they begin if not with the record."""
        return f"{self.steps} steps" if self.since is None else f"{self.steps} steps, from step {self.since} on"

    @property
    def without(self) -> str:
        """The steps that are left out, as text; "" if there are none."""
        return f", without {self.left_out} in which a rank was late by much more" if self.left_out else ""

    @property
    def straggler(self) -> int | None:
        """`last`, if it is last by its own work; None if there is none, or if its communication ends later."""
        return self.last if self.own_ns >= STRAGGLER_OWN * self.persistent_ns.value else None

    @property
    def who(self) -> str:
        """Who is last: "rank 2", "ranks 2, 5", "host h1 (ranks 4 to 7)", "hosts h1 (ranks 4, 5), h2 (ranks 6, 7)"."""
        if not self.hosts:
            return f"rank {self.last}" if len(self.ranks) < 2 else f"ranks {listed(self.ranks)}"
        if not all(name for name, _ in self.hosts):
            return f"the {'host' if len(self.hosts) == 1 else 'hosts'} of ranks {listed(self.ranks)}"
        each = ", ".join(f"{name} (ranks {listed(ranks)})" for name, ranks in self.hosts)
        return f"{'host' if len(self.hosts) == 1 else 'hosts'} {each}"

    @property
    def several(self) -> bool:
        """True if `who` is plural."""
        return len(self.hosts) > 1 if self.hosts else len(self.ranks) > 1

    @property
    def waited(self) -> str:
        """Begin of a sentence: who makes the others wait, and how long."""
        makes = "make" if self.several else "makes"
        return f"{self.who[0].upper()}{self.who[1:]} {makes} the others wait {ms(self.persistent_ns.value)}"

    @property
    def no_straggler(self) -> str:
        """Why no rank is a straggler; "" if one is."""
        if self.last is None:
            return "no rank is last more often than chance allows"
        follows = f"{self.who} {'are' if self.several else 'is'} last by {ms(self.persistent_ns.value)}"
        its = "their" if self.several else "its"
        return f"{follows}, and not by {its} own work: {its} communication ends later" if self.straggler is None else ""


Waits = Mapping[int, Sequence[tuple[int, int, int]]]  # (key, begin, end) of the training threads in a step, by rank
# Of a step, what a rank does itself: see Split.phases.
PHASES = ("input", "compute", "optimizer", "evaluation", "checkpoint", "other")
OWN = "own"


def _unmatched(trace: Trace) -> set[int | None]:
    """The steps of a profile whose operations are not matched between ranks."""
    return {one.step for one in trace.collectives if one.key >= ALONE} if trace.recorder else set()


def _is_awaited(calls: Sequence[Collective], waits: Waits) -> bool:
    """True if the ranks that submit an operation early wait for it most of the time until the last one does, too."""
    last = max(call.submit_ns for call in calls)
    blocked = sum(
        max(0, min(end, last) - max(begin, call.submit_ns))
        for call in calls
        for key, begin, end in waits.get(call.rank, ())
        if key in (0, call.key)
    )
    return 2 * blocked >= sum(last - call.submit_ns for call in calls)


def _common_calls(rows: Sequence[Collective], size: int) -> list[list[Collective]]:
    """The calls of the script in a step, of all ranks, that end on all at once; in order of time."""
    calls: dict[tuple[Arm, int, int, int], list[Collective]] = defaultdict(list)
    for one in rows:
        if one.by_script and one.finished and one.kind in ENDS_TOGETHER:
            calls[one.match].append(one)
    common = (own for own in calls.values() if len(own) == size)
    return sorted(common, key=lambda own: sum(one.submit_ns for one in own))


def _gradients(rows: Sequence[Collective]) -> dict[int, tuple[int, int]]:
    """By rank: (submission of its last gradient in a step, end of its last one)."""
    found: dict[int, tuple[int, int]] = {}
    for one in rows:
        if not one.by_script:
            submit, done = found.get(one.rank, (0, 0))
            found[one.rank] = max(submit, one.submit_ns), max(done, one.done_ns or 0)
    return found


def _points(rows: Sequence[Collective], waits: Waits, size: int) -> list[dict[int, int]]:
    """When each rank came to places of a step where ranks wait for each other, the first and the last among them.

    rows: the operations of the step. Such places are its gradients, and calls of the script that are awaited; of a step
    that has only calls of groups of some ranks, each rank's own first and last one.
    """
    gradients, calls = _gradients(rows), _common_calls(rows, size)
    if not gradients and not calls:
        by_time = sorted(rows, key=lambda one: one.submit_ns)
        return [{one.rank: one.submit_ns for one in order} for order in (by_time[::-1], by_time)]
    ends = (next((own for own in order if _is_awaited(own, waits)), []) for order in (calls, reversed(calls)))
    points = [{one.rank: one.submit_ns for one in own} for own in ends]
    return [*points, {rank: submit for rank, (submit, _) in gradients.items()}]


def _held_before(rows: Sequence[Collective], waits: Waits, first: Mapping[int, int]) -> list[int]:
    """How long each rank waits before the first point of a step for calls that are none of the points.

    Others may delay those, or the network.
    """
    common = {(one.rank, one.match) for own in _common_calls(rows, len(first)) for one in own}
    others = {(one.rank, one.key) for one in rows if one.by_script and (one.rank, one.match) not in common}
    return [
        total(intervals((begin, min(end, at)) for key, begin, end in waits.get(rank, ()) if (rank, key) in others))
        for rank, at in sorted(first.items())
    ]


def _own_work(rows: Sequence[Collective], waits: Waits, size: int) -> list[int] | None:
    """When each rank comes to the last of the points of a step, without what it waits from the first of them on.

    Nor does it count what held it before. It is then late by what it works longer than others. None: there is no such
    point.
    """
    points = [point for point in _points(rows, waits, size) if len(point) == size]
    if not points:
        return None
    first, last = (choose(points, key=lambda point: sum(point.values())) for choose in (min, max))
    gradients, arrived = _gradients(rows), []
    for rank, before_ns in enumerate(_held_before(rows, waits, first)):
        still = intervals([*((begin, end) for _, begin, end in waits.get(rank, ())), gradients.get(rank, (0, 0))])
        within = intersection(still, intervals([(first[rank], last[rank])]))
        arrived.append(last[rank] - total(within) - before_ns)
    return arrived


def _waits(trace: Trace, arm: Arm) -> Mapping[int, Waits]:
    """By index: the waits of the steps of an arm."""
    waits: dict[int, dict[int, Sequence[tuple[int, int, int]]]] = defaultdict(dict)
    for step in trace.steps:
        if step.arm == arm and not trace.recorder:
            waits[step.index][step.rank] = step.waits
    return waits


def _arrivals(trace: Trace, arm: Arm, indices: Sequence[int]) -> tuple[list[int], Floats]:
    """(steps that all ranks recorded, when each rank arrives in them, shape (steps, ranks)).

    A rank arrives when it submits the last operation that ranks wait for, without what it waited before: see _own_work.
    Where waits are not recorded, it is the last gradient, or the last operation of a step without gradients. Steps of a
    profile whose operations are not matched between ranks are left out.
    """
    of: dict[int, list[Collective]] = defaultdict(list)
    for one in trace.collectives:
        if one.arm == arm and one.step is not None:
            of[one.step].append(one)
    graded = any(not one.by_script for rows in of.values() for one in rows)
    waits, unmatched, ranks = _waits(trace, arm), _unmatched(trace), range(trace.size)
    found: dict[int, list[int]] = {}
    for index in indices:
        last: dict[int, int] = {}
        for one in of[index]:
            if not (graded and one.by_script):
                last[one.rank] = max(last.get(one.rank, 0), one.submit_ns)
        if index not in unmatched and last.keys() == set(ranks):
            found[index] = _own_work(of[index], waits.get(index, {}), trace.size) or [last[rank] for rank in ranks]
    return list(found), np.array(list(found.values()), np.float64)


def _correlation(values: Floats) -> float:
    """Correlation of neighbours along the first axis, over all columns together; 0 without variation."""
    centred = values - values.mean(axis=0)
    power = float((centred**2).sum())
    return float((centred[1:] * centred[:-1]).sum()) / power if power > 0 else 0.0


def _independent(places: Floats, column: int) -> float:
    """Number of independent steps among `places`, from the correlation of neighbours, of `column` or of all.

    That of a short series is too small by (1 + 3 rho) / n on average (Kendall, A note on autocorrelation, 1954).
    """
    steps = len(places)
    rho = max(_correlation(places[:, [column]]), _correlation(places))
    if rho > CORRELATED:
        rho += (1 + 3 * rho) / steps
    rho = min(max(rho, 0.0), 0.99)
    return steps * (1 - rho) / (1 + rho)


def _chance(places: Floats) -> float:
    """Probability that some rank of `ranks` equal ones has a mean place as high as the highest. places: (steps, ranks).

    The rank-sum statistic of Friedman's test, for the highest rank alone, with Bonferroni's correction.
    """
    ranks = places.shape[1]
    worst = int(places.mean(axis=0).argmax())
    deviation = math.sqrt((ranks**2 - 1) / 12 / _independent(places, worst))
    z = (float(places[:, worst].mean()) - (ranks - 1) / 2) / deviation
    return float(min(1.0, ranks * math.erfc(z / math.sqrt(2)) / 2))


def _places(arrived: Floats) -> Floats:
    """Place of each rank in the order of arrival of each step, from 0; ranks that arrive together share a place."""
    places = np.empty(arrived.shape)
    for step, order in enumerate(np.sort(arrived, axis=1)):
        before, until = (np.searchsorted(order, arrived[step], side) for side in ("left", "right"))
        places[step] = (before + until - 1) / 2
    return places


def _by_host(trace: Trace, ranks: Sequence[int]) -> list[list[int]]:
    """The columns of `ranks` by host; empty if a host is not known, there are no two hosts, or each has one rank."""
    hosts = {rank.rank: rank.host_id for rank in trace.ranks}
    columns: dict[str, list[int]] = defaultdict(list)
    for column, rank in enumerate(ranks):
        columns[hosts.get(rank, "")].append(column)
    several = any(len(own) > 1 for own in columns.values())
    return list(columns.values()) if several and (host_count(trace) or 0) > 1 else []


def _delays(arrived: Floats, members: Sequence[int]) -> Floats:
    """How much later than the median of the other ranks each member arrives: the median over the steps, at least 0."""
    others = np.median(np.delete(arrived, members, axis=1), axis=1, keepdims=True)
    delays: Floats = np.maximum(np.median(arrived[:, members] - others, axis=0), 0.0)
    return delays


def _late(arrived: Floats, groups: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], float]:
    """(the groups of columns that arrive last persistently, chance of that); no groups if there are none.

    A group is a rank, or a host, which arrives with its median rank: what slows a single step of one rank may slow the
    other ranks of its host, too. At most half of the groups are late. They are found one by one: the last of those that
    remain is tested as if there were no others, until chance may explain one. So chance names a wrong group as rarely
    as one test does. Each of their ranks is late by at least STRAGGLER_LEAST of the latest.
    """
    remain = list(range(len(groups)))
    each = np.stack([np.median(arrived[:, own], axis=1) for own in groups], axis=1)
    places = _places(each)
    late: list[Sequence[int]] = []
    found = 1.0
    while len(late) < len(groups) // 2:
        ordered = places[:, remain]
        last, chance = remain[int(ordered.mean(axis=0).argmax())], _chance(ordered)
        delays = _delays(arrived, [column for own in (*late, groups[last]) for column in own])
        if chance > CHANCE_MAX or not 0 < STRAGGLER_LEAST * delays.max() <= delays.min():
            return late, found if late else chance
        late.append(groups[last])
        remain.remove(last)
        places -= (each > each[:, [last]]) + (each == each[:, [last]]) / 2  # of those that remain
        found = max(found, chance) if late[1:] else chance
    return late, found


def _evened(arrived: Floats, members: Sequence[int]) -> Floats:
    """The arrivals if these members were as fast as the typical other rank."""
    evened = arrived.copy()
    if members:
        evened[:, members] -= _delays(arrived, members)
    return evened


def _last(arrived: Floats, hosts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], float]:
    """(the ranks or hosts that arrive last persistently, as their columns, chance of that).

    If ranks and hosts are found, it is what saves more.
    """
    if len(arrived) < STRAGGLER_STEPS_MIN:
        return [], 1.0
    ranks = _late(arrived, [[column] for column in range(arrived.shape[1])])
    found = [one for one in (_late(arrived, hosts) if hosts else ([], 1.0), ranks) if one[0]]
    return min(found, key=lambda one: float(_evened(arrived, _columns(one[0])).max(axis=1).mean()), default=ranks)


def _later(arrived: Floats, hosts: Sequence[Sequence[int]]) -> tuple[int, list[Sequence[int]], float]:
    """(the step from which on ranks or hosts arrive last persistently, their columns, chance of that).

    A change of how late a rank is looks like steps that resemble their neighbours. So where the whole record has no
    such ranks, the steps after the last such change are tested. Without ranks then, the result is that of all steps.
    """
    groups, chance = _last(arrived, hosts)
    since = 0 if groups else last_shift(arrived - np.median(arrived, axis=1, keepdims=True))
    if since:
        later = _last(arrived[since:], hosts)
        if later[0]:
            return since, *later
    return 0, groups, chance


def _columns(groups: Sequence[Sequence[int]]) -> list[int]:
    return sorted(column for own in groups for column in own)


def _longer(steps: Sequence[Mapping[int, Split]], ranks: Sequence[int]) -> dict[str, float]:
    """By phase, and of OWN, all but communication: how much longer the median of `ranks` is than that of the others.

    In ns a step.
    """
    means: dict[str, dict[int, float]] = defaultdict(dict)
    for member in steps[0]:
        own = [step[member].phases() for step in steps]
        for phase in PHASES:
            means[phase][member] = float(np.mean([phases[phase] for phases in own]))
        means[OWN][member] = sum(means[phase][member] for phase in PHASES)
    return {
        phase: float(np.median([means[phase][rank] for rank in ranks]))
        - float(np.median([ns for other, ns in means[phase].items() if other not in ranks]))
        for phase in (*PHASES, OWN)
    }


def _hosts(trace: Trace, groups: Sequence[Sequence[int]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The name and the ranks of each of these hosts; () if they are single ranks."""
    if all(len(own) == 1 for own in groups):
        return ()
    names = {rank.rank: rank.hostname for rank in trace.ranks}
    return tuple(sorted(((names.get(own[0], ""), tuple(own)) for own in groups), key=lambda host: host[1]))


def _for_others(split: Split, ranks: Sequence[int]) -> int:
    """Ns of a step in which its rank waited for any rank but `ranks`."""
    return max(0, split.skew_ns - sum(split.late_ns.get(rank, 0) for rank in ranks))


def _inside(steps: Sequence[Mapping[int, Split]], last: Sequence[int], jitter: Floats) -> Floats:
    """How much longer than `jitter` the mean rank waits for ranks but `last` in each step: it evens out within it."""
    others = [float(np.mean([_for_others(split, last) for split in step.values()])) for step in steps]
    inside: Floats = np.maximum(others - jitter, 0.0)
    return inside


def _mean(values: Floats) -> Estimate:
    """The mean of a wait over the steps. It is at least 0, and few steps may hold most of it."""
    most = np.sort(values)[-math.ceil(len(values) * FEW_STEPS) :]
    if most.sum() > values.sum() / 2:
        return mean_of_delays(values)
    found = mean_of_steps(values)
    return replace(found, low=max(found.low, 0.0))


def _latest(arrived: Floats) -> Floats:
    """How much later than the typical other rank the last one arrives, of each step."""
    order = np.sort(arrived, axis=1)
    late: Floats = order[:, -1] - np.median(order[:, :-1], axis=1)
    return late


def _cause(steps: Sequence[Split], typical: Sequence[Split], ns: float) -> str:
    """What takes at least half of `ns` more in some steps of a rank than in its typical ones; "" if nothing does."""
    parts: dict[str, Callable[[Split], float]] = {
        "checkpoint": lambda s: s.checkpoint_ns,
        "evaluation": lambda s: s.evaluation_ns,
        "input": lambda s: s.input_ns,
    }
    more = {
        name: sum(part(s) for s in steps) - len(steps) * float(np.median([part(s) for s in typical]))
        for name, part in parts.items()
    }
    name = max(more, key=lambda one: more[one])
    return name if more[name] >= ns / 2 else ""


def _so_many(times: int, count: int, chance: float) -> float:
    """Upper bound of the probability of `times` or more of `count` events, each with `chance` (Chernoff, 1952)."""
    part = times / count
    if part <= chance:
        return 1.0
    rest = (1 - part) * math.log((1 - part) / (1 - chance)) if part < 1 else 0.0
    return math.exp(-count * (part * math.log(part / chance) + rest))


def _long(evened: Floats) -> NDArray[np.bool_]:
    """The steps in which a rank is late by much more than usual.

    Usual is up to DELAYED times the distance of the 10th percentile from the median above the median. Of the others,
    the shortest do not count that hold the last LITTLE of the delay: a few are always above the limit by chance.
    """
    late = _latest(evened)
    low, usual = np.percentile(late, [10, 50])
    delays = np.where(late > usual + DELAYED * (usual - low), late, 0.0)
    order = np.sort(delays)[::-1]
    held = np.cumsum(order)
    least = order[np.searchsorted(held, (1 - LITTLE) * held[-1])]
    long: NDArray[np.bool_] = (delays > 0) & (delays >= least)
    return long


def _rare(evened: Floats, steps: Sequence[Mapping[int, Split]]) -> Rare | None:
    """The long steps, if they hold most of the wait.

    A rank is named if chance lets no rank be last in so many of them (with Bonferroni's correction).
    """
    late, long = _latest(evened), _long(evened)
    count, ranks = int(long.sum()), evened.shape[1]
    if not 0 < count <= len(late) / 2 or late[long].sum() <= late.sum() / 2:
        return None
    last, places = evened[long].argmax(axis=1).tolist(), np.flatnonzero(long).tolist()
    rank, times = Counter(last).most_common(1)[0]
    if times < DELAYED_STEPS_MIN or ranks * _so_many(times, count, 1 / ranks) > CHANCE_MAX:
        whoever = [steps[place][each] for place, each in zip(places, last, strict=True)]
        typical = [split for step in steps for split in step.values()]
        cause = _cause(whoever, typical, float(late[long].sum()))
        return Rare(count, len(late), None, 0, cause, rank if times == count else None)
    own = [place for place, each in zip(places, last, strict=True) if each == rank]
    cause = _cause([steps[place][rank] for place in own], [step[rank] for step in steps], float(late[own].sum()))
    return Rare(count, len(late), rank, times, cause)


def _saved(
    arrived: Floats, members: Sequence[int], rare: Rare | None, steps: Sequence[Mapping[int, Split]]
) -> tuple[Floats, Floats]:
    """(ns of each step that are saved without the lateness of `members`, the same without any other lateness).

    A step saves at most the idle time in which its ranks waited for the last one, and without one lateness no more than
    the other one leaves.
    """
    evened = _evened(arrived, members)
    waited = np.array([[step[rank].skew_ns for rank in sorted(step)] for step in steps], np.float64)
    of_others = np.delete(waited, members, axis=1).mean(axis=1)
    persistent = np.minimum(np.maximum(arrived.max(axis=1) - evened.max(axis=1), 0.0), of_others)
    typical = evened.mean(axis=1)
    jitter = np.minimum(evened.max(axis=1) - typical, waited.mean(axis=1))
    if rare is not None:  # whoever is late in these steps is to be as fast as the typical other rank
        last = np.eye(waited.shape[1], dtype=bool)[evened.argmax(axis=1)]
        of_others = np.where(last, 0.0, waited).sum(axis=1) / (waited.shape[1] - 1)
        long, late = _long(evened), _latest(evened)
        jitter = np.where(long, np.minimum(late, of_others), jitter)
        typical = np.where(long, evened.max(axis=1) - late, typical)
    if members:
        jitter = np.minimum(jitter, arrived.max(axis=1) - typical - _delays(arrived, members).max())
    return persistent, jitter


def _common(trace: Trace, arm: Arm, splits: Sequence[Split]) -> tuple[list[dict[int, Split]], Floats]:
    """(the steps that all ranks recorded, by rank; when each rank arrived in them, against their mean)."""
    by_step: dict[int, dict[int, Split]] = defaultdict(dict)
    for split in splits:
        by_step[split.index][split.rank] = split
    whole = sorted(index for index, own in by_step.items() if len(own) == trace.size)
    indices, arrived = _arrivals(trace, arm, whole)
    centred: Floats = arrived - arrived.mean(axis=1, keepdims=True) if indices else arrived
    return [by_step[index] for index in indices], centred


def lateness(trace: Trace, arm: Arm, splits: Sequence[Split]) -> Lateness | None:
    """Lateness of the ranks in the steps of an arm, `splits`; None for one rank, or without a common step.

    Long steps that are too few to support a claim are left out.
    """
    steps, arrived = _common(trace, arm, splits)
    if trace.size < 2 or not steps:
        return None
    since, groups, chance = _later(arrived, _by_host(trace, range(trace.size)))
    arrived, steps = arrived[since:], steps[since:]
    first = steps[0][0].index
    last = tuple(_columns(groups))
    evened = _evened(arrived, last)
    rare, left_out = _rare(evened, steps), 0
    if rare is not None and rare.count < DELAYED_STEPS_MIN:
        kept = ~_long(evened)
        left_out, rare = rare.count, None
        arrived, steps = arrived[kept], list(compress(steps, kept))
    usual = steps if rare is None else list(compress(steps, ~_long(evened)))
    persistent, jitter = _saved(arrived, last, rare, steps)
    longer = _longer(usual, last) if last else {}
    late_ns = dict(zip(last, _delays(arrived, last).tolist(), strict=True)) if last else {}
    long = [False] * len(steps) if rare is None else _long(evened).tolist()
    even = np.minimum(jitter, saved_by_even(trace, arm, steps, late_ns, long))
    return Lateness(
        len(steps),
        max(last, key=lambda rank: float(arrived[:, rank].mean()), default=None),
        chance,
        mean_of_steps(persistent),
        mean_of_steps(np.minimum(persistent, saved_by_punctual(trace, arm, steps, late_ns))),
        _mean(even),
        _mean(even if last else even + _inside(steps, last, jitter)),
        _mean(jitter + _inside(steps, last, jitter)),
        {phase: longer[phase] for phase in PHASES if last},
        longer.get(OWN, 0.0),
        last,
        _hosts(trace, groups),
        float(np.mean([split.step_ns for step in steps for split in step.values()])),
        rare,
        left_out,
        first if since else None,
    )
