"""What a run's ranks compute, without what they waited: each recorded step as a list of items for csrc/sim/sim.h."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.scaling import Intervals, counted, intersection, intervals, subtraction, under_way
from netbottleneck.trace.model import BARE, NULL, PSEUDO, SINGLE, Step, Trace

# Codes of items: csrc/sim/sim.h; those from FORWARD on down are marks, which the engine passes on.
WAIT, END, BACKWARD, FORWARD, OPTIMIZER, OPTIMIZED = -1, -2, -3, -4, -5, -6


@dataclass(frozen=True, slots=True)
class Draw:
    """One recorded step of one rank as items: `work_ns` of compute, then what `codes` says.

    compute_ns: all work before the wait. order: tensors by readiness."""

    work_ns: NDArray[np.int64]
    codes: NDArray[np.int32]
    compute_ns: int

    @property
    def order(self) -> list[int]:
        return [int(code) for code in self.codes if code >= 0]


@dataclass(frozen=True, slots=True)
class Workload:
    """The compute of a run. steps: by index, each rank's draw; only what all ranks recorded."""

    trace: Trace
    transport: str
    steps: tuple[Mapping[int, Draw], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.steps[0]))

    @property
    def draws(self) -> list[Draw]:
        """All steps of all ranks, step by step."""
        return [draws[rank] for draws in self.steps for rank in sorted(draws)]


def _gap(step: Step, ready_ns: int) -> tuple[int, int]:
    """What the untouched script does not tell: it waits from its last gradient to its update."""
    begins = [begin for begin, _ in step.optimizer if begin >= ready_ns]
    return (ready_ns, min(begins)) if step.transport == BARE and begins else (ready_ns, ready_ns)


def _wait_begin(step: Step, ready_ns: int) -> int:
    """When the rank waited for its operations: after its last gradient, at the latest before its update."""
    if step.transport == BARE:
        return ready_ns
    waits = [max(begin, ready_ns) for _, begin, end in step.waits if end > ready_ns]
    after = [begin for begin, _ in step.optimizer if begin >= ready_ns]
    return min([*waits, *after], default=ready_ns)


def _marks(step: Step, ready_ns: int, wait_ns: int) -> list[tuple[int, int, int]]:
    passes = [(begin, end) for begin, end in step.forward if end <= ready_ns]
    rows = [(begin, 0, FORWARD) for begin, _ in passes[:1]]
    rows.append((max((end for _, end in passes), default=step.begin_ns), 1, BACKWARD))
    for begin, end in step.optimizer[:1]:
        # Within the step and in order, whatever the stamps say: each step has its marks, or it has none.
        begin_ns, end_ns = min(begin, step.end_ns), min(max(begin, end), step.end_ns)
        rows += [(begin_ns, 5, OPTIMIZER), (end_ns, 6, OPTIMIZED)] if begin >= wait_ns else []
    return rows


def _items(step: Step, tensors: int) -> list[tuple[int, int, int]]:
    """(when, place among those of one moment, code), sorted. A gradient that never was ready travels all the same."""
    ready = sorted(((at, index) for index, at in step.grad_ready), key=lambda row: row[0])
    last = {index: min(max(at, step.begin_ns), step.end_ns) for at, index in ready if index < tensors}
    ready_ns = max(last.values(), default=step.begin_ns)
    wait_ns = _wait_begin(step, ready_ns)
    rows = [(last[index], 2, index) for index in sorted(last, key=last.__getitem__)]
    rows += [(wait_ns, 3, index) for index in range(tensors) if index not in last]
    rows += [(wait_ns, 4, WAIT), (step.end_ns, 7, END), *_marks(step, ready_ns, wait_ns)]
    return sorted(rows, key=lambda row: row[:2])


def _covered(at: NDArray[np.int64], spans: Intervals) -> NDArray[np.int64]:
    """How much of a set lies before each moment."""
    covered: NDArray[np.int64] = (np.clip(at[:, None], spans[:, 0], spans[:, 1]) - spans[:, 0]).sum(axis=1)
    return covered


def draw(step: Step, tensors: int, beside: Intervals | None = None, contention: float = 1.0) -> Draw:
    """Return a recorded step of a model with so many tensors as items.

    beside: when operations were under way; compute took `contention` times as long then, which is taken out."""
    items = _items(step, tensors)
    at = np.array([at for at, _, _ in items], np.int64)
    codes = np.array([code for _, _, code in items], np.int32)
    ready_ns = max((at for at, _, code in items if code >= 0), default=step.begin_ns)
    blocked = intervals([*((begin, end) for _, begin, end in step.waits), _gap(step, ready_ns)])
    since = np.full(1, step.begin_ns)
    less = _covered(at, blocked) - _covered(since, blocked)
    if beside is not None and len(beside) and contention > 1:
        slowed = subtraction(intersection(beside, intervals([(step.begin_ns, step.end_ns)])), blocked)
        lost = 1 - 1 / contention
        less = less + np.rint(lost * (_covered(at, slowed) - _covered(since, slowed))).astype(np.int64)
    work = np.maximum(np.diff(at - less, prepend=step.begin_ns), 0)
    waiting = int(np.flatnonzero(codes == WAIT)[0])
    return Draw(work, codes, int(work[: waiting + 1].sum()))


def _transport(trace: Trace, transport: str | None) -> str:
    told = {step.transport for step in trace.steps if step.grad_ready}
    names = [t for t in trace.transports if t not in PSEUDO] + [SINGLE, NULL, BARE]
    found = [name for name in names if name in told] if transport is None else [transport] * (transport in told)
    if not found:
        raise ValueError(
            f"the trace does not tell when gradients were ready{f' over {transport}' if transport else ''}"
        )
    return found[0]


def workload(trace: Trace, transport: str | None = None, contention: float = 1.0) -> Workload:
    """Return what the ranks of a run compute, by the steps of one transport, the first of each block left out.

    contention: compute took so many times as long while operations were under way: it is told as it is without them.
    transport: None: the first that tells when gradients were ready. Raises ValueError where none does, where no step
    was recorded by all ranks that took part, or where tensors are not described."""
    name = _transport(trace, transport)
    if not trace.parameters:
        raise ValueError("the trace does not describe its tensors")
    told = [step for step in trace.steps if step.transport == name and step.grad_ready]
    late = {(step.rank, step.index) for step in counted(trace)}
    rows = [step for step in told if (step.rank, step.index) in late] or told
    flights = under_way(trace, name) if contention > 1 else {}
    by_index: dict[int, dict[int, Draw]] = defaultdict(dict)
    for step in rows:
        by_index[step.index][step.rank] = draw(step, len(trace.parameters), flights.get(step.rank), contention)
    ranks = {step.rank for step in rows}
    whole = tuple(draws for _, draws in sorted(by_index.items()) if set(draws) == ranks)
    if not whole:
        raise ValueError(f"no step over {name} was recorded by all ranks")
    return Workload(trace, name, whole)
