"""What-if questions as values, their answers by simulation, and inverse questions by bisection.

Each answer is predicted, with the interval of its fit. A Setting is a plan, a cost and a number of workers; sweeps.py
makes them. A Job holds the run that they are about.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from netbottleneck.analysis.arrivals import aligned
from netbottleneck.analysis.bandwidth import achievable_bandwidth
from netbottleneck.analysis.comparisons import Estimate, sends_in_some, step_times, widened
from netbottleneck.analysis.intervals import host_count, intervals, not_matched, total, unheard
from netbottleneck.analysis.thresholds import MISFIT_MAX, SILENT_PART
from netbottleneck.analysis.traffic import rounds
from netbottleneck.trace.model import Collective, Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.units import ms, percent
from netbottleneck.whatif.compat2020 import Prediction
from netbottleneck.whatif.cost import Cost
from netbottleneck.whatif.fit import Fit, fit
from netbottleneck.whatif.plan import Plan, part_lacking
from netbottleneck.whatif.simulate import Workload, simulate, workload

__all__ = ["Answer", "Job", "LeastValue", "Setting", "job"]

MEASURED, PREDICTED, POORLY_PREDICTED = "measured", "predicted", "predicted from a poor fit"
# Least number of simulated steps if the recorded steps differ, and most recorded steps used, evenly spaced.
STEPS, STEPS_MAX = 15, 45
# Waiting for calls of the script is named from this part of the step on.
KEPT_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Outcome:
    """A median step, in ns. communication_ns: the union of its operations; notes: remarks of the engine."""

    step_ns: float
    compute_end_ns: float
    communication_end_ns: float
    communication_ns: float
    buckets: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """A question. question: its kind; title: its name in a table; remarks: caveats."""

    question: str
    title: str
    plan: Plan
    cost: Cost
    workers: int
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a setting. step_s, scaling: with intervals; None, and the reason in `refused`, if refused.

    interval: False for a cost that was not fitted to a run; then low = value = high.
    """

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
    """A run and the model that explains it.

    load: its compute; cost: as fitted, at the achieved rate; alone_ns: a step of one worker. fit: None if no run was
    fitted. lane_bps: rate of one network stream, from the probe. measured_ns: the recorded step. at_ends: the same job
    with the compute at either end of the fit's contention; () if unknown. misfit: how far the simulated step of the run
    as recorded is from the measured one, if too far to predict from it; else "".
    """

    trace: Trace
    load: Workload
    plan: Plan
    cost: Cost
    workers: int
    alone_ns: float
    transport: Arm | None = None
    fit: Fit | None = None
    lane_bps: float | None = None
    measured_ns: Estimate | None = None
    notes: tuple[str, ...] = field(default=())
    at_ends: tuple[Job, ...] = ()
    misfit: str = ""


@dataclass(frozen=True, slots=True)
class IntervalEnd:
    """One end of a source of error. With the defaults: the job itself.

    slower: operations take this many times as long. contention: the job's contention at this end. line: another cost
    that explains the run as well as the job's fit.
    """

    source: str
    job: Job
    slower: float = 1.0
    contention: float | None = None
    line: Cost | None = None

    def apply(self, cost: Cost) -> Cost:
        """Return a cost as it is at this end."""
        changed = cost
        if self.line is not None and self.job.fit is not None:
            changed = _on_line(changed, self.job.fit.cost, self.line)
        if self.slower != 1.0:
            changed = changed.slower(self.slower)
        return changed if self.contention is None else replace(changed, contention=self.contention)


def _on_line(cost: Cost, fitted: Cost, line: Cost) -> Cost:
    """A cost that was made from `fitted`, as if it were made from `line`. Rates that a question replaced stay."""
    return replace(
        cost,
        fixed_ns=max(0.0, cost.fixed_ns + line.fixed_ns - fitted.fixed_ns),
        alpha_ns=max(0.0, cost.alpha_ns + line.alpha_ns - fitted.alpha_ns),
        host_alpha_ns=max(0.0, cost.host_alpha_ns + line.host_alpha_ns - fitted.host_alpha_ns),
        link=line.link if cost.link == fitted.link else cost.link,
        host_bps=line.host_bps if cost.host_bps == fitted.host_bps else cost.host_bps,
    )


def interval_ends(job: Job, cost: Cost) -> tuple[IntervalEnd, ...]:
    """Both ends of each source of error of an answer at `cost`; () for a cost that was not fitted."""
    found = []
    if cost.residual != (0.0, 0.0):
        found += [IntervalEnd("residual", job, slower=1 + off) for off in cost.residual]
    for other in job.at_ends:
        scaled = replace(other, workers=job.workers)
        found.append(IntervalEnd("contention", scaled, contention=other.cost.contention))
    if job.fit is not None and cost.fitted_bytes is not None:
        found += [IntervalEnd("line", job, line=other) for other in job.fit.others]
    return tuple(found)


def interval(value: float, found: Sequence[IntervalEnd], at: Sequence[float]) -> Estimate:
    """A time, rate or factor with its interval; `at` holds its values at the ends `found`.

    Combined errors do not make it negative.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    for end, other in zip(found, at, strict=True):
        by_source[end.source].append(other)
    whole = widened(value, by_source.values())
    return replace(whole, low=max(0.0, whole.low))


def estimates(
    job: Job, value_ns: float, found: Sequence[IntervalEnd], at_ns: Sequence[float]
) -> tuple[Estimate, Estimate]:
    """A step in s, and its scaling factor, with intervals; `at_ns` holds the step at the ends `found`.

    Combined errors do not make a step shorter than its compute.
    """
    step = interval(value_ns / 1e9, found, [step_ns / 1e9 for step_ns in at_ns])
    least_s = min([value_ns, job.alone_ns, *(end.job.alone_ns for end in found)]) / 1e9
    factors = [scaling(end.job, step_ns) for end, step_ns in zip(found, at_ns, strict=True)]
    factor = interval(scaling(job, value_ns), found, factors)
    most = max(factor.value, 1.0)
    return replace(step, low=max(step.low, least_s)), replace(factor, high=min(factor.high, most))


def _by_step(trace: Trace, rank: int) -> dict[int, list[Collective]]:
    found: dict[int, list[Collective]] = defaultdict(list)
    for operation in trace.collectives:
        if operation.rank == rank and operation.step is not None and operation.finished:
            found[operation.step].append(operation)
    return found


def outcome(simulated: Trace) -> Outcome:
    """Median step of the lowest rank in a simulated run. Raises ValueError if it has no steps."""
    rank = min((step.rank for step in simulated.steps), default=None)
    if rank is None:
        raise ValueError(f"run {simulated.id}: no step records its gradients, so nothing was simulated")
    steps = [step for step in simulated.steps if step.rank == rank]
    operations = _by_step(simulated, rank)
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
    return Outcome(medians[0], medians[1], max(medians[1], medians[2]), medians[3], buckets, simulated.notes)


def _steps(load: Workload) -> int:
    """Number of simulated steps that covers a load."""
    return 1 if len(load.draws) == 1 else max(STEPS, len(load.steps))


def simulate_setting(job: Job, setting: Setting, cost: Cost | None = None) -> Outcome:
    """Simulate a setting; cost: replaces the setting's cost."""
    used = setting.cost if cost is None else cost
    found = outcome(simulate(job.load, setting.plan, used, workers=setting.workers, steps=_steps(job.load)))
    return replace(found, notes=tuple(note for note in found.notes if note not in job.trace.notes))


def scaling(job: Job, step_ns: float) -> float:
    """Scaling factor T_1 / T_n for equal work per worker."""
    return job.alone_ns / step_ns if step_ns > 0 else math.nan


def now(job: Job) -> Setting:
    """The recorded run itself."""
    return Setting("now", "as recorded", job.plan, job.cost, job.workers)


def misfit_ns(job: Job) -> float:
    """How far the simulated step of the run as recorded is from the measured one; 0 if that is not known."""
    return 0.0 if job.measured_ns is None else abs(job.measured_ns.value - simulate_setting(job, now(job)).step_ns)


def misfit(job: Job) -> str:
    """Return Job.misfit. Raises ValueError if the run as recorded cannot be simulated."""
    off_ns = misfit_ns(job)
    known = job.measured_ns is not None and off_ns > MISFIT_MAX * job.measured_ns.value
    return f"the simulated step is off by {ms(off_ns)}" if known else ""


def label_of(job: Job, cost: Cost) -> str:
    """How well a number of a job at this cost is known."""
    return POORLY_PREDICTED if cost.poor or job.misfit else PREDICTED


def answer(job: Job, setting: Setting) -> Answer:
    """Answer a setting; refused if the fit is too poor for it, or if the engine cannot represent it."""
    try:
        found = simulate_setting(job, setting)
    except ValueError as error:
        return Answer(setting, None, None, None, refused=str(error))
    others = interval_ends(job, setting.cost)
    try:
        steps = [simulate_setting(end.job, setting, end.apply(setting.cost)).step_ns for end in others]
    except ValueError as error:
        return Answer(setting, None, None, None, refused=f"at one end of the interval: {error}")
    step, factor = estimates(job, found.step_ns, others, steps)
    notes = (*setting.remarks, *found.notes)
    return Answer(setting, found, step, factor, bool(others), label_of(job, setting.cost), notes)


def prediction(job: Job, one: Answer) -> Prediction:
    """An answer as a compat2020 Prediction, but with times from the begin of the step.

    Raises ValueError for a refused answer.
    """
    if one.outcome is None or one.step_s is None or one.scaling is None:
        raise ValueError(f"{one.setting.title}: refused: {one.refused}")
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


def _measured(trace: Trace, transport: Arm) -> Estimate | None:
    """The recorded step, and the middle 80 % of the steps; None for a simulated run.

    It is the median, or the mean if the arm `sends_in_some`.
    """
    lengths = sorted(float(ns) for block in step_times(trace, transport).values() for ns in block)
    if not lengths or trace.origin != "measured":
        return None
    low, high = lengths[len(lengths) // 10], lengths[-1 - len(lengths) // 10]
    step_ns = statistics.fmean(lengths) if sends_in_some(trace, transport) else statistics.median(lengths)
    return Estimate(step_ns, min(low, step_ns), max(high, step_ns))


def _plan(trace: Trace, transport: Arm | None) -> tuple[Plan, tuple[str, ...]]:
    try:
        return Plan.of(trace, transport), ()
    except ValueError:
        return Plan.ddp(), ("the run does not record its buckets: DDP's buckets (1 MiB, then 25 MiB) are assumed",)


def job(
    trace: Trace,
    transport: Arm | None = None,
    *,
    plan: Plan | None = None,
    cost: Cost | None = None,
    copy_byte_ns: float | None = None,
) -> Job:
    """Prepare a run for questions. cost: given if no cost is to be fitted, as for a layer log.

    plan: None: as recorded. With a fit, as many of its operations share the link as the fit found. transport: None: the
    first that recorded its operations. copy_byte_ns: as in fit. Uncertain clocks are aligned by the operations. Raises
    ValueError if the run has no operation to fit a cost to, or no step with gradient readiness, or lacks a rank.
    """
    trace = aligned(trace)
    if cost is not None:
        return _ready(
            trace,
            transport,
            plan,
            cost,
            ("no cost was fitted to a run: answers follow the formulas alone, without intervals",),
        )
    arms = [arm for arm in trace.arms if arm.real] if transport is None else [Arm.parse(transport)]
    without = unheard(trace, arms[0]) if arms else ""
    if without:
        raise ValueError(f"{without}: waiting for the last rank cannot be told from the time of an operation")
    if not_matched(trace):
        raise ValueError(not_matched(trace))
    one_host = host_count(trace) == 1 < trace.size
    fitted = fit(trace, transport, ranks_per_host=1 if one_host else None, copy_byte_ns=copy_byte_ns)
    notes = [*trace.incomplete, *([f"the fit is poor: {fitted.reason}"] if fitted.reason else [])]
    notes += unlike_simulated(trace, fitted.transport)
    kept_ns, step_ns = _kept_ns(trace, fitted.transport)
    if kept_ns >= KEPT_SHARE * step_ns:
        notes.append(
            f"waiting for the script's own calls ({ms(kept_ns)} a step) stays as recorded, whatever the link: answers "
            "change with the gradients alone"
        )
    if one_host:
        notes.append(
            "all ranks shared a host: each is assumed to have its own host, and their shared path counts as the link"
        )
    made = _ready(trace, fitted.transport, plan, fitted.cost, (*notes, *fitted.notes))
    probed = achievable_bandwidth(trace)
    made = replace(
        made,
        plan=replace(made.plan, in_flight=fitted.in_flight),
        fit=fitted,
        lane_bps=None if probed is None else probed.points[0][1] / probed.points[0][0],
        measured_ns=_measured(trace, fitted.transport),
        at_ends=_at_ends(trace, made.plan, fitted),
    )
    recorded, _ = _plan(trace, fitted.transport)
    return _with_misfit(made, replace(recorded, in_flight=fitted.in_flight))


def _with_misfit(made: Job, recorded: Plan) -> Job:
    """The job with its misfit under the plan of the run, and a note about it."""
    try:
        why = misfit(replace(made, plan=recorded))
    except ValueError:  # the answer about the run as recorded says why it is refused
        return made
    poor = f"the fit is poor: {why}, more than {percent(MISFIT_MAX, digits=0)} of the measured one"
    return replace(made, misfit=why, notes=(poor, *made.notes)) if why else made


def unlike_simulated(trace: Trace, arm: Arm) -> list[str]:
    """How the steps of an arm are unlike simulated ones, which send every bucket once."""
    times, lacking = rounds(trace, arm), part_lacking(trace, arm)
    found = []
    if times > 1:
        found.append(
            f"a step reduces its buckets {times} times: only the last time is simulated, so steps are too short"
        )
    if lacking > SILENT_PART:
        found.append(f"{percent(lacking)} of the steps do not send all gradients: simulated steps do, and are too long")
    return found


def refusal(made: Job) -> str:
    """Why a report predicts nothing from a job, beside its misfit; "" if it does."""
    if made.fit is None:
        return "no run was fitted"
    unlike = unlike_simulated(made.trace, made.fit.transport)
    return made.fit.reason or (unlike[0].partition(":")[0] if unlike else "")


def _kept_ns(trace: Trace, transport: Arm) -> tuple[float, float]:
    """(ns in which the training thread waits for calls of the script, ns of the step): means of an arm's steps."""
    keys = {one.key for one in trace.collectives if one.by_script}
    steps = [step for step in trace.steps if step.arm == transport]
    waits = (end - begin for step in steps for key, begin, end in step.waits if key in keys)
    count = max(1, len(steps))
    return sum(waits) / count, sum(step.duration_ns for step in steps) / count


def _ready(trace: Trace, transport: Arm | None, plan: Plan | None, cost: Cost, notes: tuple[str, ...]) -> Job:
    if plan is None:
        plan, doubt = _plan(trace, transport)
        notes = (*doubt, *notes)
    load = workload(trace, transport, cost.contention)
    load = replace(load, steps=load.steps[:: math.ceil(len(load.steps) / STEPS_MAX)])
    ranks = len(load.ranks)
    steps = ranks * math.ceil(_steps(load) / ranks)  # the same number from each rank
    alone = simulate(load, plan, Cost.free(), workers=1, steps=steps)
    return Job(trace, load, plan, cost, trace.size, outcome(alone).step_ns, transport, notes=notes)


def _at_ends(trace: Trace, plan: Plan, fitted: Fit) -> tuple[Job, ...]:
    """The job at either end of the fit's contention."""
    known = fitted.contention
    if known is None or known.low == known.high:
        return ()
    costs = [replace(fitted.cost, contention=end) for end in (known.low, known.high)]
    return tuple(_ready(trace, fitted.transport, plan, cost, ()) for cost in costs)


# Inverse questions: the least value that reaches an aim, with the interval of the fit.

# A gain up to this part of the step counts as none.
NEGLIGIBLE_GAIN = 0.01
# Bisection steps: a range of 10^6 is resolved to 0.2 %.
HALVINGS = 13


@dataclass(frozen=True, slots=True)
class LeastValue:
    """Answer to an inverse question: the least value that reaches the aim, with its interval.

    value is None if no value reaches it, if there is no answer (`refused`), or if the run as recorded reaches it
    (`reached`); `reason` says why. An interval end that was not found is inf.
    """

    question: str
    aim: str
    value: Estimate | None
    reason: str = ""
    interval: bool = True
    label: str = PREDICTED
    workers: int = 0
    ranks_per_host: int = 1
    link_bps: float | None = None
    refused: bool = False
    reached: bool = False


def _search(meets: Callable[[float], bool], low: float, high: float, integer: bool) -> float:
    """Least value in [low, high] that meets the aim, by bisection of the logarithm. `high` must meet it, `low` not."""
    for _ in range(HALVINGS if not integer else max(1, math.ceil(math.log2(high)))):
        if integer and high - low <= 1:
            break
        middle = float(round((low + high) / 2)) if integer else math.sqrt(low * high)
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class Aim:
    """Aim of an inverse question. question: kind and unit; span: search range; whole: integers only."""

    question: str
    title: str
    span: tuple[float, float]
    whole: bool = False


def least(job: Job, aim: Aim, make: Callable[[float], Setting], limit_ns: Callable[[IntervalEnd], float]) -> LeastValue:
    """The least value whose setting has a step of at most limit_ns, also at each end of the sources of error.

    Above the least value of the span, a larger value must never make a step longer.
    """
    low, high = aim.span
    best = make(high)
    unmet = LeastValue(aim.question, aim.title, None, workers=best.workers, ranks_per_host=best.cost.ranks_per_host)
    unmet = replace(unmet, label=label_of(job, best.cost))
    try:
        reached_ns = simulate_setting(job, best).step_ns
    except ValueError as error:
        return replace(unmet, reason=str(error), refused=True)

    def step_ns(end: IntervalEnd, value: float) -> float:
        setting = make(value)
        try:
            return simulate_setting(end.job, setting, end.apply(setting.cost)).step_ns
        except ValueError:
            return math.inf  # an operation exceeds the simulation's limit, which the best setting did not

    def found(end: IntervalEnd) -> float:
        bound_ns = limit_ns(end)

        def meets(value: float) -> bool:
            return step_ns(end, value) <= bound_ns

        if meets(low):  # a codec can make all other values slower
            return low
        return _search(meets, low, high, aim.whole) if meets(high) else math.inf

    itself = IntervalEnd("", job)
    value = found(itself)
    if math.isinf(value):
        most = scaling(job, min(reached_ns, step_ns(itself, low)))
        return replace(unmet, reason=f"at most {percent(most, digits=1)} is reached")
    others = interval_ends(job, best.cost)
    between = interval(value, others, [found(end) for end in others])
    between = replace(between, low=max(low, between.low))  # ends combined in quadrature can exceed the range
    return replace(unmet, value=between, interval=bool(others))
