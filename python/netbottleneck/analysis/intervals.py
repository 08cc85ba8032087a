"""Interval algebra over a trace: the parts of a step, as a whole and by layer, and its bandwidth. Pure.

The parts are compute, hidden communication, exposed communication, waiting and the rest. Intervals are arrays of shape
(n, 2), int64 ns, half-open. A "set" is such an array sorted and disjoint, as `union` returns it. Overlapping intervals
are merged, never counted twice.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.bandwidth import bus_factor
from netbottleneck.analysis.thresholds import SILENT_PART, SMALL_BYTES, STEPS_MIN
from netbottleneck.trace.model import NOT_MATCHED, Collective, Parameter, Step, Trace
from netbottleneck.trace.transports import BARE, STOCK, Arm
from netbottleneck.units import listed

Intervals = NDArray[np.int64]
T = TypeVar("T")

# The set that covers no time.
NOTHING: Intervals = np.empty((0, 2), np.int64)
NOTHING.setflags(write=False)

# Number of steps dropped at the start of each block: the first steps pay for the change of transport.
WARMUP_STEPS = 1
ONE_STEP = "each block has one step, and the first step of a block is not counted (NETBOTTLENECK_BLOCK_STEPS)."
FIRST_STEP = "the first step of a block is not counted, and the record has no other step of a transport."


def intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """The set that `pairs` cover. Pairs with end <= begin are dropped."""
    rows = np.array([pair for pair in pairs if pair[1] > pair[0]], dtype=np.int64).reshape(-1, 2)
    if len(rows) < 2:
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    first = np.concatenate([[True], rows[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([rows[first, 0], reach[last]], axis=1)


def union(*sets: Intervals) -> Intervals:
    """The set covered by at least one argument."""
    some = [one for one in sets if len(one)]
    if len(some) < 2:
        return some[0] if some else NOTHING
    return intervals(map(tuple, np.concatenate(some).tolist()))


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """The set covered by both `a` and `b`."""
    if len(a) == 0 or len(b) == 0:
        return NOTHING
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    count = np.maximum(np.searchsorted(b[:, 0], a[:, 1], side="left") - low, 0)
    of_a = np.repeat(np.arange(len(a)), count)
    of_b = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    return np.stack([np.maximum(a[of_a, 0], b[of_b, 0]), np.minimum(a[of_a, 1], b[of_b, 1])], axis=1)


def subtraction(a: Intervals, b: Intervals) -> Intervals:
    """The set covered by `a` but not by `b`."""
    if len(a) == 0 or len(b) == 0:
        return a
    edges = np.concatenate([[min(a[0, 0], b[0, 0])], b.ravel(), [max(a[-1, 1], b[-1, 1])]]).reshape(-1, 2)
    return intersection(a, edges[edges[:, 1] > edges[:, 0]])


def total(a: Intervals) -> int:
    """Length of a set in ns."""
    return int((a[:, 1] - a[:, 0]).sum())


@dataclass(frozen=True, slots=True)
class Split:
    """One step of one rank. compute + exposed + wait + other = step; hidden is a part of compute.

    compute: union of forward, backward and optimizers, minus the time in which the training thread was blocked.
    communication: union of the operations from start to done. hidden: its part within compute; exposed: its part
    outside of compute, evaluation and checkpoints, of calls of the script as far as the training thread waits for them.
    wait: time without any of these while an operation is submitted but not started. other: the rest of the step.
    evaluation_ns, checkpoint_ns: parts of other, minus blocked time; input_ns: what else of other is before a forward,
    and not blocked: see before_forwards. optimizer_ns: the part of compute in optimizers. skew_ns: the part of exposed
    and wait before the last rank submitted the same operation; late_ns: skew_ns by the last rank. transfer_ns: union
    over the step's operations that travel, from the last rank's submission (or the start, if later) to done. bus_bytes:
    their tensor bytes times bus_factor; 0 if the size of one is not known, as for `unsized` of the operations.
    small_ns, small_bus_bytes, small_operations: of those of at most SMALL_BYTES.
    step_bus_bytes: the same with calls of the script that the arm did not move. own_ns: our own work between the step
    before and this one, which no step contains; 0 if that step was not recorded, or torch recorded the run.
    """

    rank: int
    index: int
    block: int
    arm: Arm
    step_ns: int
    compute_ns: int
    communication_ns: int
    hidden_ns: int
    exposed_ns: int
    wait_ns: int
    other_ns: int
    input_ns: int
    optimizer_ns: int
    evaluation_ns: int
    checkpoint_ns: int
    skew_ns: int
    late_ns: Mapping[int, int]
    transfer_ns: int
    tensor_bytes: int
    bus_bytes: float
    step_bus_bytes: float
    wire_bytes: int | None
    operations: int
    small_ns: int
    small_bus_bytes: float
    small_operations: int
    own_ns: int = 0
    unsized: int = 0

    def phases(self) -> dict[str, int]:
        """The parts without overlap: their sum is the step."""
        own = {
            "compute": self.compute_ns - self.optimizer_ns,
            "exposed": self.exposed_ns + self.wait_ns,
            "optimizer": self.optimizer_ns,
            "input": self.input_ns,
            "evaluation": self.evaluation_ns,
            "checkpoint": self.checkpoint_ns,
        }
        return {**own, "other": self.step_ns - sum(own.values())}


def missing_ranks(trace: Trace) -> tuple[int, ...]:
    """The ranks of a run that have no record."""
    return tuple(sorted(set(range(trace.size)) - {rank.rank for rank in trace.ranks}))


def _communicating(trace: Trace, arm: Arm) -> dict[int, set[int]]:
    """By rank: the steps of an arm in which it recorded a gradient of all ranks; all its steps if such are too few."""
    steps: dict[int, set[int]] = defaultdict(set)
    for step in trace.steps:
        if step.arm == arm:
            steps[step.rank].add(step.index)
    sending: dict[int, set[int]] = defaultdict(set)
    for one in trace.collectives:
        if one.arm == arm and one.step is not None and not one.by_script and one.ranks in (None, trace.size):
            sending[one.rank].add(one.step)
    found = {rank: own & sending[rank] for rank, own in steps.items()}
    return found if max(map(len, found.values()), default=0) >= STEPS_MIN else steps


def unheard(trace: Trace, arm: Arm) -> str:
    """The ranks that recorded too little of an arm to tell waiting for them from transfer, as text; "" if none.

    They have no record, or fewer than STEPS_MIN of its steps while others have as many. One step less than the others
    is none: the ranks of a run in progress are not at the same place.
    """
    missing = missing_ranks(trace)
    if missing:
        return f"no record of rank {listed(missing)}"
    steps = _communicating(trace, arm)
    most = max(map(len, steps.values()), default=0)
    short: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(trace.size if most >= STEPS_MIN else 0):
        own = steps.get(rank, set())
        if len(own) < min(STEPS_MIN, most - 1):
            short[len(own), max(own, default=0)].append(rank)
    return "; ".join(
        f"rank {listed(ranks)} recorded {count} of {most} steps of communication over {arm}"
        + (f", the last is step {last}" if count else "")
        for (count, last), ranks in short.items()
    )


def not_matched(trace: Trace) -> str:
    """The note that the ranks' operations are not matched: time in transfer is not known then. "" if there is none."""
    return next((note for note in trace.notes if NOT_MATCHED in note), "")


def host_count(trace: Trace) -> int | None:
    """Number of hosts of a run; None if a rank did not record its host."""
    hosts = {rank.host_id for rank in trace.ranks}
    return len(hosts) if len(trace.ranks) == trace.size and "" not in hosts else None


def backward_intervals(step: Step, operations: Sequence[Collective] = ()) -> list[tuple[int, int]]:
    """Backward passes, one for each forward: from its end to the last gradient ready before the next forward.

    operations: of the step's rank. A backward pass lasts at least until it has submitted its last one: FSDP2 copies
    gradients between the last one and its reduce-scatter.
    """
    ready = [at for _, at in step.grad_ready]
    if not ready:
        return []
    ready += [c.submit_ns for c in operations if c.phase == "backward"]
    forward = sorted(step.forward) or [(step.begin_ns, step.begin_ns)]
    limits = [begin for begin, _ in forward[1:]] + [step.end_ns]
    passes_ = []
    for (_, end), limit in zip(forward, limits, strict=True):
        inside = [at for at in ready if end <= at <= limit]
        if inside:
            passes_.append((end, max(inside)))
    return passes_


def before_forwards(step: Step, operations: Sequence[Collective] = ()) -> list[tuple[int, int]]:
    """From the step's begin to its first forward pass, and from each backward pass to the next forward pass.

    operations: as for backward_intervals. After a forward pass without gradients, the end of its work is not known.
    """
    ends = [step.begin_ns, *(end for _, end in backward_intervals(step, operations))]
    found, former = [], step.begin_ns - 1
    for begin, _ in sorted(step.forward):
        since = max((end for end in ends if end <= begin), default=begin)
        if since > former:
            found.append((since, begin))
        former = begin
    return found


def compute_intervals(step: Step, operations: Sequence[Collective] = ()) -> Intervals:
    """Forward, backward and optimizer of a step, minus the time in which the training thread was blocked.

    operations: as for backward_intervals.
    """
    busy = intervals([*step.forward, *backward_intervals(step, operations), *step.optimizer])
    return subtraction(busy, intervals((begin, end) for _, begin, end in step.waits))


def passes(step: Step) -> Intervals:
    """Forward and backward of a step, minus blocked time: the compute that is compared with arms without traffic."""
    busy = intervals([*step.forward, *backward_intervals(step)])
    return subtraction(busy, intervals((begin, end) for _, begin, end in step.waits))


def evaluation_intervals(step: Step) -> Intervals:
    """Evaluation of a step: from the first to the last of the passes without gradients between which nothing trains."""
    marks = sorted([begin for begin, _ in (*step.forward, *step.optimizer)] + [at for _, at in step.grad_ready])
    found: list[tuple[int, int]] = []
    for begin, end in sorted(step.evaluation):
        if found and bisect.bisect(marks, found[-1][1]) == bisect.bisect(marks, begin):
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return intervals(found)


def script_ns(step: Step) -> int:
    """Time of a step in which the script reads input, evaluates or writes a checkpoint, minus blocked time."""
    found = [*before_forwards(step), *evaluation_intervals(step).tolist(), *step.checkpoints]
    return total(subtraction(intervals(found), intervals((begin, end) for _, begin, end in step.waits)))


def is_split(step: Step) -> bool:
    """True if the parts of a step are known. Never true for the untouched script, which records no operations."""
    return step.arm != BARE and bool(step.forward or step.grad_ready or step.optimizer)


Match = tuple[Arm, int, int, int]  # see Collective.match
Entries = Mapping[Match, tuple[int, int]]  # see last_entries


def last_entries(trace: Trace) -> Entries:
    """For each operation that all ranks of its group submitted: (time of the last submission, rank that made it).

    Left out: the operations of groups that have the same key and are not the same group.
    """
    entries: dict[Match, dict[int, int]] = defaultdict(dict)
    sizes: dict[Match, set[int]] = defaultdict(set)
    for operation in trace.collectives:
        entries[operation.match][operation.rank] = operation.submit_ns
        sizes[operation.match].add(operation.ranks or trace.size)
    return {
        match: max((at, rank) for rank, at in by_rank.items())
        for match, by_rank in entries.items()
        if sizes[match] == {len(by_rank)}
    }


def in_flight_spans(trace: Trace, arm: Arm) -> dict[int, Intervals]:
    """By rank: the time in which an operation of `arm` was in flight after all ranks had submitted it."""
    last = last_entries(trace)
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for operation in trace.collectives:
        if operation.arm == arm and operation.finished:
            begin_ns, end_ns = _span(operation)
            spans[operation.rank].append((max(begin_ns, last.get(operation.match, (0, 0))[0]), end_ns))
    return {rank: intervals(own) for rank, own in spans.items()}


class _Operations:
    """The finished operations of one rank, searchable by time."""

    def __init__(self, rows: Sequence[Collective]) -> None:
        self.rows = sorted((c for c in rows if c.finished), key=lambda c: (c.start_ns, c.submit_ns))
        self._submit = np.array([c.submit_ns for c in self.rows], np.int64)
        self._done = np.array([c.done_ns for c in self.rows], np.int64)

    def within(self, begin_ns: int, end_ns: int) -> list[Collective]:
        inside = (self._submit < end_ns) & (self._done > begin_ns)
        return [self.rows[i] for i in np.flatnonzero(inside)]


def _span(operation: Collective) -> tuple[int, int]:
    return operation.start_ns or 0, operation.done_ns or 0


Spans = list[tuple[int, int]]
Exposed = tuple[tuple[Collective, int], ...]


def _share_exposed(operations: Iterable[tuple[Collective, Spans]], exposed: Intervals) -> Exposed:
    """Exposed ns of each operation, of what it adds. Where several add, it is that of the one that started first."""
    shares = []
    for operation, spans in operations:
        own = intersection(exposed, intervals(spans))
        if len(own):
            shares.append((operation, total(own)))
            exposed = subtraction(exposed, own)
    return tuple(shares)


NETWORK = -1  # in place of a rank
Held = Mapping[int, Mapping[int, Intervals]]


def _held(trace: Trace, last: Entries) -> Held:
    """By rank and what holds it: when its training thread waits for a call of the script.

    Until the last rank of the call submits it, that rank holds the others. Then the network does. Who is held may come
    late to other operations for that: the root of a broadcast is done with it first, and waits there.
    """
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for step in trace.steps:
        for key, begin, end in step.waits if not trace.recorder else ():
            waits[step.rank, key].append((begin, end))
    spans: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for call in trace.collectives:
        if call.by_script and call.finished and call.match in last:
            at, last_rank = last[call.match]
            for begin, end in waits.get((call.rank, call.key), ()):
                spans[call.rank][last_rank].append((max(begin, call.submit_ns), min(end, at)))
                spans[call.rank][NETWORK].append((max(begin, at), min(end, call.done_ns or 0)))
    return {rank: {holder: intervals(own) for holder, own in of.items()} for rank, of in spans.items()}


def _total_within(a: Intervals, begin_ns: int, end_ns: int) -> int:
    """Ns of a set in a window."""
    near = a[np.searchsorted(a[:, 1], begin_ns) : np.searchsorted(a[:, 0], end_ns)]
    return int(np.maximum(np.minimum(near[:, 1], end_ns) - np.maximum(near[:, 0], begin_ns), 0).sum())


def _cut(a: Intervals, ns: int) -> tuple[Intervals, Intervals]:
    """The first `ns` of a set, and the rest."""
    before = np.concatenate([[0], np.cumsum(a[:, 1] - a[:, 0])[:-1]]) if len(a) else np.empty(0, np.int64)
    at = a[:, 0] + np.clip(ns - before, 0, a[:, 1] - a[:, 0])
    return intervals(zip(a[:, 0], at, strict=True)), intervals(zip(at, a[:, 1], strict=True))


def _late(
    step: Step, operations: Sequence[Collective], entered: tuple[Entries, Held], idle: Intervals
) -> tuple[int, dict[int, int]]:
    """(ns of `idle` before the last rank submitted the same operation, these ns by the rank that was last).

    As long as that rank was held before in the step, more than this one, it is the rank that held it, and none where
    the network did.
    """
    last, held = entered
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for operation in operations:
        at, last_rank = last.get(operation.match, (0, operation.rank))
        if last_rank != operation.rank:
            spans[last_rank].append((operation.submit_ns, at))
    by_rank: dict[int, Intervals] = {}
    mine = held.get(step.rank, {})
    for last_rank, pairs in spans.items():
        found = intersection(intervals(pairs), idle)
        for holder, when in held.get(last_rank, {}).items():
            if len(found) and holder != step.rank:
                window = step.begin_ns, int(found[-1, 1])
                longer = _total_within(when, *window) - _total_within(mine.get(holder, NOTHING), *window)
                part, found = _cut(found, max(0, longer))
                if holder != NETWORK:
                    by_rank[holder] = union(by_rank.get(holder, NOTHING), part)
        by_rank[last_rank] = union(by_rank.get(last_rank, NOTHING), found)
    return total(union(*by_rank.values())), {
        last_rank: total(found) for last_rank, found in by_rank.items() if len(found)
    }


def _work(step: Step, operations: Sequence[Collective], whole: Intervals) -> tuple[Intervals, Intervals, Intervals]:
    """What the training thread did in a step, without overlap: compute, evaluation, checkpoints."""
    compute = intersection(compute_intervals(step, operations), whole)
    blocked = union(compute, intervals((begin, end) for _, begin, end in step.waits))
    evaluation = subtraction(intersection(evaluation_intervals(step), whole), blocked)
    return (
        compute,
        evaluation,
        subtraction(intersection(intervals(step.checkpoints), whole), union(blocked, evaluation)),
    )


def _awaited(trace: Trace) -> dict[int, frozenset[int]] | None:
    """By rank: the keys of the operations for which the training thread waits; None if its waits are not recorded."""
    if trace.recorder:
        return None
    keys: dict[int, set[int]] = defaultdict(set)
    for step in trace.steps:
        keys[step.rank].update(key for key, _, _ in step.waits)
    return {rank: frozenset(own) for rank, own in keys.items()}


class _Felt:
    """What an operation can add to a step: all its time, or of a call of the script, the waits for it.

    awaited: the keys of the rank in _awaited; None: all time of all operations. DDP itself waits, unseen, for what a
    communication hook sends: a call in a backward pass with a key that is not in `awaited` adds all its time.
    """

    def __init__(self, step: Step, awaited: frozenset[int] | None) -> None:
        self._awaited = awaited
        self._waits: dict[int, Spans] = defaultdict(list)
        for key, begin, end in step.waits:
            self._waits[key].append((begin, end))

    def running(self, operations: Iterable[Collective]) -> list[tuple[Collective, Spans]]:
        """What each operation can add from its start to its end."""
        return [(one, self._of(one, *_span(one))) for one in operations]

    def queued(self, operations: Iterable[Collective]) -> Intervals:
        """What operations can add before they start."""
        return intervals(span for one in operations for span in self._of(one, one.submit_ns, one.start_ns or 0))

    def _of(self, operation: Collective, begin_ns: int, end_ns: int) -> Spans:
        unseen = self._awaited is None or (operation.phase == "backward" and operation.key not in self._awaited)
        if unseen or not operation.by_script:
            return [(begin_ns, end_ns)]
        waits = (*self._waits.get(operation.key, ()), *self._waits.get(0, ()))
        return [(max(begin, begin_ns), min(end, end_ns)) for begin, end in waits if begin < end_ns and end > begin_ns]


def moving_span(operation: Collective, last: Entries) -> tuple[int, int]:
    """When an operation moves data: from the last rank's submission, or the start if later, to done."""
    begin_ns, done_ns = _span(operation)
    return max(begin_ns, last.get(operation.match, (0, 0))[0]), done_ns


def _transfer(step: Step, operation: Collective, last: Entries) -> tuple[int, int]:
    """When an operation moves data.

    A gradient is there before the step ends, though a callback may stamp its end after a pause of the process.
    """
    begin_ns, done_ns = moving_span(operation, last)
    return begin_ns, done_ns if operation.by_script else min(done_ns, step.end_ns)


def groups(trace: Trace) -> dict[Match, set[int]]:
    """The ranks of each operation of a group of some of the ranks, where all of the group recorded it."""
    members: dict[Match, set[int]] = defaultdict(set)
    sizes: dict[Match, int] = {}
    for operation in trace.collectives:
        if operation.ranks is not None and operation.ranks < trace.size:
            members[operation.match].add(operation.rank)
            sizes[operation.match] = operation.ranks
    return {match: ranks for match, ranks in members.items() if len(ranks) == sizes[match]}


def within_hosts(trace: Trace) -> frozenset[Match]:
    """The operations of groups whose ranks share a host, in a run of several hosts: no link between hosts has them."""
    if (host_count(trace) or 0) < 2:
        return frozenset()
    host_of = {rank.rank: rank.host_id for rank in trace.ranks}
    return frozenset(match for match, ranks in groups(trace).items() if len({host_of[rank] for rank in ranks}) == 1)


class _Travel:
    """Which operations of a run travel over its network, and with how many bytes."""

    def __init__(self, trace: Trace) -> None:
        self._size, self._hosts, self._within = trace.size, host_count(trace), within_hosts(trace)

    def moved(self, step: Step, operations: Iterable[Collective]) -> list[Collective]:
        """The operations whose bytes the step's arm moved: the script's own calls travel over its process group.

        Without receives, which are counted by their sender, and in which a rank may wait for it.
        """
        stock = step.arm.transport == STOCK.transport
        own = (c for c in operations if c.known_bytes > 0 and (stock or not c.by_script))
        return [c for c in own if c.kind != "recv" and c.match not in self._within]

    def bus_bytes(self, operations: Iterable[Collective]) -> float:
        """The bytes of operations on a link."""
        return sum(map(self._bus_bytes, operations))

    def _bus_bytes(self, one: Collective) -> float:
        if one.match in self._within:
            return 0.0
        return one.known_bytes * bus_factor(one.kind, one.ranks or self._size, one.algorithm, self._hosts)


def _split(
    step: Step,
    operations: _Operations,
    entered: tuple[Entries, Held],
    travel: _Travel,
    awaited: frozenset[int] | None,
) -> tuple[Split, Exposed]:
    """entered: last_entries, and when ranks are _held."""
    whole = intervals([(step.begin_ns, step.end_ns)])
    near = operations.within(step.begin_ns, step.end_ns)
    compute, evaluation, saving = _work(step, near, whole)
    communication = intersection(intervals(map(_span, near)), whole)
    busy = union(compute, evaluation, saving)
    felt = _Felt(step, awaited)
    running = felt.running(near)
    moving = intersection(intervals(chain.from_iterable(spans for _, spans in running)), whole)
    exposed = subtraction(moving, busy)
    wait = subtraction(subtraction(intersection(felt.queued(near), whole), busy), moving)
    skew_ns, late = _late(step, near, entered, union(exposed, wait))
    own = [c for c in near if step.begin_ns <= c.submit_ns <= step.end_ns]
    moved, unsized = travel.moved(step, own), sum(c.tensor_bytes is None for c in own)
    small = [c for c in moved if c.known_bytes <= SMALL_BYTES]

    def transfer_ns(of: Iterable[Collective]) -> int:
        return total(intervals(_transfer(step, c, entered[0]) for c in of))

    wire = [c.wire_bytes for c in moved if c.wire_bytes is not None]
    other_ns = total(whole) - total(compute) - total(exposed) - total(wait)
    used = union(busy, exposed, wait, intervals((begin, end) for _, begin, end in step.waits))
    split = Split(
        rank=step.rank,
        index=step.index,
        block=step.block,
        arm=step.arm,
        step_ns=total(whole),
        compute_ns=total(compute),
        communication_ns=total(communication),
        hidden_ns=total(intersection(communication, compute)),
        exposed_ns=total(exposed),
        wait_ns=total(wait),
        other_ns=other_ns,
        input_ns=total(subtraction(intersection(intervals(before_forwards(step, near)), whole), used)),
        optimizer_ns=total(intersection(intervals(step.optimizer), compute)),
        evaluation_ns=total(evaluation),
        checkpoint_ns=total(saving),
        skew_ns=skew_ns,
        late_ns=late,
        transfer_ns=transfer_ns(moved),
        tensor_bytes=sum(c.known_bytes for c in moved),
        bus_bytes=0.0 if unsized else travel.bus_bytes(moved),
        step_bus_bytes=0.0 if unsized else travel.bus_bytes(own),
        wire_bytes=sum(wire) if len(wire) == len(moved) else None,
        operations=len(own),
        small_ns=transfer_ns(small),
        small_bus_bytes=travel.bus_bytes(small),
        small_operations=len(small),
        unsized=unsized,
    )
    return split, _share_exposed(running, exposed)


def counted(trace: Trace, warmup: int = WARMUP_STEPS) -> tuple[Step, ...]:
    """The steps without the first `warmup` steps of each block of each rank, and without those with a probe."""
    seen: dict[tuple[int, int, Arm], int] = defaultdict(int)
    found = []
    for step in sorted(trace.steps, key=lambda s: (s.rank, s.begin_ns)):
        place = step.rank, step.block, step.arm
        seen[place] += 1
        if seen[place] > warmup and not step.probed:
            found.append(step)
    return tuple(found)


def uncounted(trace: Trace) -> str:
    """Why no step of a transport counts, ONE_STEP or FIRST_STEP; "" if one does, or if none was recorded."""
    steps = counted(trace)
    if any(step.arm.real for step in steps) or not any(step.arm.real for step in trace.steps):
        return ""
    return ONE_STEP if not steps and len({step.block for step in trace.steps}) > 1 else FIRST_STEP


def split_steps(trace: Trace, warmup: int = WARMUP_STEPS) -> list[tuple[Step, Split, Exposed]]:
    """Each counted step, its parts, and the exposed ns of each of its operations.

    Steps of the untouched script are left out: only their begin and end are known.
    """
    by_rank: dict[int, list[Collective]] = defaultdict(list)
    for operation in trace.collectives:
        by_rank[operation.rank].append(operation)
    operations = {rank: _Operations(rows) for rank, rows in by_rank.items()}
    nothing = _Operations([])
    last, travel = last_entries(trace), _Travel(trace)
    entered = last, _held(trace, last)
    ends = {(step.rank, step.index): step.end_ns for step in trace.steps}
    awaited = _awaited(trace)
    found = []
    for step in filter(is_split, counted(trace, warmup)):
        near = operations.get(step.rank, nothing)
        split, exposed = _split(step, near, entered, travel, None if awaited is None else awaited[step.rank])
        before_ns = ends.get((step.rank, step.index - 1), step.begin_ns)
        own_ns = 0 if trace.recorder else max(0, step.begin_ns - before_ns)
        found.append((step, replace(split, own_ns=own_ns), exposed))
    return found


def middle_half(lengths: NDArray[np.float64]) -> NDArray[np.bool_]:
    """True for the steps of the middle half by length; for all of fewer than 4 steps."""
    if len(lengths) < 4:
        return np.ones(len(lengths), np.bool_)
    low, high = np.percentile(lengths, [25, 75])
    usual: NDArray[np.bool_] = (low <= lengths) & (lengths <= high)
    return usual


def are_mixed(silent: int, steps: int) -> bool:
    """True if so many steps have no operation, and others have some, that the middle of all stands for neither."""
    return SILENT_PART * steps < silent < steps


def typical_lengths(splits: Iterable[Split]) -> dict[tuple[Arm, int, int], float]:
    """The mean length of each step over its ranks, by which the middle half is chosen.

    0 for all steps if they `are_mixed`, so that all count. Averaging of parameters in every tenth step is such a case.
    """
    own: dict[tuple[Arm, int, int], list[Split]] = defaultdict(list)
    for split in splits:
        own[split.arm, split.block, split.index].append(split)
    equal = are_mixed(sum(not any(split.operations for split in ranks) for ranks in own.values()), len(own))
    return {step: 0.0 if equal else sum(s.step_ns for s in ranks) / len(ranks) for step, ranks in own.items()}


def typical(rows: Sequence[T], split_of: Callable[[T], Split]) -> tuple[T, ...]:
    """The rows of the middle half of the steps by `typical_lengths`; all rows of fewer than 4 steps.

    A step has all of its ranks, so every rank counts alike: of two ranks in a step, often only one waits. Means over
    these rows are near the median, and the parts still add up.
    """
    lengths = typical_lengths(map(split_of, rows))
    usual = middle_half(np.fromiter(lengths.values(), np.float64))
    chosen = {step for step, is_usual in zip(lengths, usual, strict=True) if is_usual}
    return tuple(
        row for row, one in zip(rows, map(split_of, rows), strict=True) if (one.arm, one.block, one.index) in chosen
    )


# Steps and exposed communication by layer.
#
# A layer's backward runs from the previous gradient-ready to its own. An operation's exposed time is attributed to its
# tensors in proportion to their bytes. This is an attribution, not a measurement.

# Layer name for gradients of an unknown layer. The script's own calls have a row for each phase of the step.
NO_LAYER = "(no layer)"


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that owns parameters; means over steps and ranks. forward_ns: sampled steps only, else None."""

    name: str
    parameters: int
    bytes: int
    buckets: tuple[int, ...]
    forward_ns: float | None
    backward_ns: float
    exposed_ns: float


def layer_of(parameter: str) -> str:
    """Module name of a parameter: its name without the last component."""
    return parameter.rpartition(".")[0] or parameter


def backward_spans(step: Step) -> list[tuple[int, int, int]]:
    """(parameter index, begin, end) of each gradient-ready, from the previous one. Together they are the backward."""
    ready = sorted((at, index) for index, at in step.grad_ready)
    found = []
    for begin, end in backward_intervals(step):
        previous = begin
        for at, index in ready[bisect.bisect_left(ready, (begin, -1)) :]:
            if at > end:
                break
            found.append((index, previous, at))
            previous = at
    return found


def backward_times(step: Step) -> list[tuple[int, int]]:
    """(parameter index, ns) of each gradient-ready: its span minus the blocked time in it."""
    waits = intervals((begin, end) for _, begin, end in step.waits)
    return [
        (index, total(subtraction(intervals([(begin, end)]), waits)) if len(waits) else end - begin)
        for index, begin, end in backward_spans(step)
    ]


def _apart(operation: Collective) -> str:
    """Row of an operation without a layer: the phase of the step in which the script calls it."""
    if not operation.by_script:
        return NO_LAYER
    return "(other calls)" if operation.phase == "other" else f"(calls in {operation.phase})"


def _by_layer(trace: Trace, names: Sequence[str], operation: Collective) -> list[tuple[str, float]]:
    """(layer, its part) of an operation."""
    known = operation.bucket is not None and 0 <= operation.bucket < len(trace.buckets)
    members = trace.buckets[operation.bucket or 0].parameters if known else ()
    own = [(names[p], trace.parameters[p].bytes) for p in members if 0 <= p < len(names)]
    weight = sum(nbytes for _, nbytes in own)
    return [(name, nbytes / weight) for name, nbytes in own] if weight else [(_apart(operation), 1.0)]


def _exposed_by_layer(trace: Trace, names: Sequence[str], shares: Exposed) -> dict[str, float]:
    """Exposed ns by layer. names: the layer of each parameter."""
    found: dict[str, float] = defaultdict(float)
    for operation, ns in shares:
        for name, part in _by_layer(trace, names, operation):
            found[name] += part * ns
    return found


def _forward_times(trace: Trace, sampled: Iterable[Step]) -> dict[str, list[int]]:
    """Forward durations in ns, by module."""
    found: dict[str, list[int]] = defaultdict(list)
    for step in sampled:
        for index, begin, end in step.modules:
            if 0 <= index < len(trace.modules):
                found[trace.modules[index]].append(end - begin)
    return found


def device_error_ns(trace: Trace) -> int | None:
    """Largest error of the times of the ranks' GPUs, on their hosts' clocks; None: the times are those of the hosts."""
    return max((rank.device_error_ns for rank in trace.ranks if rank.device_error_ns is not None), default=None)


def _buckets(parameters: Iterable[Parameter]) -> tuple[int, ...]:
    return tuple(sorted({p.bucket for p in parameters if p.bucket is not None}))


def _sampled(steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if step.sampled]


def _backward_times(known: Mapping[int, str], steps: Sequence[Step]) -> dict[str, float]:
    """Mean backward durations in ns, by module. known: module of each parameter."""
    found: dict[str, float] = defaultdict(float)
    for step in steps:
        for index, ns in backward_times(step):
            found[known.get(index, NO_LAYER)] += ns
    for name in found:
        found[name] /= len(steps)
    return found


def layers(trace: Trace, steps: Iterable[tuple[Step, Exposed]], sampled: Iterable[Step]) -> tuple[Layer, ...]:
    """The layers in the order of their parameters: means over `steps`. Their exposed ns add up to the mean step's.

    Forward times are means over `sampled`, the steps in which module hooks took time stamps. On a GPU, so are backward
    times: other steps have one time for each bucket. Operations without a layer form the last rows if they have exposed
    or backward time.
    """
    names = [layer_of(p.name) for p in trace.parameters]
    known = dict(enumerate(names))
    chosen, sampled = list(steps), list(sampled)
    exposed = _exposed_by_layer(trace, names, tuple(share for _, shares in chosen for share in shares))
    forward = _forward_times(trace, sampled)
    on_device = device_error_ns(trace) is not None
    backward = _backward_times(known, _sampled(sampled) if on_device else [step for step, _ in chosen])
    apart = sorted(name for name in {*exposed, *backward} - {*names} if exposed[name] or backward[name])
    order = dict.fromkeys([*names, *apart])
    members = {name: [p for p, own in zip(trace.parameters, names, strict=True) if own == name] for name in order}
    return tuple(
        Layer(
            name=name,
            parameters=len(own),
            bytes=sum(p.bytes for p in own),
            buckets=_buckets(own),
            forward_ns=float(np.mean(forward[name])) if name in forward else None,
            backward_ns=backward[name],
            exposed_ns=exposed[name] / max(len(chosen), 1),
        )
        for name, own in members.items()
    )
