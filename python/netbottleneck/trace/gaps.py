"""Gaps: steps of a run whose events a full ring does not keep, and the trace without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

from netbottleneck.trace import model as tr
from netbottleneck.trace.ring_file import Ring
from netbottleneck.trace.run_steps import between


class Gap(NamedTuple):
    """Steps, from the first to the last, that may lack events of one ring; text: what is said about them."""

    first: int
    last: float
    text: str


def gap_of(rank: int, name: str, ring: Ring) -> Gap:
    """Return the steps that are left out for a ring with a gap.

    Events of a step may be written after its end: one more step at each end is left out.
    """
    assert ring.gap is not None
    first, last = ring.gap
    kept = "is full" if last is None else "keeps only the first and the last events"
    more = f"{ring.overwritten} others were only counted (NETBOTTLENECK_TRACE_EVENTS)"
    return Gap(
        first - 1, math.inf if last is None else last + 1, f"rank {rank}'s file of events of {name} {kept}, and {more}"
    )


def without(trace: tr.Trace, gaps: Sequence[Gap]) -> tr.Trace:
    """Return the trace without the steps of the gaps, and of what is between them."""
    first, last = min(gap.first for gap in gaps), max(gap.last for gap in gaps)
    out = [first <= step.index <= last for step in trace.steps]
    begin_ns = min((step.begin_ns for step in compress(trace.steps, out)), default=0)
    end_ns = min((step.begin_ns for step in trace.steps if step.index > last), default=math.inf)

    def within(row: tr.Collective | tr.NcclOperation) -> bool:
        return begin_ns <= row.submit_ns < end_ns if row.step is None else first <= row.step <= last

    which = f"steps from {first} on" if last == math.inf else f"steps {first} to {last:g}"
    widest = max(gaps, key=lambda gap: (gap.last - gap.first, -gap.first))
    notes = [f"{which} are left out: {widest.text}"]
    of_first = trace.ranks[0]
    if mean := between(of_first.run_steps, first, last):
        notes.append(f"{mean} on rank {of_first.rank}")
    return replace(
        trace,
        steps=tuple(compress(trace.steps, (not one for one in out))),
        collectives=tuple(one for one in trace.collectives if not within(one)),
        nccl=tuple(one for one in trace.nccl if not within(one)),
        notes=(*trace.notes, *notes),
    )
