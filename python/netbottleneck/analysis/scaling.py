"""Interval algebra over a trace: what of a step is compute, hidden and exposed communication, waiting, the rest.

Intervals are arrays of shape (n, 2), int64 ns, half-open; a "set" is such an array sorted and disjoint, as `union`
returns it. Intervals are united, never summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace.model import BARE, Collective, Step, Trace

Intervals = NDArray[np.int64]
T = TypeVar("T")

# A step that follows a change of transport pays for it: so many first steps of each block are not counted.
WARMUP_STEPS = 1


def intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """The set of what `pairs` cover; those that end before they begin cover nothing."""
    rows = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    rows = rows[rows[:, 1] > rows[:, 0]]
    if len(rows) < 2:
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate([[True], rows[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([rows[first, 0], reach[last]], axis=1)


def union(*sets: Intervals) -> Intervals:
    """What any of the sets covers."""
    return intervals(map(tuple, np.concatenate([np.empty((0, 2), np.int64), *sets]).tolist()))


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """What both sets cover."""
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    count = np.maximum(np.searchsorted(b[:, 0], a[:, 1], side="left") - low, 0)
    of_a = np.repeat(np.arange(len(a)), count)
    of_b = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    return np.stack([np.maximum(a[of_a, 0], b[of_b, 0]), np.minimum(a[of_a, 1], b[of_b, 1])], axis=1)


def subtraction(a: Intervals, b: Intervals) -> Intervals:
    """What `a` covers and `b` does not."""
    if len(a) == 0 or len(b) == 0:
        return a
    edges = np.concatenate([[min(a[0, 0], b[0, 0])], b.ravel(), [max(a[-1, 1], b[-1, 1])]]).reshape(-1, 2)
    return intersection(a, edges[edges[:, 1] > edges[:, 0]])


def total(a: Intervals) -> int:
    """Ns that a set covers."""
    return int((a[:, 1] - a[:, 0]).sum())


@dataclass(frozen=True, slots=True)
class Split:
    """One step of one rank. compute + exposed + wait + other = step; hidden is a part of compute.

    compute: union of forward, backward, optimizer, less what the training thread spent blocked. communication: union
    of operations from start to done; hidden: within compute; exposed: not. wait: neither computing nor communicating
    while an operation is submitted and not started. other: the rest; input_ns: of it, before the first forward.
    skew_ns: of exposed and wait, until the last rank submitted the same operation; late_ns: by the rank that was last.
    transfer_ns: union from the last rank's submission (or the start, if later) to done, of the step's operations;
    bus_bytes: their tensor bytes times 2(n-1)/n (all-reduce; the factors of nccl-tests for the others).
    """

    rank: int
    index: int
    block: int
    transport: str
    step_ns: int
    compute_ns: int
    communication_ns: int
    hidden_ns: int
    exposed_ns: int
    wait_ns: int
    other_ns: int
    input_ns: int
    skew_ns: int
    late_ns: Mapping[int, int]
    transfer_ns: int
    tensor_bytes: int
    bus_bytes: float
    wire_bytes: int | None
    operations: int


def bus_factor(kind: str, size: int) -> float:
    """What tensor bytes are multiplied with to get bytes on a link: nccl-tests, doc/PERFORMANCE.md."""
    if kind == "barrier" or size < 2:
        return 0.0
    return {"allreduce": 2.0, "allgather": 1.0, "reducescatter": 1.0}.get(kind, size / (size - 1)) * (size - 1) / size


def backward_intervals(step: Step) -> list[tuple[int, int]]:
    """From each forward's end to the last gradient that is ready before the next forward; one for each pass."""
    ready = [at for _, at in step.grad_ready]
    if not ready:
        return []
    forward = sorted(step.forward) or [(step.begin_ns, step.begin_ns)]
    limits = [begin for begin, _ in forward[1:]] + [step.end_ns]
    found = []
    for (_, end), limit in zip(forward, limits, strict=True):
        inside = [at for at in ready if end <= at <= limit]
        if inside:
            found.append((end, max(inside)))
    return found


def compute_intervals(step: Step) -> Intervals:
    """Forward, backward and optimizer of a step, less what the training thread spent blocked."""
    busy = intervals([*step.forward, *backward_intervals(step), *step.optimizer])
    return subtraction(busy, intervals((begin, end) for _, begin, end in step.waits))


def passes(step: Step) -> Intervals:
    """Forward and backward of a step, less what the training thread spent blocked: what can be held against others."""
    busy = intervals([*step.forward, *backward_intervals(step)])
    return subtraction(busy, intervals((begin, end) for _, begin, end in step.waits))


def is_split(step: Step) -> bool:
    """Whether the parts of a step are known; the untouched script's never are: it tells nothing of its operations."""
    return step.transport != BARE and bool(step.forward or step.grad_ready or step.optimizer)


def last_entries(trace: Trace) -> dict[tuple[str, int, int, int], tuple[int, int]]:
    """For each operation that all ranks submitted: when the last one did, and which rank that was."""
    entries: dict[tuple[str, int, int, int], dict[int, int]] = defaultdict(dict)
    for operation in trace.collectives:
        entries[operation.match][operation.rank] = operation.submit_ns
    return {
        match: max((at, rank) for rank, at in by_rank.items())
        for match, by_rank in entries.items()
        if len(by_rank) == trace.size
    }


def under_way(trace: Trace, transport: str) -> dict[int, Intervals]:
    """By rank: when an operation of a transport was under way that all ranks had submitted."""
    last = last_entries(trace)
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for operation in trace.collectives:
        if operation.transport == transport and operation.finished:
            begin_ns, end_ns = _span(operation)
            spans[operation.rank].append((max(begin_ns, last.get(operation.match, (0, 0))[0]), end_ns))
    return {rank: intervals(own) for rank, own in spans.items()}


class _Operations:
    """The finished operations of one rank, to be looked up by time."""

    def __init__(self, rows: Sequence[Collective]) -> None:
        self.rows = sorted((c for c in rows if c.finished), key=lambda c: (c.start_ns, c.submit_ns))
        self._submit = np.array([c.submit_ns for c in self.rows], np.int64)
        self._done = np.array([c.done_ns for c in self.rows], np.int64)

    def within(self, begin_ns: int, end_ns: int) -> list[Collective]:
        inside = (self._submit < end_ns) & (self._done > begin_ns)
        return [self.rows[i] for i in np.flatnonzero(inside)]


def _span(operation: Collective) -> tuple[int, int]:
    return operation.start_ns or 0, operation.done_ns or 0


Exposed = tuple[tuple[Collective, int], ...]


def _share_exposed(operations: Sequence[Collective], exposed: Intervals) -> Exposed:
    """Exposed ns of each operation: a moment belongs to the operation in flight that started first."""
    shares = []
    for operation in operations:
        own = intersection(exposed, intervals([_span(operation)]))
        if len(own):
            shares.append((operation, total(own)))
            exposed = subtraction(exposed, own)
    return tuple(shares)


def _late(
    operations: Sequence[Collective], last: Mapping[tuple[str, int, int, int], tuple[int, int]], idle: Intervals
) -> tuple[int, dict[int, int]]:
    """(ns of `idle` in which another rank had not submitted yet, the same by the rank that was last)."""
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for operation in operations:
        at, who = last.get(operation.match, (0, operation.rank))
        if who != operation.rank:
            spans[who].append((operation.submit_ns, at))
    by_rank = {who: intersection(intervals(pairs), idle) for who, pairs in spans.items()}
    return total(union(*by_rank.values())), {who: total(found) for who, found in by_rank.items() if len(found)}


def _split(
    step: Step, operations: _Operations, last: Mapping[tuple[str, int, int, int], tuple[int, int]], size: int
) -> tuple[Split, Exposed]:
    whole = intervals([(step.begin_ns, step.end_ns)])
    near = operations.within(step.begin_ns, step.end_ns)
    compute = intersection(compute_intervals(step), whole)
    communication = intersection(intervals(map(_span, near)), whole)
    exposed = subtraction(communication, compute)
    queued = intersection(intervals((c.submit_ns, c.start_ns or 0) for c in near), whole)
    wait = subtraction(subtraction(queued, compute), communication)
    skew_ns, late = _late(near, last, union(exposed, wait))
    own = [c for c in near if step.begin_ns <= c.submit_ns <= step.end_ns]
    wire = [c.wire_bytes for c in own if c.wire_bytes is not None]
    other_ns = total(whole) - total(compute) - total(exposed) - total(wait)
    begins = [begin for begin, _ in step.forward]
    before = intervals([(step.begin_ns, min(begins))]) if begins else whole[:0]
    split = Split(
        rank=step.rank,
        index=step.index,
        block=step.block,
        transport=step.transport,
        step_ns=total(whole),
        compute_ns=total(compute),
        communication_ns=total(communication),
        hidden_ns=total(intersection(communication, compute)),
        exposed_ns=total(exposed),
        wait_ns=total(wait),
        other_ns=other_ns,
        input_ns=total(subtraction(before, union(compute, communication, wait))),
        skew_ns=skew_ns,
        late_ns=late,
        transfer_ns=total(intervals((max(_span(c)[0], last.get(c.match, (0, 0))[0]), _span(c)[1]) for c in own)),
        tensor_bytes=sum(c.tensor_bytes for c in own),
        bus_bytes=sum(c.tensor_bytes * bus_factor(c.kind, size) for c in own),
        wire_bytes=sum(wire) if len(wire) == len(own) else None,
        operations=len(own),
    )
    return split, _share_exposed(near, exposed)


def counted(trace: Trace, warmup: int = WARMUP_STEPS) -> tuple[Step, ...]:
    """The steps without the first `warmup` of each block of each rank."""
    seen: dict[tuple[int, int, str], int] = defaultdict(int)
    kept = []
    for step in sorted(trace.steps, key=lambda s: (s.rank, s.begin_ns)):
        place = step.rank, step.block, step.transport
        seen[place] += 1
        if seen[place] > warmup:
            kept.append(step)
    return tuple(kept)


def split_steps(trace: Trace, warmup: int = WARMUP_STEPS) -> list[tuple[Step, Split, Exposed]]:
    """Each counted step, its parts, and the exposed ns of each of its operations.

    Steps of which only begin and end are known (the untouched script) are left out.
    """
    by_rank: dict[int, list[Collective]] = defaultdict(list)
    for operation in trace.collectives:
        by_rank[operation.rank].append(operation)
    operations = {rank: _Operations(rows) for rank, rows in by_rank.items()}
    nothing = _Operations([])
    last = last_entries(trace)
    return [
        (step, *_split(step, operations.get(step.rank, nothing), last, trace.size))
        for step in counted(trace, warmup)
        if is_split(step)
    ]


def typical(steps: Sequence[T], length_ns: Callable[[T], int]) -> tuple[T, ...]:
    """The middle half by length, so that means over it are near the median and the parts still add up."""
    if len(steps) < 4:
        return tuple(steps)
    lengths = [length_ns(s) for s in steps]
    low, high = np.percentile(lengths, [25, 75])
    return tuple(s for s, length in zip(steps, lengths, strict=True) if low <= length <= high)
