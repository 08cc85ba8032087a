"""A trace as it would have been: the recorded compute, sent by another plan, at another cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck import _core
from netbottleneck.trace.model import PSEUDO, Bucket, Collective, Network, Rank, Step, Trace
from netbottleneck.whatif.cost import ALGORITHMS, Cost, Table
from netbottleneck.whatif.plan import RULES, Plan
from netbottleneck.whatif.workload import BACKWARD, END, FORWARD, OPTIMIZED, OPTIMIZER, WAIT, Draw, Workload, workload

# So many recorded ranks are simulated one by one; of more, one that is like the others and the last one.
RANKS_MAX = 32
CONTENTION_ONE = 10_000
OP_FIELDS = 8
# Of an operation, as csrc/sim/sim.h has them.
STEP, BUCKET, MEMBERS, BYTES, WIRE_BYTES, AGREED, START, DONE = range(OP_FIELDS)

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Run:
    """What the engine was given and what it filled; items of stream s: starts[s] to starts[s + 1]."""

    starts: Ints
    codes: NDArray[np.int32]
    reached: Ints
    passed: Ints
    ops: Ints
    op_of: NDArray[np.int32]
    submit: Ints


def _last_of(draws: Sequence[Draw], others: int, at: float) -> Draw:
    """The last of so many ranks, each a recorded step drawn at random: one order statistic, whose place is at^(1/n)."""
    slow = sorted(draws, key=lambda draw: draw.compute_ns)
    return slow[min(len(slow) - 1, int(at ** (1.0 / others) * len(slow)))]


def _together(load: Workload, workers: int) -> bool:
    """Whether the recorded ranks are all there are, and few enough to be simulated one by one."""
    return len(load.ranks) == workers == load.trace.size and workers <= RANKS_MAX


def _streams(load: Workload, workers: int, steps: int) -> list[list[Draw]]:
    """The draws of each simulated rank, by step: the recorded ranks, or one like them and the last of all others."""
    recorded = len(load.steps)
    ranks = load.ranks
    if _together(load, workers):
        return [[load.steps[k % recorded][rank] for k in range(steps)] for rank in ranks]
    own = [load.steps[k % recorded][ranks[k // recorded % len(ranks)]] for k in range(steps)]
    draws = load.draws
    if workers == 1 or len(draws) == 1:
        return [own]
    # Spread over (0, 1) so that any number of steps has early and late ones.
    places = [((k * 0.6180339887498949 + 0.5) % 1.0) for k in range(steps)]
    last = [_last_of(draws, workers - 1, at) for at in places]
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
    which = ALGORITHMS.index(cost.algorithm)
    return which, workers, inside, contention, flags, numbers, points[0].copy(), points[1].copy()


def _run(load: Workload, plan: Plan, cost: Cost, workers: int, steps: int, chosen: Sequence[Sequence[int]]) -> _Run:
    streams = _streams(load, workers, steps)
    parts = [draw for stream in streams for draw in stream]
    lengths = np.array([sum(len(draw.codes) for draw in stream) for stream in streams], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    works = np.concatenate([draw.work_ns for draw in parts])
    codes = np.concatenate([draw.codes for draw in parts])
    parameters = load.trace.parameters
    sizes = np.array([p.bytes for p in parameters], np.int64)
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


def _steps_of(run: _Run, stream: int, transport: str, plan: Plan) -> Iterator[Step]:
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
            transport=transport,
            begin_ns=begin_ns,
            end_ns=marks[END],
            plan=plan.rule,
            forward=forward,
            optimizer=optimizer,
            grad_ready=tuple((code, when) for code, when in zip(own, at, strict=True) if code >= 0),
            waits=((0, marks[WAIT], resumed),) if resumed > marks[WAIT] else (),
        )
        begin_ns, first = marks[END], end


def _collectives_of(
    run: _Run, streams: int, transport: str, plan: Plan, algorithm: str, inside: int
) -> Iterator[Collective]:
    ops = run.ops.tolist()
    submit = run.submit.tolist()
    seen: dict[int, int] = {}
    for op, submits in zip(ops, submit, strict=True):
        place = op[BUCKET] if op[BUCKET] >= 0 else seen.get(op[STEP], 0)
        seen[op[STEP]] = place + 1
        for rank in range(streams):
            yield Collective(
                rank=rank,
                transport=transport,
                key=place + 1,
                round=op[STEP],
                submit_ns=submits[rank],
                tensor_bytes=op[BYTES],
                name=f"{plan.rule}/{place}",
                step=op[STEP],
                bucket=op[BUCKET] if op[BUCKET] >= 0 else None,
                algorithm=algorithm,
                wire_bytes=op[WIRE_BYTES] // inside,
                agreed_ns=op[AGREED],
                start_ns=op[START],
                done_ns=op[DONE],
            )


def _notes(load: Workload, cost: Cost, workers: int, run: _Run) -> tuple[str, ...]:
    """What of a simulated run lies outside of what was measured."""
    notes = list(cost.doubts(run.ops[:, BYTES].tolist(), workers))
    if not _together(load, workers) and workers > 1 and len(load.draws) > 1:
        notes.append(
            f"one rank of {workers}; the last of the others drawn from {len(load.draws)} recorded steps, as if they"
            " were independent, none slower than the slowest of them"
        )
    return tuple(notes)


def _trace(load: Workload, plan: Plan, cost: Cost, workers: int, chosen: Sequence[Sequence[int]], run: _Run) -> Trace:
    source = load.trace
    transport = load.transport if load.transport not in PSEUDO else "simulated"
    recorded = _together(load, workers)
    ranks = len(run.starts) - 1 if recorded else 1
    inside = min(cost.ranks_per_host, workers)
    parameters = source.parameters
    bucket_of = {index: at for at, bucket in enumerate(chosen) for index in bucket}
    link = cost.link.bps if np.isfinite(cost.link.bps) else None
    return Trace(
        id=source.id,
        size=workers,
        transports=(transport,),
        origin="simulated",
        model=source.model,
        notes=_notes(load, cost, workers, run),
        modules=source.modules,
        network=Network("simulated", link, () if cost.link.lane_bps is None else (cost.link.lane_bps,)),
        ranks=tuple(Rank(rank, host_id=f"host{rank // inside}", finished=True) for rank in range(ranks)),
        parameters=tuple(replace(p, bucket=bucket_of.get(at)) for at, p in enumerate(parameters)),
        buckets=tuple(
            Bucket(f"{plan.rule}/{at}", at + 1, sum(parameters[i].bytes for i in b), parameters[b[0]].dtype, tuple(b))
            for at, b in enumerate(chosen)
        ),
        steps=tuple(step for rank in range(ranks) for step in _steps_of(run, rank, transport, plan)),
        collectives=tuple(_collectives_of(run, ranks, transport, plan, cost.algorithm, inside)),
    )


def simulate(
    trace: Trace | Workload,
    plan: Plan,
    cost: Cost,
    *,
    workers: int | None = None,
    steps: int | None = None,
    transport: str | None = None,
) -> Trace:
    """Return the run as it would have been: an ordinary Trace, times in integer ns from 0. Pure and deterministic.

    trace: whose compute it is, less what the cost's contention added beside its operations (a Workload, as it is, where
    the same is asked often). workers: ranks, None: as many as were. As many as were recorded go through their recorded
    steps together. Of another number one rank is told, and operations start when the last of them is ready, drawn from
    all recorded steps: memory does not grow with workers. steps: None: as many as were counted. transport: whose steps;
    None: the first that tells when gradients were ready.

    Raises ValueError where the trace tells too little, for numbers below 1, and where the cost is from a fit that is
    too poor for what is asked."""
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
