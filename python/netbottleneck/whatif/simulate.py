"""Simulation of a trace: the recorded compute, with communication by another plan and cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck import _core
from netbottleneck.analysis.intervals import Intervals, counted, in_flight_spans, intersection, intervals, subtraction
from netbottleneck.trace.model import Bucket, Collective, Network, Rank, Step, Trace
from netbottleneck.trace.transports import BARE, NULL, SINGLE, Arm
from netbottleneck.whatif.cost import ALGORITHMS, Cost, Table
from netbottleneck.whatif.plan import RULES, Plan, travelling_bytes

# Workload of a run: each recorded step as a list of items for csrc/sim/sim.h, without the waits.

# Item codes of csrc/sim/sim.h. FORWARD and below are marks, which the engine only passes on.
WAIT, END, BACKWARD, FORWARD, OPTIMIZER, OPTIMIZED = -1, -2, -3, -4, -5, -6
# NB_SIM_NS_MAX: the engine refuses a longer item, such as an evaluation or a pause within a step.
WORK_NS_MAX = 10**12


@dataclass(frozen=True, slots=True)
class Draw:
    """One recorded step of one rank as items: `work_ns` of compute, followed by the event in `codes`.

    compute_ns: all work before the wait. order: tensors by readiness.
    """

    work_ns: NDArray[np.int64]
    codes: NDArray[np.int32]
    compute_ns: int

    @property
    def order(self) -> list[int]:
        return [int(code) for code in self.codes if code >= 0]


@dataclass(frozen=True, slots=True)
class Workload:
    """The compute of a run. steps: by index, each rank's draw; only steps that all ranks recorded.

    travels: see travelling_bytes.
    """

    trace: Trace
    transport: Arm
    steps: tuple[Mapping[int, Draw], ...]
    travels: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.steps[0]))

    @property
    def draws(self) -> list[Draw]:
        """All steps of all ranks, step by step."""
        return [draws[rank] for draws in self.steps for rank in sorted(draws)]


def _gap(step: Step, ready_ns: int) -> tuple[int, int]:
    """Unrecorded wait of the untouched script: from its last gradient to its update."""
    begins = [begin for begin, _ in step.optimizer if begin >= ready_ns]
    return (ready_ns, min(begins)) if step.arm == BARE and begins else (ready_ns, ready_ns)


def _waits(step: Step, kept: Collection[int]) -> list[tuple[int, int]]:
    """Waits for gradients. Those for other operations, whose keys are `kept`, count as compute."""
    return [(begin, end) for key, begin, end in step.waits if key not in kept]


def _wait_begin(step: Step, ready_ns: int, kept: Collection[int]) -> int:
    """Time at which the rank began to wait for operations: after its last gradient, before its update."""
    if step.arm == BARE:
        return ready_ns
    waits = [max(begin, ready_ns) for begin, end in _waits(step, kept) if end > ready_ns]
    after = [begin for begin, _ in step.optimizer if begin >= ready_ns]
    return min([*waits, *after], default=ready_ns)


def _marks(step: Step, ready_ns: int, wait_ns: int) -> list[tuple[int, int, int]]:
    passes = [(begin, end) for begin, end in step.forward if end <= ready_ns]
    rows = [(begin, 0, FORWARD) for begin, _ in passes[:1]]
    rows.append((max((end for _, end in passes), default=step.begin_ns), 1, BACKWARD))
    for begin, end in [(begin, end) for begin, end in step.optimizer if begin >= wait_ns][:1]:
        # Clamp the stamps to the step and keep their order: a step has all its marks or none.
        begin_ns, end_ns = min(begin, step.end_ns), min(max(begin, end), step.end_ns)
        rows += [(begin_ns, 5, OPTIMIZER), (end_ns, 6, OPTIMIZED)]
    return rows


def _items(step: Step, tensors: int, kept: Collection[int]) -> list[tuple[int, int, int]]:
    """(time, tie-break order, code), sorted. A gradient that never became ready is still sent."""
    ready = sorted(((at, index) for index, at in step.grad_ready), key=lambda row: row[0])
    last = {index: min(max(at, step.begin_ns), step.end_ns) for at, index in ready if index < tensors}
    ready_ns = max(last.values(), default=step.begin_ns)
    wait_ns = _wait_begin(step, ready_ns, kept)
    rows = [(last[index], 2, index) for index in sorted(last, key=last.__getitem__)]
    rows += [(wait_ns, 3, index) for index in range(tensors) if index not in last]
    rows += [(wait_ns, 4, WAIT), (step.end_ns, 7, END), *_marks(step, ready_ns, wait_ns)]
    return sorted(rows, key=lambda row: row[:2])


def _covered(at: NDArray[np.int64], spans: Intervals) -> NDArray[np.int64]:
    """Length of the part of a set that lies before each time."""
    covered: NDArray[np.int64] = (np.clip(at[:, None], spans[:, 0], spans[:, 1]) - spans[:, 0]).sum(axis=1)
    return covered


def draw(
    step: Step,
    tensors: int,
    in_flight: Intervals | None = None,
    contention: float = 1.0,
    kept: Collection[int] = (),
) -> Draw:
    """Return a recorded step of a model with `tensors` tensors as items.

    kept: keys of the script's own operations: the plan does not send them, so their waits stay as recorded.
    in_flight: spans with an operation in flight. Compute took `contention` times as long in them; this is subtracted.
    """
    items = _items(step, tensors, kept)
    at = np.array([at for at, _, _ in items], np.int64)
    codes = np.array([code for _, _, code in items], np.int32)
    ready_ns = max((at for at, _, code in items if code >= 0), default=step.begin_ns)
    blocked = intervals([*_waits(step, kept), _gap(step, ready_ns)])
    since = np.full(1, step.begin_ns)
    less = _covered(at, blocked) - _covered(since, blocked)
    if in_flight is not None and len(in_flight) and contention > 1:
        still = intervals([*((begin, end) for _, begin, end in step.waits), _gap(step, ready_ns)])
        slowed = subtraction(intersection(in_flight, intervals([(step.begin_ns, step.end_ns)])), still)
        lost = 1 - 1 / contention
        less = less + np.rint(lost * (_covered(at, slowed) - _covered(since, slowed))).astype(np.int64)
    work = np.maximum(np.diff(at - less, prepend=step.begin_ns), 0)
    waiting = int(np.flatnonzero(codes == WAIT)[0])
    return Draw(work, codes, int(work[: waiting + 1].sum()))


def _transport(trace: Trace, transport: Arm | None) -> Arm:
    recorded = {step.arm for step in trace.steps if step.grad_ready}
    arms = [*(arm for arm in trace.arms if arm.real), SINGLE, NULL, BARE]
    wanted = arms if transport is None else [Arm.parse(transport)]
    found = [arm for arm in wanted if arm in recorded]
    if not found:
        raise ValueError(
            f"the trace does not record when gradients were ready{f' over {transport}' if transport else ''}"
        )
    return found[0]


def _script_keys(trace: Trace) -> set[int]:
    """Keys of the script's own operations."""
    return {one.key for one in trace.collectives if one.by_script}


def _simulated(steps: Sequence[Mapping[int, Draw]]) -> tuple[Mapping[int, Draw], ...]:
    """The steps without items that are too long for the engine; all of them if each has one."""
    usual = [draws for draws in steps if max(draw.work_ns.max() for draw in draws.values()) <= WORK_NS_MAX]
    return tuple(usual or steps)


def workload(trace: Trace, transport: Arm | None = None, contention: float = 1.0) -> Workload:
    """Return the compute of a run's ranks, from the steps of one transport without the first of each block.

    contention: the factor by which compute was longer while operations were in flight; it is taken out. transport:
    None: the first that recorded gradient readiness. Steps with an item that is too long for the engine are left out if
    there are others. Raises ValueError if no arm recorded readiness, if no step was recorded by all participating
    ranks, or if the tensors are not described.
    """
    name = _transport(trace, transport)
    if not trace.parameters:
        raise ValueError("the trace does not describe its tensors")
    recorded = [step for step in trace.steps if step.arm == name and step.grad_ready]
    counted_steps = {(step.rank, step.index) for step in counted(trace)}
    rows = [step for step in recorded if (step.rank, step.index) in counted_steps] or recorded
    flights = in_flight_spans(trace, name) if contention > 1 else {}
    kept = _script_keys(trace)
    by_index: dict[int, dict[int, Draw]] = defaultdict(dict)
    for step in rows:
        by_index[step.index][step.rank] = draw(step, len(trace.parameters), flights.get(step.rank), contention, kept)
    ranks = {step.rank for step in rows}
    whole = tuple(draws for _, draws in sorted(by_index.items()) if set(draws) == ranks)
    if not whole:
        raise ValueError(f"no step over {name} was recorded by all ranks")
    return Workload(trace, name, _simulated(whole), travelling_bytes(trace, name))


# The simulation.

# Up to this many recorded ranks are simulated one by one. With more: one typical rank, and the last of the others.
RANKS_MAX = 32
CONTENTION_ONE = 10_000
OP_FIELDS = 8
# Fields of an operation, as in csrc/sim/sim.h.
STEP, BUCKET, MEMBERS, BYTES, WIRE_BYTES, AGREED, START, DONE = range(OP_FIELDS)

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Run:
    """Input and output of the engine. Stream s has the items starts[s] to starts[s + 1]."""

    starts: Ints
    codes: NDArray[np.int32]
    reached: Ints
    passed: Ints
    ops: Ints
    op_of: NDArray[np.int32]
    submit: Ints


def _last_of(draws: Sequence[Draw], others: int, at: float) -> Draw:
    """The last of `others` ranks that draw recorded steps at random: the order statistic at quantile at^(1/n)."""
    slow = sorted(draws, key=lambda draw: draw.compute_ns)
    return slow[min(len(slow) - 1, int(at ** (1.0 / others) * len(slow)))]


def _all_recorded(load: Workload, workers: int) -> bool:
    """True if all ranks were recorded and are few enough to simulate one by one."""
    return len(load.ranks) == workers == load.trace.size and workers <= RANKS_MAX


def _streams(load: Workload, workers: int, steps: int) -> list[list[Draw]]:
    """The draws of each simulated rank, by step: the recorded ranks, or a typical one and the last of all others."""
    recorded = len(load.steps)
    ranks = load.ranks
    if _all_recorded(load, workers):
        return [[load.steps[k % recorded][rank] for k in range(steps)] for rank in ranks]
    shift = math.lcm(recorded, len(ranks))  # after so many, the pairs of a step and a rank recur
    own = [load.steps[k % recorded][ranks[(k + k // shift) % len(ranks)]] for k in range(steps)]
    draws = load.draws
    if workers == 1 or len(draws) == 1:
        return [own]
    # Low-discrepancy points in (0, 1), so that any number of steps has early and late ones.
    quantiles = [((k * 0.6180339887498949 + 0.5) % 1.0) for k in range(steps)]
    last = [_last_of(draws, workers - 1, at) for at in quantiles]
    return [own, last]


def _cost_arrays(cost: Cost, workers: int) -> tuple[int, int, int, int, int, Any, Any, Any]:
    table = cost.add if isinstance(cost.add, Table) else Table((0.0,), (0.0,))
    is_table = isinstance(cost.add, Table)
    flags = cost.pipelined | cost.whole_sums << 1 | (table.clamped and is_table) << 2
    numbers = np.array(
        [
            cost.alpha_ns,
            cost.host_alpha_ns,
            cost.link.byte_ns,
            0.0 if cost.host_bps is None else 8e9 / cost.host_bps,
            cost.add if not isinstance(cost.add, Table) else 0.0,
            cost.copy_byte_ns,
            cost.launch_ns,
            cost.ratio,
            cost.encode_byte_ns,
            cost.decode_byte_ns,
            cost.fixed_ns,
        ]
    )
    points = np.array([table.bytes, table.ns], np.float64)[:, : len(table.bytes) * is_table]
    inside = min(cost.ranks_per_host, workers)
    contention = round(cost.contention * CONTENTION_ONE)
    algorithm = ALGORITHMS.index(cost.algorithm)
    return algorithm, workers, inside, contention, flags, numbers, points[0].copy(), points[1].copy()


def _run(load: Workload, plan: Plan, cost: Cost, workers: int, steps: int, chosen: Sequence[Sequence[int]]) -> _Run:
    streams = _streams(load, workers, steps)
    parts = [draw for stream in streams for draw in stream]
    lengths = np.array([sum(len(draw.codes) for draw in stream) for stream in streams], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    works = np.concatenate([draw.work_ns for draw in parts])
    codes = np.concatenate([draw.codes for draw in parts])
    parameters = load.trace.parameters
    sizes = np.array(load.travels, np.int64)
    types = {dtype: at for at, dtype in enumerate(dict.fromkeys(p.dtype for p in parameters))}
    kinds = np.array([types[p.dtype] for p in parameters], np.int32)
    bucket_of = np.zeros(len(parameters), np.int32)
    for at, bucket in enumerate(chosen):
        bucket_of[list(bucket)] = at
    cells = steps * len(parameters)
    reached, passed = np.empty_like(works), np.empty_like(works)
    ops = np.empty((cells, OP_FIELDS), np.int64)
    op_of = np.empty((steps, len(parameters)), np.int32)
    submit = np.empty((cells, len(streams)), np.int64)
    count = _core.simulate(
        (starts, works, codes, sizes, kinds, steps),
        (RULES.index(plan.rule), plan.in_flight, len(chosen), bucket_of, plan.fusion_bytes, plan.cycle_ns),
        _cost_arrays(cost, workers),
        (reached, passed, ops, op_of, submit),
    )
    return _Run(starts, codes, reached, passed, ops[:count], op_of, submit[:count])


def _steps_of(run: _Run, stream: int, arm: Arm, plan: Plan) -> Iterator[Step]:
    low, high = int(run.starts[stream]), int(run.starts[stream + 1])
    codes = run.codes[low:high]
    ends = np.flatnonzero(codes == END) + 1
    begin_ns = first = 0
    for index, end in enumerate(ends.tolist()):
        own = codes[first:end].tolist()
        at = run.reached[low + first : low + end].tolist()
        marks = {code: when for code, when in zip(own, at, strict=True) if code < 0}
        resumed = int(run.passed[low + first + own.index(WAIT)])
        forward = ((marks[FORWARD], marks[BACKWARD]),) if FORWARD in marks else ()
        optimizer = ((marks[OPTIMIZER], marks[OPTIMIZED]),) if OPTIMIZER in marks else ()
        yield Step(
            rank=stream,
            index=index,
            block=0,
            arm=arm,
            begin_ns=begin_ns,
            end_ns=marks[END],
            plan=plan.rule,
            forward=forward,
            optimizer=optimizer,
            grad_ready=tuple((code, when) for code, when in zip(own, at, strict=True) if code >= 0),
            waits=((0, marks[WAIT], resumed),) if resumed > marks[WAIT] else (),
        )
        begin_ns, first = marks[END], end


def _collectives_of(run: _Run, streams: int, arm: Arm, plan: Plan, algorithm: str, inside: int) -> Iterator[Collective]:
    ops = run.ops.tolist()
    submit = run.submit.tolist()
    next_position: dict[int, int] = {}
    for op, submits in zip(ops, submit, strict=True):
        position = op[BUCKET] if op[BUCKET] >= 0 else next_position.get(op[STEP], 0)
        next_position[op[STEP]] = position + 1
        for rank in range(streams):
            yield Collective(
                rank=rank,
                arm=arm,
                key=position + 1,
                round=op[STEP],
                submit_ns=submits[rank],
                tensor_bytes=op[BYTES],
                name=f"{plan.rule}/{position}",
                step=op[STEP],
                bucket=op[BUCKET] if op[BUCKET] >= 0 else None,
                algorithm=algorithm,
                wire_bytes=op[WIRE_BYTES] // inside,
                agreed_ns=op[AGREED],
                start_ns=op[START],
                done_ns=op[DONE],
            )


def _notes(load: Workload, cost: Cost, workers: int, run: _Run) -> tuple[str, ...]:
    """Notes on where a simulated run lies outside of the measurements."""
    notes = list(cost.extrapolation_notes(run.ops[:, BYTES].tolist(), workers))
    if not _all_recorded(load, workers) and workers > 1 and len(load.draws) > 1:
        notes.append(
            f"one rank of {workers}; the last of the others drawn from {len(load.draws)} recorded steps, as if they"
            " were independent, none slower than the slowest of them"
        )
    return tuple(notes)


def _trace(load: Workload, plan: Plan, cost: Cost, workers: int, chosen: Sequence[Sequence[int]], run: _Run) -> Trace:
    source = load.trace
    arm = load.transport if load.transport.real else Arm("simulated")
    recorded = _all_recorded(load, workers)
    ranks = len(run.starts) - 1 if recorded else 1
    inside = min(cost.ranks_per_host, workers)
    parameters = source.parameters
    bucket_of = {index: at for at, bucket in enumerate(chosen) for index in bucket}
    link = cost.link.bps if np.isfinite(cost.link.bps) else None
    return Trace(
        id=source.id,
        size=workers,
        arms=(arm,),
        origin="simulated",
        model=source.model,
        notes=_notes(load, cost, workers, run),
        modules=source.modules,
        network=Network("simulated", link, () if cost.link.lane_bps is None else (cost.link.lane_bps,)),
        ranks=tuple(Rank(rank, host_id=f"host{rank // inside}", finished=True) for rank in range(ranks)),
        parameters=tuple(replace(p, bucket=bucket_of.get(at)) for at, p in enumerate(parameters)),
        buckets=tuple(
            Bucket(f"{plan.rule}/{at}", at + 1, sum(load.travels[i] for i in b), parameters[b[0]].dtype, tuple(b))
            for at, b in enumerate(chosen)
        ),
        steps=tuple(step for rank in range(ranks) for step in _steps_of(run, rank, arm, plan)),
        collectives=tuple(_collectives_of(run, ranks, arm, plan, cost.algorithm, inside)),
    )


def simulate(
    trace: Trace | Workload,
    plan: Plan,
    cost: Cost,
    *,
    workers: int | None = None,
    steps: int | None = None,
    transport: Arm | None = None,
) -> Trace:
    """Return the simulated run as an ordinary Trace, times in integer ns from 0. Pure and deterministic.

    trace: source of the compute, with the cost's contention taken out. A Workload is used as it is, which saves time
    for repeated questions. workers: number of ranks; None: as recorded. With the recorded number, the ranks run their
    recorded steps together. With another number, the result has one rank, and operations start when the last of all
    ranks is ready, drawn from all recorded steps: memory does not grow with workers. steps: None: the number of counted
    steps. transport: source of the steps; None: the first that recorded gradient readiness.

    Raises ValueError if the trace lacks these data, for numbers below 1, and if the cost's fit is too poor for the
    request.
    """
    load = trace if isinstance(trace, Workload) else workload(trace, transport, cost.contention)
    size = load.trace.size if workers is None else workers
    count = len(load.steps) if steps is None else steps
    if size < 1 or count < 1:
        raise ValueError(f"workers and steps must be at least 1, not {size} and {count}")
    parameters = load.trace.parameters
    order = load.steps[0][load.ranks[0]].order
    chosen = plan.resolve([p.bytes for p in parameters], [p.dtype for p in parameters], order)
    run = _run(load, plan, cost, size, count, chosen)
    return _trace(load, plan, cost, size, chosen, run)
