"""Settings for each what-if question, and the aims of the inverse questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType

from netbottleneck.analysis.comparisons import Estimate, widened
from netbottleneck.analysis.rule_facts import Predicted
from netbottleneck.analysis.thresholds import GAIN_MIN
from netbottleneck.trace.model import Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.units import gbit, ms, nbytes, percent, streams
from netbottleneck.whatif import questions
from netbottleneck.whatif.cost import UNLIMITED, Cost, Link
from netbottleneck.whatif.fit import achievable as probed_link
from netbottleneck.whatif.plan import FUSION_BYTES, Plan
from netbottleneck.whatif.questions import (
    NEGLIGIBLE_GAIN,
    Aim,
    Answer,
    IntervalEnd,
    Job,
    LeastValue,
    Setting,
    answer,
    estimates,
    interval,
    interval_ends,
    least,
    now,
    simulate_setting,
)

__all__ = [
    "Answers",
    "Codec",
    "achievable",
    "answers",
    "chosen",
    "compression",
    "cycles",
    "enough_link",
    "free",
    "full_use",
    "fusions",
    "grid",
    "least_compression",
    "least_lanes",
    "least_link",
    "links",
    "now",
    "or_as_recorded",
    "per_host",
    "ranks_per_host",
    "workers",
]

# Search ranges of the inverse questions.
LINK_BPS = (1e6, 1e13)
RATIO = (1.0, 1e4)
LANES_MAX = 256


@dataclass(frozen=True, slots=True)
class Codec:
    """Ns a byte of encoding before sending and of decoding after receiving; per uncompressed byte."""

    encode_byte_ns: float = 0.0
    decode_byte_ns: float = 0.0


def _setting(job: Job, question: str, title: str, cost: Cost | None = None, **other: object) -> Setting:
    return replace(Setting(question, title, job.plan, cost or job.cost, job.workers), **other)  # type: ignore[arg-type]


def with_link(cost: Cost, bps: float) -> Cost:
    """The same cost over a fully used link of rate `bps`."""
    return replace(cost, link=Link(bps))


def chosen(job: Job, title: str) -> Setting:
    """The recorded run with the job's plan and cost, which were given instead of its own."""
    return _setting(job, "chosen", title)


def full_use(job: Job, bps: float) -> Setting:
    """The job's link at its nominal or another rate, fully used."""
    return _setting(job, "full use", f"this link, {gbit(bps)}, fully used", with_link(job.cost, bps))


def achievable(job: Job) -> Iterator[Setting]:
    """The probe's rate instead of the achieved one; nothing without a probe."""
    link = job.fit.achievable if job.fit is not None else None
    if link is not None:
        title = f"the probe's rate, {gbit(link.rate_bps)}"
        yield _setting(job, "achievable", title, replace(job.cost, link=link))


def links(job: Job, speeds_bps: Sequence[float]) -> Iterator[Setting]:
    """Other links, fully used."""
    for bps in speeds_bps:
        cost = with_link(job.cost, bps)
        yield _setting(job, "link", f"{bps / 1e9:g} Gbit/s", cost, remarks=_remarks(cost))


def workers(job: Job, counts: Sequence[int]) -> Iterator[Setting]:
    """Other numbers of workers, each on its own host unless the cost says otherwise."""
    for count in counts:
        yield _setting(job, "workers", f"{count} workers", workers=count, remarks=_remarks(job.cost))


def with_ranks_per_host(job: Job, ranks: int, algorithm: str | None = None) -> Job:
    """The same job with `ranks` ranks on each host, which share its link.

    algorithm: None: a ring among hosts of one rank each becomes two-level. One on hosts of several ranks stays a ring.
    """
    alone = job.cost.algorithm == "ring" and job.cost.ranks_per_host == 1
    chosen = algorithm or ("two_level" if ranks > 1 and alone else job.cost.algorithm)
    return replace(job, cost=replace(job.cost, ranks_per_host=ranks, algorithm=chosen))


def per_host(cost: Cost) -> str:
    """The ranks on each host, and two levels of its all-reduce, as text."""
    levels = ", two levels" if cost.algorithm == "two_level" and cost.ranks_per_host > 1 else ""
    return f"{cost.ranks_per_host} ranks per host{levels}"


def _host_remarks(cost: Cost) -> tuple[str, ...]:
    known = cost.host_bps is not None or cost.ranks_per_host == 1
    return () if known else ("communication inside a host is assumed to take no time: it was not measured",)


def _codec_remarks(cost: Cost) -> tuple[str, ...]:
    free = cost.ratio != 1.0 and cost.encode_byte_ns == cost.decode_byte_ns == 0.0
    return ("encoding and decoding are assumed to take no time",) if free else ()


def _remarks(cost: Cost) -> tuple[str, ...]:
    return (*_host_remarks(cost), *_codec_remarks(cost))


def ranks_per_host(job: Job, counts: Sequence[int], algorithm: str | None = None) -> Iterator[Setting]:
    """The same workers on fewer hosts; counts above the number of workers are left out. algorithm: None: the job's."""
    for count in counts:
        if count <= job.workers:
            cost = with_ranks_per_host(job, count, algorithm).cost
            yield _setting(job, "ranks per host", per_host(cost), cost, remarks=_host_remarks(cost))


def fusions(job: Job, sizes_bytes: Sequence[int]) -> Iterator[Setting]:
    """DDP's rule with other limits."""
    for size in sizes_bytes:
        plan = Plan.ddp(size, min(Plan.ddp().first_bytes, size), job.plan.in_flight)
        yield _setting(job, "fusion", f"buckets of {nbytes(size)}", plan=plan, remarks=_remarks(job.cost))


def cycles(job: Job, cycles_ns: Sequence[int]) -> Iterator[Setting]:
    """Horovod's rule with other cycles."""
    for cycle_ns in cycles_ns:
        plan = Plan.horovod(FUSION_BYTES, cycle_ns, job.plan.in_flight)
        title = f"Horovod, cycle {ms(cycle_ns)}"
        yield _setting(job, "cycle", title, plan=plan, remarks=_remarks(job.cost))


def compressed(cost: Cost, ratio: float, codec: Codec) -> Cost:
    """Cost with compression. A ratio of 1 means no compression and no codec."""
    if ratio == 1.0:
        return replace(cost, ratio=1.0, encode_byte_ns=0.0, decode_byte_ns=0.0)
    return replace(cost, ratio=ratio, encode_byte_ns=codec.encode_byte_ns, decode_byte_ns=codec.decode_byte_ns)


def compression(job: Job, ratios: Sequence[float], codec: Codec) -> Iterator[Setting]:
    """Fewer bytes on the wire, by each ratio."""
    for ratio in ratios:
        made = compressed(job.cost, ratio, codec)
        yield _setting(job, "compression", f"compression {ratio:g}x", made, remarks=_codec_remarks(made))


def free(job: Job) -> Setting:
    """Upper bound of what any network could gain."""
    return _setting(job, "free", "communication that takes no time", Cost.free())


def grid(
    job: Job, counts: Sequence[int], speeds_bps: Sequence[float], ratios: Sequence[float], codec: Codec
) -> Iterator[Setting]:
    """Each compression, then number of workers, then fully used link: the order of compat2020.sweep."""
    for ratio, count, bps in product(ratios, counts, speeds_bps):
        title = f"{count} workers, {bps / 1e9:g} Gbit/s, {ratio:g}x"
        cost = compressed(with_link(job.cost, bps), ratio, codec)
        yield _setting(job, "grid", title, cost, workers=count, remarks=_remarks(cost))


def ideal_overlap(job: Job, base: Answer) -> Answer:
    """Ideal overlap of communication and compute: the longer of the two, for any order of gradients."""
    setting = replace(base.setting, question="overlap", title="all communication overlapped with compute")
    if base.outcome is None or base.step_s is None:
        return replace(base, setting=setting)
    found = base.outcome
    others = interval_ends(job, base.setting.cost)
    nothing = replace(base.setting, cost=Cost.free())

    def longer(end: IntervalEnd) -> float:
        # Either communication scales, by the ratio of the steps' residual, or its line or the compute differs.
        busy_ns = found.communication_ns * end.slower
        if end.line is not None:
            busy_ns = simulate_setting(job, base.setting, end.apply(base.setting.cost)).communication_ns
        return max(simulate_setting(end.job, nothing).step_ns, busy_ns)

    value_ns = longer(IntervalEnd("", job))
    step, factor = estimates(job, value_ns, others, [longer(end) for end in others])
    overlapped = replace(found, step_ns=value_ns, communication_end_ns=value_ns)
    return Answer(setting, overlapped, step, factor, base.interval, base.label, base.notes)


def answers(job: Job, settings: Iterator[Setting] | Sequence[Setting]) -> tuple[Answer, ...]:
    """Each setting's answer."""
    return tuple(answer(job, setting) for setting in settings)


def _to_target(target: float) -> Callable[[IntervalEnd], float]:
    return lambda end: end.job.alone_ns / target


def least_link(job: Job, target: float) -> LeastValue:
    """The slowest fully used link, in bits a second, with a scaling factor of at least `target`."""
    aim = Aim("least link", f"a scaling factor of {target:g}", LINK_BPS)
    return least(job, aim, lambda bps: next(links(job, [bps])), _to_target(target))


def least_compression(job: Job, target: float, codec: Codec) -> LeastValue:
    """The least compression ratio at the achieved rate."""
    aim = Aim("least compression", f"a scaling factor of {target:g}", RATIO)
    return least(job, aim, lambda ratio: next(compression(job, [ratio], codec)), _to_target(target))


def least_lanes(job: Job, target: float, link_bps: float | None) -> LeastValue:
    """The fewest network streams, each at the rate of one probe stream, capped by the link."""
    aim = Aim("least lanes", f"a scaling factor of {target:g}", (1, LANES_MAX), True)
    lane_bps = job.lane_bps
    if lane_bps is None:
        reason = "the rate of one stream is not known: the run has no probe"
        return LeastValue(aim.question, aim.title, None, reason, workers=job.workers, refused=True)

    def make(count: float) -> Setting:
        link = Link(link_bps if link_bps is not None else LINK_BPS[1], int(count), lane_bps)
        return _setting(job, "lanes", streams(int(count)), replace(job.cost, link=link))

    return least(job, aim, make, _to_target(target))


def or_as_recorded(recorded: Job, least: LeastValue, target: float, link_bps: float | None) -> LeastValue:
    """Return an answer, or that the run reaches the target where the answer is beyond the run's link.

    A run that moved more than its link's rate, as in bursts, can reach what full use of that rate does not.
    """
    most = link_bps if link_bps is not None and least.question == "least link" else LINK_BPS[1]
    beyond = least.value is None or least.value.value > most
    factor = answer(recorded, now(recorded)).scaling if beyond and not least.refused else None
    if factor is None or factor.value < target:
        return least
    return replace(least, value=None, reason=f"reached as recorded, at {percent(factor.value, digits=1)}", reached=True)


def enough_link(job: Job) -> LeastValue:
    """The link rate above which a faster link shortens the step by no more than NOTHING."""
    endless = next(links(job, [LINK_BPS[1]]))

    def limit_ns(end: IntervalEnd) -> float:
        return (1 + NEGLIGIBLE_GAIN) * simulate_setting(end.job, endless, end.apply(endless.cost)).step_ns

    aim = Aim("enough link", f"a faster link gains at most {percent(NEGLIGIBLE_GAIN, digits=0)}", LINK_BPS)
    return least(job, aim, lambda bps: next(links(job, [bps])), limit_ns)


# Savings: what a step would save if one cause of its length were gone.

# Sizes of DDP's buckets that are tried, up to this factor beyond the sizes that the fit is from.
BUCKET_BYTES = tuple(1 << power for power in range(18, 29))
BEYOND_FIT = 4


def _saved(job: Job, change: Callable[[Cost], Cost], plan: Plan) -> Estimate:
    """Ns a step that a change of the cost, or another plan, saves.

    The interval covers the fit's residual, its contention, the lines that explain the run as well, and the difference
    of the simulated step from the measured one.
    """

    def at(end: IntervalEnd, cost: Cost) -> float:
        before = replace(now(end.job), cost=end.apply(cost), plan=job.plan)
        after = replace(before, cost=end.apply(change(cost)), plan=plan)
        return simulate_setting(end.job, before).step_ns - simulate_setting(end.job, after).step_ns

    itself = IntervalEnd("", job)
    value = at(itself, job.cost)
    sources: dict[str, list[float]] = defaultdict(list)
    for end in interval_ends(job, job.cost):
        # A change is of the line's own cost: some depend on its rate.
        sources[end.source].append(at(end, job.cost) if end.line is None else at(itself, end.line))
    if job.measured_ns is not None:
        sources["model"] = [value * job.measured_ns.value / simulate_setting(job, now(job)).step_ns]
    return widened(value, [ends for ends in sources.values() if ends])


def _without_link(cost: Cost, link_bps: float) -> Cost:
    """The cost without the part of a byte's time that the link takes: 1 / rate - 1 / link."""
    rest = 1 / cost.link.rate_bps - 1 / link_bps
    return with_link(cost, 1 / rest if rest > 0 else UNLIMITED)


def _at_times_the_rate(factor: float, cost: Cost) -> Cost:
    return with_link(cost, factor * cost.link.rate_bps)


def _without_latency(cost: Cost) -> Cost:
    return replace(cost, fixed_ns=0.0, alpha_ns=0.0, host_alpha_ns=0.0, launch_ns=0.0)


def _bucket_plans(job: Job) -> Iterator[tuple[str, Plan]]:
    """DDP's plans with buckets of sizes near those that the run measured."""
    low, high = job.cost.fitted_bytes or (0, 0)
    sizes = [size for size in BUCKET_BYTES if low / BEYOND_FIT <= size <= high * BEYOND_FIT]
    for setting in fusions(job, sizes):
        yield setting.title, setting.plan


def _compute_as_recorded(job: Job) -> Job:
    """The job with its compute as recorded: time that traffic takes from compute is a cause of its own."""
    cost = replace(job.cost, contention=1.0)
    same = questions.job(job.trace, job.transport, plan=job.plan, cost=cost)
    lines = () if job.fit is None else tuple(replace(other, contention=1.0) for other in job.fit.others)
    fit = None if job.fit is None else replace(job.fit, others=lines)
    same = replace(same, fit=fit, measured_ns=job.measured_ns)
    return replace(same, misfit=questions.misfit(same))


def _costs(job: Job) -> str:
    """Sentence: the fitted time of an operation beside its bytes, and the rate of these; "" if they are not known."""
    ends, cost = interval_ends(job, job.cost), job.cost
    if cost.alpha_ns or cost.host_alpha_ns or cost.host_bps or cost.link.rate_bps >= UNLIMITED:
        return ""
    others = [end.apply(cost) for end in ends]
    alpha = interval(cost.fixed_ns + cost.launch_ns, ends, [one.fixed_ns + one.launch_ns for one in others])
    rate = interval(cost.link.rate_bps, ends, [one.link.rate_bps for one in others])
    each = f"{ms(alpha.value)} ({ms(alpha.low)} to {ms(alpha.high)})"
    high = "any rate" if rate.high >= UNLIMITED else gbit(rate.high)
    return (
        f" An operation takes {each} beside its bytes, which move at {gbit(rate.value)} ({gbit(rate.low)} to {high})."
    )


def savings(
    trace: Trace, arm: Arm | None, link_bps: float | None, faster: Mapping[str, float] = MappingProxyType({})
) -> Predicted:
    """Predict what a step of an arm would save without each cause that the engine can remove.

    link: no time on a link of link_bps; latency: no time per operation; rate: that of the fastest probe; free: no
    communication time; buckets: the best of the plans tried; each name in faster: a rate so many times as high. Savings
    that the fit is too poor for are left out, with the reason.
    """
    try:
        found = questions.job(trace, arm)
        why = questions.refusal(found)
        if why:
            return Predicted(refused=f"no prediction: {why.partition(';')[0].partition(':')[0]}")
        changes: dict[str, Callable[[Cost], Cost]] = {"latency": _without_latency, "free": lambda _: Cost.free()}
        if link_bps is not None:
            changes["link"] = lambda cost: _without_link(cost, link_bps)
        changes |= {name: partial(_at_times_the_rate, factor) for name, factor in faster.items()}
        probed = probed_link(trace)
        if probed is not None:
            changes["rate"] = lambda cost: replace(cost, link=probed)
        alone = _compute_as_recorded(found)
        if alone.misfit:
            return Predicted(refused=f"no prediction: {alone.misfit}")
        off_ns, step_ns = questions.misfit_ns(alone), 0.0 if alone.measured_ns is None else alone.measured_ns.value
        saved = {name: _saved(alone, change, alone.plan) for name, change in changes.items()}
        plans = [(_saved(alone, lambda cost: cost, plan), title) for title, plan in _bucket_plans(alone)]
        best = max(plans, key=lambda row: row[0].value, default=None)
        if best is None:
            return Predicted(saved, costs=_costs(found))
        if best[0].value - off_ns < GAIN_MIN * step_ns <= best[0].value:
            why = f"no prediction: another size may save {ms(best[0].value)}; the simulated step is off by {ms(off_ns)}"
            return Predicted(saved, no_buckets=why, costs=_costs(found))
        other = replace(best[0], low=best[0].low - off_ns, high=best[0].high + off_ns)
        return Predicted({**saved, "buckets": other}, buckets=best[1], costs=_costs(found))
    except ValueError as error:
        return Predicted(refused=str(error))


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers about a job.

    tables: (title, answers). least_values: answers of inverse questions. missing: questions without an answer, and why.
    """

    job: Job
    tables: tuple[tuple[str, tuple[Answer, ...]], ...]
    least_values: tuple[LeastValue, ...] = ()
    missing: tuple[str, ...] = ()

    def of(self, question: str) -> Answer | None:
        """The first answer to this kind of question that was not refused."""
        found = (one for _, own in self.tables for one in own if one.setting.question == question)
        return next((one for one in found if not one.refused), None)
