"""What a replay plays: one step of one rank as a value, made of a trace. Pure: who plays it is replay.py."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from netbottleneck.trace.model import BARE, NULL, SINGLE, Parameter, Rank, Step, Trace
from netbottleneck.whatif.plan import Plan

ELEMENT = 4  # bytes: everything travels as float32
DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class Score:
    """One step of one rank. tensors: (name, bytes); ready: (index, ns after the step's begin), rising.

    forward_ns: until the backward pass begins; tail_ns: what follows once all gradients are back (the optimizer).
    buckets: indices of tensors, each sent when its last is ready. note: where the times come from.
    """

    name: str
    tensors: tuple[tuple[str, int], ...]
    ready: tuple[tuple[int, int], ...]
    forward_ns: int
    tail_ns: int
    buckets: tuple[tuple[int, ...], ...]
    note: str = ""

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(size for _, size in self.tensors)

    def bucket_bytes(self, index: int) -> int:
        """Of one bucket."""
        return sum(self.tensors[at][1] for at in self.buckets[index])

    def parts(self) -> list[tuple[list[int], list[int], list[int]]]:
        """Return the step cut where buckets are sent: (times, tensors, the buckets that are complete then)."""
        missing = [len(bucket) for bucket in self.buckets]
        home = {at: number for number, bucket in enumerate(self.buckets) for at in bucket}
        found: list[tuple[list[int], list[int], list[int]]] = []
        times: list[int] = []
        tensors: list[int] = []
        for index, at in self.ready:
            times.append(at)
            tensors.append(index)
            missing[home[index]] -= 1
            if missing[home[index]] == 0:
                found.append((times, tensors, [home[index]]))
                times, tensors = [], []
        return found


def score(trace: Trace, plan: Plan, *, scale: float = 1.0, stretch: float = 1.0) -> Score:
    """Return the median step of a trace's first rank that tells its gradients, to be played by a static plan.

    A rank alone counts before others, and nobody who waited for bytes before those who did not. scale: what bytes are
    multiplied with, stretch: times. Raises ValueError where no step tells when its gradients were ready, for a plan
    that decides as it runs, and for factors that are not positive.
    """
    if not (0 < scale <= 64 and 0 < stretch <= 1000):
        raise ValueError(f"bytes times {scale} and times {stretch}: must be positive, at most 64 and 1000")
    steps = _told(trace)
    offsets: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for index, at in step.grad_ready:
            offsets[index].append(at - step.begin_ns)
    medians = {index: round(stretch * statistics.median_low(times)) for index, times in offsets.items()}
    ready = tuple(sorted(medians.items(), key=lambda row: row[1]))
    tensors = tuple((p.name, max(ELEMENT, round(p.bytes * scale / ELEMENT) * ELEMENT)) for p in trace.parameters)
    if len(ready) != len(tensors):
        raise ValueError(f"run {trace.id}: {len(tensors)} gradients, of which {len(ready)} tell when they are ready")
    buckets = plan.resolve([size for _, size in tensors], [DTYPE] * len(tensors), [index for index, _ in ready])
    if not buckets:
        raise ValueError(f"the rule {plan.rule} decides as it runs: a replay needs one that does not, ddp or explicit")
    forward = min(round(stretch * statistics.median_low([_forward_ns(step) for step in steps])), ready[0][1])
    tail = round(stretch * statistics.median_low([_tail_ns(step) for step in steps]))
    note = f"{trace.origin}: {', '.join(trace.notes)}" if trace.notes else trace.origin
    return Score(trace.model or trace.id, tensors, ready, forward, tail, buckets, note)


def _told(trace: Trace) -> Sequence[Step]:
    told = [step for step in trace.steps if step.grad_ready and step.transport != BARE]
    if not told:
        raise ValueError(f"run {trace.id}: no step tells when its gradients were ready")
    order = [SINGLE, NULL, *trace.transports, *(step.transport for step in told)]
    first = min(told, key=lambda step: (order.index(step.transport), step.rank))
    own = [step for step in told if (step.rank, step.transport) == (first.rank, first.transport)]
    firsts: dict[int, int] = {}
    for step in own:
        firsts[step.block] = min(step.index, firsts.get(step.block, step.index))
    return [step for step in own if step.index != firsts[step.block]] or own


def _forward_ns(step: Step) -> int:
    return step.forward[-1][1] - step.begin_ns if step.forward else 0


def _tail_ns(step: Step) -> int:
    return max(0, sum(end - begin for begin, end in step.optimizer))


def as_trace(played: Score) -> Trace:
    """Return a score as a run of one rank alone with one step: its compute, and nothing of who sends what."""
    ready_ns = played.ready[-1][1]
    end_ns = ready_ns + played.tail_ns
    step = Step(
        rank=0,
        index=0,
        block=0,
        transport=SINGLE,
        begin_ns=0,
        end_ns=end_ns,
        forward=((0, played.forward_ns),),
        optimizer=((ready_ns, end_ns),),
        grad_ready=played.ready,
    )
    return Trace(
        f"score-{played.name}",
        1,
        (SINGLE,),
        origin="simulated",
        model=played.name,
        notes=(played.note,) if played.note else (),
        ranks=(Rank(0, finished=True),),
        parameters=tuple(Parameter(name, size, DTYPE) for name, size in played.tensors),
        steps=(step,),
    )
