"""Questions about a job as values, and their answers by simulation: each predicted, with the interval of its fit.

A Setting is a plan, a cost and a number of workers; sweeps.py makes them. A Job is what they are asked of.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from netbottleneck.analysis.scaling import intervals, total
from netbottleneck.analysis.stats import Estimate, achievable, step_times, widened
from netbottleneck.trace.model import Collective, Trace
from netbottleneck.whatif.compat2020 import Prediction
from netbottleneck.whatif.cost import Cost, Fit, fit
from netbottleneck.whatif.plan import Plan
from netbottleneck.whatif.simulate import simulate
from netbottleneck.whatif.workload import Workload, workload

MEASURED, PREDICTED = "measured", "predicted"
# At least so many steps are simulated where they differ, and at most so many of the recorded ones, evenly chosen.
STEPS, STEPS_MAX = 15, 45


@dataclass(frozen=True, slots=True)
class Outcome:
    """A median step, in ns. communication_ns: the union of its operations; notes: what the engine says of it."""

    step_ns: float
    compute_end_ns: float
    communication_end_ns: float
    communication_ns: float
    buckets: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What is asked. question: its kind; words: this one, as a table names it; remarks: what to know of it."""

    question: str
    words: str
    plan: Plan
    cost: Cost
    workers: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a setting comes to. step_s, scaling: with their intervals; None, and why, where it was refused.

    interval: whether there is one: a cost that no run was fitted to has none, and low = value = high."""

    setting: Setting
    outcome: Outcome | None
    step_s: Estimate | None
    scaling: Estimate | None
    interval: bool = True
    label: str = PREDICTED
    notes: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A run and what explains it.

    load: its compute; cost: as it was, at the achieved rate; alone_ns: a step of one worker. fit: None where no run was
    measured. lane_bps: what one network stream reaches, by the probe. measured_ns: the step as it was recorded.
    at_ends: the same with the compute that either end of the fit's contention leaves; () where that is not known."""

    trace: Trace
    load: Workload
    plan: Plan
    cost: Cost
    workers: int
    alone_ns: float
    transport: str | None = None
    fit: Fit | None = None
    lane_bps: float | None = None
    measured_ns: Estimate | None = None
    notes: tuple[str, ...] = field(default=())
    at_ends: tuple[Job, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """What an answer may be as well, at one end of a source of error; with the defaults, what it is.

    slower: operations take so many times as long. contention: of the job, which is as it is there."""

    source: str
    job: Job
    slower: float = 1.0
    contention: float | None = None

    def bent(self, cost: Cost) -> Cost:
        """Return a cost as it is there."""
        there = cost if self.slower == 1.0 else cost.slower(self.slower)
        return there if self.contention is None else replace(there, contention=self.contention)


def ends(job: Job, cost: Cost) -> tuple[End, ...]:
    """Both ends of each source of error that an answer at a cost has; () of one that nothing was fitted to."""
    found = []
    if cost.residual != (0.0, 0.0):
        found += [End("residual", job, slower=1 + off) for off in cost.residual]
    for other in job.at_ends:
        there = replace(other, workers=job.workers)
        found.append(End("contention", there, contention=other.cost.contention))
    return tuple(found)


def interval(value: float, found: Sequence[End], at: Sequence[float]) -> Estimate:
    """A value with its interval: `at` is what it is at each end that was found."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for end, other in zip(found, at, strict=True):
        by_source[end.source].append(other)
    return widened(value, by_source.values())


def _by_step(trace: Trace, rank: int) -> dict[int, list[Collective]]:
    found: dict[int, list[Collective]] = defaultdict(list)
    for operation in trace.collectives:
        if operation.rank == rank and operation.step is not None and operation.finished:
            found[operation.step].append(operation)
    return found


def outcome(made: Trace) -> Outcome:
    """The median step of a simulated run's lowest rank. Raises ValueError where it has none."""
    rank = min((step.rank for step in made.steps), default=None)
    if rank is None:
        raise ValueError(f"run {made.id}: nothing was simulated, no step has its gradients")
    steps = [step for step in made.steps if step.rank == rank]
    operations = _by_step(made, rank)
    lengths, computed, communicated, busy = [], [], [], []
    for step in steps:
        own = operations.get(step.index, [])
        ready = max((at for _, at in step.grad_ready), default=step.begin_ns) - step.begin_ns
        lengths.append(step.duration_ns)
        computed.append(ready)
        communicated.append(max((c.done_ns or 0 for c in own), default=step.begin_ns) - step.begin_ns)
        busy.append(total(intervals((c.start_ns or 0, c.done_ns or 0) for c in own)))
    medians = [float(statistics.median(values)) for values in (lengths, computed, communicated, busy)]
    buckets = statistics.median_high(len(operations.get(step.index, [])) for step in steps)
    return Outcome(medians[0], medians[1], max(medians[1], medians[2]), medians[3], buckets, made.notes)


def _steps(load: Workload) -> int:
    """How many steps of a load tell all that it holds."""
    return 1 if len(load.draws) == 1 else max(STEPS, len(load.steps))


def play(job: Job, setting: Setting, cost: Cost | None = None) -> Outcome:
    """A setting simulated; cost: another than its own."""
    used = setting.cost if cost is None else cost
    found = outcome(simulate(job.load, setting.plan, used, workers=setting.workers, steps=_steps(job.load)))
    return replace(found, notes=tuple(note for note in found.notes if note not in job.trace.notes))


def scaling(job: Job, step_ns: float) -> float:
    """T_1 / T_n for equal work per worker."""
    return job.alone_ns / step_ns if step_ns > 0 else math.nan


def answer(job: Job, setting: Setting) -> Answer:
    """What a setting comes to; refused where the fit is too poor for it, or the engine cannot hold it."""
    try:
        found = play(job, setting)
    except ValueError as error:
        return Answer(setting, None, None, None, refused=str(error))
    others = ends(job, setting.cost)
    try:
        steps = [play(end.job, setting, end.bent(setting.cost)).step_ns for end in others]
    except ValueError as error:
        return Answer(setting, None, None, None, refused=f"at an end of its interval: {error}")
    step = interval(found.step_ns / 1e9, others, [step_ns / 1e9 for step_ns in steps])
    factors = [scaling(end.job, step_ns) for end, step_ns in zip(others, steps, strict=True)]
    factor = interval(scaling(job, found.step_ns), others, factors)
    return Answer(setting, found, step, factor, bool(others), notes=(*setting.remarks, *found.notes))


def prediction(job: Job, one: Answer) -> Prediction:
    """An answer in the terms of compat, but its times are from the begin of the step.

    Raises ValueError for a refused one."""
    if one.outcome is None or one.step_s is None or one.scaling is None:
        raise ValueError(f"{one.setting.words}: refused: {one.refused}")
    return Prediction(
        model=job.trace.model or job.trace.id,
        workers=one.setting.workers,
        link_bps=one.setting.cost.link.rate_bps,
        compression=one.setting.cost.ratio,
        compute_end_s=one.outcome.compute_end_ns / 1e9,
        communication_end_s=one.outcome.communication_end_ns / 1e9,
        overhead_s=one.step_s.value - job.alone_ns / 1e9,
        step_s=one.step_s.value,
        scaling_factor=one.scaling.value,
        buckets=one.outcome.buckets,
    )


def _measured(trace: Trace, transport: str) -> Estimate | None:
    """The recorded step: the median, and the middle 80 % of the steps."""
    lengths = sorted(float(ns) for block in step_times(trace, transport).values() for ns in block)
    if not lengths or trace.origin != "measured":
        return None
    low, high = lengths[len(lengths) // 10], lengths[-1 - len(lengths) // 10]
    return Estimate(statistics.median(lengths), low, high)


def _plan(trace: Trace, transport: str | None) -> tuple[Plan, tuple[str, ...]]:
    try:
        return Plan.of(trace, transport), ()
    except ValueError:
        return Plan.ddp(), ("the run does not tell its buckets: those of DDP (1 MiB, then 25 MiB) are taken",)


def job(
    trace: Trace,
    transport: str | None = None,
    *,
    plan: Plan | None = None,
    cost: Cost | None = None,
    copy_byte_ns: float | None = None,
) -> Job:
    """A run made ready for questions. cost: given where it is not to be fitted, as for a layer log.

    transport: the one to be explained; None: the first that recorded its operations. copy_byte_ns: as fit has it.
    Raises ValueError where the run has no operation to fit a cost to, or no step that tells when gradients were ready.
    """
    if cost is not None:
        return _ready(trace, transport, plan, cost, ("no run was fitted: formulas alone, without intervals",))
    together = len({rank.host_id for rank in trace.ranks}) == 1 < trace.size
    fitted = fit(trace, transport, ranks_per_host=1 if together else None, copy_byte_ns=copy_byte_ns)
    notes = [f"the fit is poor: {fitted.reason}"] if fitted.reason else []
    if together:
        notes.append("all ranks shared a host: each is taken to have its own, and what they had between them a link")
    made = _ready(trace, fitted.transport, plan, fitted.cost, (*notes, *fitted.notes))
    can = achievable(trace)
    return replace(
        made,
        plan=made.plan if plan is not None else replace(made.plan, in_flight=fitted.in_flight),
        fit=fitted,
        lane_bps=None if can is None else can.points[0][1] / can.points[0][0],
        measured_ns=_measured(trace, fitted.transport),
        at_ends=_at_ends(trace, made.plan, fitted),
    )


def _ready(trace: Trace, transport: str | None, plan: Plan | None, cost: Cost, notes: tuple[str, ...]) -> Job:
    if plan is None:
        plan, doubt = _plan(trace, transport)
        notes = (*doubt, *notes)
    load = workload(trace, transport, cost.contention)
    load = replace(load, steps=load.steps[:: math.ceil(len(load.steps) / STEPS_MAX)])
    alone = simulate(load, plan, Cost.free(), workers=1, steps=_steps(load))
    return Job(trace, load, plan, cost, trace.size, outcome(alone).step_ns, transport, notes=notes)


def _at_ends(trace: Trace, plan: Plan, fitted: Fit) -> tuple[Job, ...]:
    """The job at either end of the fit's contention."""
    known = fitted.contention
    if known is None or known.low == known.high:
        return ()
    costs = [replace(fitted.cost, contention=end) for end in (known.low, known.high)]
    return tuple(_ready(trace, fitted.transport, plan, cost, ()) for cost in costs)
