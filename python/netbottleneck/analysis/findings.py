"""Findings: all numbers that a report or a verdict needs, computed once from a trace. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from netbottleneck.analysis import nccl
from netbottleneck.analysis.arrivals import Lateness, aligned, clock_error_ns, lateness
from netbottleneck.analysis.bandwidth import (
    Achievable,
    Achieved,
    achievable_bandwidth,
    achieved_bandwidth,
    bus_factor,
    stated_link_bps,
)
from netbottleneck.analysis.comparisons import (
    Costs,
    Estimate,
    Floats,
    Paired,
    Scaling,
    Travel,
    above_usual,
    by_block,
    compare,
    compare_blocks,
    costs,
    headroom,
    latency_share,
    mean_of_delays,
    mean_of_steps,
    mean_of_typical,
    scaling_factor,
    sends_in_some,
    step_times,
    travels,
)
from netbottleneck.analysis.hidden import saved_by_undisturbed
from netbottleneck.analysis.intervals import (
    WARMUP_STEPS,
    Exposed,
    Layer,
    Split,
    counted,
    is_split,
    last_entries,
    layers,
    missing_ranks,
    not_matched,
    passes,
    split_steps,
    total,
    typical,
    typical_lengths,
    unheard,
    within_hosts,
)
from netbottleneck.analysis.joins import Join, joins
from netbottleneck.analysis.thresholds import (
    BURST_S,
    DELAYED,
    DELAYED_STEPS_MIN,
    GAIN_MIN,
    HANDICAP_MAX,
    LINK_EXCEEDED,
    LINK_EXCEEDED_AT_TIMES,
    LINK_USED,
    LINK_USED_IN_BURSTS,
    STEPS_MIN,
    TIMEOUT_NS,
)
from netbottleneck.analysis.traffic import ArmLink, on_interface
from netbottleneck.trace.model import NOT_RECORDED, Collective, Rank, Step, Trace
from netbottleneck.trace.transports import BARE, NULL, STOCK, Arm
from netbottleneck.units import gbit


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an arm's step: means over the middle half of its steps, or over all if it is one of Findings.mixed.

    compute + exposed + wait + other = step.
    own_ns: our own work between two steps, beside the step. transfer_ns: time in which operations moved data.
    """

    step_ns: float
    compute_ns: float
    communication_ns: float
    hidden_ns: float
    exposed_ns: float
    wait_ns: float
    other_ns: float
    input_ns: float
    optimizer_ns: float
    evaluation_ns: float
    checkpoint_ns: float
    skew_ns: float
    tensor_bytes: float
    operations: float
    small_ns: float
    small_bus_bytes: float
    small_operations: float
    own_ns: float
    transfer_ns: float
    unsized: float
    steps: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of an arm's counted steps. Each step is the median over its ranks."""

    median_ns: float
    mean_ns: float
    p10_ns: float
    p90_ns: float
    steps: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Delays:
    """How much longer than usual a part of single steps is, in ns a step.

    mean_ns: over all steps; rest_ns: the mean of all steps without it. usual_ns: that part without it, over the middle
    half of the steps.
    """

    mean_ns: Estimate
    rest_ns: float
    usual_ns: Estimate


@dataclass(frozen=True, slots=True)
class Findings:
    """The numbers of a run.

    trace: the run, with uncertain clocks aligned by its operations. link_bps: of base. mixed: the arms that
    send in some steps only, whose mean step stands for them. links: of each arm, as far as their rates are known; {} if
    that of base is not. clock_error_ns: largest error of a time difference
    between two ranks. base: the arm that the verdict is about, or None if no step could be split into parts. share: the
    exposed or waiting part of base's steps together; moving_share: without what waits for the last rank. parts_ns: the
    parts of base's step that a verdict is about, with intervals; of PHASES, on the rank where they take longest in a
    step, of those that are not late step after step, and at most what the step saves if no rank has them.
    late_ns: by rank, how long the mean step of the other ranks waits for it. waiting_ns: by rank, how long its mean
    step waits for the last rank. cores_used: by rank, the cores that it keeps busy in base's steps. lateness: of the
    ranks, over base's steps. comparisons: base against each other arm. handicap: the untouched script against base.
    headroom: base against no communication. slowed: forward and backward without communication against those of base;
    undisturbed: what base's step saves without that, None if the record does not tell.
    cores_busy: the part of one machine's cores that its ranks keep busy during base's steps, over all threads of a
    rank. script_ns: exposed ns a step of the script's own calls of torch.distributed. received_ns, within_ns: those of
    receives, in which a rank may wait for the sender, and of operations within hosts. gradient_operations: all others
    of base a step. starved: ns of compute a step in which a
    rank's process had no core. delays: of single steps of base, while data move after the last rank arrived; None if
    the usual steps cannot be told. input_delays: the same before the forward; None if they are too few. whole: the
    parts of the mean of all recorded steps, not of the middle half; without the first ones of blocks where transports
    alternate. mean_ns: of the same steps, with those of the untouched script where it takes turns. nccl: split of the
    operations that NCCL reported within steps. joins: the operations of a flight recorder's dumps.
    unheard: by arm, the ranks that recorded too little of it to tell waiting for them from transfer.
    """

    trace: Trace
    times: Mapping[Arm, StepTime]
    parts: Mapping[Arm, Parts]
    achieved: Mapping[Arm, Achieved]
    achievable: Achievable | None
    link_bps: float | None
    scaling: Mapping[Arm, Scaling]
    mixed: frozenset[Arm] = frozenset()
    links: Mapping[Arm, ArmLink] = field(default_factory=dict)
    link_disproved: bool = False  # the trace states a rate of the link, but more moved
    costs: Mapping[str, Costs] = field(default_factory=dict)
    travels: Mapping[Arm, tuple[Travel, ...]] = field(default_factory=dict)
    base: Arm | None = None
    clock_error_ns: float = 0.0
    share: Estimate | None = None
    moving_share: Estimate | None = None
    parts_ns: Mapping[str, Estimate] = field(default_factory=dict)
    late_ns: Mapping[int, float] = field(default_factory=dict)
    waiting_ns: Mapping[int, float] = field(default_factory=dict)
    cores_used: Mapping[int, float] = field(default_factory=dict)
    lateness: Lateness | None = None
    comparisons: tuple[Paired, ...] = ()
    handicap: Paired | None = None
    headroom: Paired | None = None
    slowed: Paired | None = None
    undisturbed: Estimate | None = None
    script_ns: float = 0.0
    received_ns: float = 0.0
    within_ns: float = 0.0
    latency_share: Estimate | None = None
    gradient_operations: float = 0.0
    cores_busy: float | None = None
    starved: Estimate | None = None
    delays: Delays | None = None
    input_delays: Delays | None = None
    layers: tuple[Layer, ...] = ()
    whole: Parts | None = None
    mean_ns: float = 0.0
    nccl: tuple[nccl.NcclMean, ...] = ()
    joins: tuple[Join, ...] = ()
    unheard: Mapping[Arm, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Label of the numbers: "measured", or "predicted" for a simulated trace."""
        return "measured" if self.trace.origin == "measured" else "predicted"

    @property
    def not_recorded(self) -> str:
        """The note on communication that is not in the record; "" if there is none."""
        return next((note for note in self.trace.notes if NOT_RECORDED in note), "")

    @property
    def not_matched(self) -> str:
        """The note that the ranks' operations are not matched; "" if there is none."""
        return not_matched(self.trace)

    def typical_ns(self, time: StepTime) -> float:
        """Return the step of an arm: the median of its steps, or their mean if steps of some arm are mixed."""
        return time.mean_ns if self.mixed else time.median_ns

    @property
    def averaged(self) -> str:
        """The steps that `parts` are means of, as text."""
        mixed = [arm for arm in self.parts if arm in self.mixed]
        if not mixed:
            return "the middle half of the steps"
        others = len(mixed) < len(self.parts)
        return f"all steps of {', '.join(mixed)}, and the middle half of the others" if others else "all steps"

    @property
    def full_link_bps(self) -> float | None:
        """The busbw of a rank over base at which its link is full; None if the link is not known."""
        link = None if self.base is None else self.links.get(self.base)
        return self.link_bps if link is None else link.full_bps

    @property
    def link_burst_bytes(self) -> int | None:
        """Bytes that the link's cap lets through at once after a pause, if our shaping made the cap."""
        verified = self.trace.network.verified if self.trace.network else {}
        return (verified.get("many_flows") or {}).get("link_burst_bytes")

    @property
    def handicapped(self) -> bool:
        """True if gains over base must not be reported: base is surely slower than the script, by HANDICAP_MAX."""
        pair = self.handicap
        return pair is not None and pair.enough and pair.ratio.low > 1 and pair.ratio.value > 1 + HANDICAP_MAX


def _parts(splits: Sequence[Split]) -> Parts:
    def mean(name: str) -> float:
        return float(np.mean([getattr(s, name) for s in splits]))

    names = [n for n in Parts.__dataclass_fields__ if n != "steps"]
    return Parts(**{name: mean(name) for name in names}, steps=len(splits))


def _over_steps(
    splits: Iterable[Split], value: Callable[[Split], float], of_ranks: Callable[[list[float]], Any] = np.mean
) -> list[float]:
    """A value of each step in order of time. of_ranks: makes it of those of the step's ranks."""
    by_step: dict[tuple[int, int], list[float]] = defaultdict(list)
    for split in splits:
        by_step[split.block, split.index].append(value(split))
    return [float(of_ranks(values)) for _, values in sorted(by_step.items())]


# The parts of a step with intervals, by name. late: of the exposed and waiting part, before the last rank arrived.
PARTS: Mapping[str, Callable[[Split], float]] = {
    "step": lambda s: s.step_ns,
    "idle": lambda s: s.exposed_ns + s.wait_ns,
    "late": lambda s: s.skew_ns,
    "moving": lambda s: s.exposed_ns + s.wait_ns - s.skew_ns,
}
# Those that a step saves at most if they take no time on any rank.
PHASES: Mapping[str, Callable[[Split], float]] = {"input": lambda s: s.input_ns, "optimizer": lambda s: s.optimizer_ns}


def _delays(splits: Sequence[Split]) -> Delays | None:
    """By how much single steps move data for longer than usual; None if that is not known.

    Without a distance between the 10th and the 25th percentile, any step above it counts: if most do, they may be the
    usual ones. If none is above, and neither a timeout nor the usual time once more would be, most steps may be
    delayed.
    """
    moving, lengths = (np.asarray(_over_steps(splits, PARTS[part])) for part in ("moving", "step"))
    later, usual = above_usual(moving)
    low, count = float(np.percentile(moving, 10)), np.count_nonzero(later)
    most = usual <= low and 2 * count > len(moving)
    if most or (not count and DELAYED * (usual - low) > max(TIMEOUT_NS, usual)):
        return None
    return Delays(mean_of_delays(later), float((lengths - later).mean()), mean_of_typical(moving - later, lengths))


def _input_delays(splits: Sequence[Split], before_forward: Callable[[Split], float]) -> Delays | None:
    """By how much more than usual passes before the forward in single steps; None if too few or most have more."""
    before = np.asarray(_over_steps(splits, before_forward, max))
    lengths = np.asarray(_over_steps(splits, PARTS["step"]))
    later, _ = above_usual(before)
    if not DELAYED_STEPS_MIN <= np.count_nonzero(later) <= len(later) / 2:
        return None
    return Delays(mean_of_delays(later), float((lengths - later).mean()), mean_of_typical(before - later, lengths))


def _of_typical(
    splits: Sequence[Split], value: Callable[[Split], float], of_ranks: Callable[[list[float]], Any] = np.mean
) -> Estimate:
    """The mean of a value over the middle half of the steps. of_ranks: as in `_over_steps`."""
    lengths = [length for _, length in sorted(typical_lengths(splits).items())]
    return mean_of_typical(_over_steps(splits, value, of_ranks), lengths)


def _starved(rows: Sequence[Row]) -> Estimate | None:
    """Ns of compute a step in which the process had no core; None if processor time does not tell it.

    It does not where it was not recorded, or where a process used more of it than the step is long: several threads
    compute then, and some may lack a core while others run.
    """
    used = {(step.rank, step.index): step.cpu_ns for step, _, _ in rows}
    if not rows or any(ns is None for ns in used.values()):
        return None
    splits = [split for _, split, _ in rows]
    for rank in {split.rank for split in splits}:
        own = [split for split in splits if split.rank == rank]
        if sum(used[rank, split.index] or 0 for split in own) > sum(split.step_ns for split in own):
            return None
    return _of_typical(splits, lambda s: max(0, s.compute_ns - (used[s.rank, s.index] or 0)))


def _saved_without(splits: Sequence[Split], phase: Callable[[Split], float]) -> Callable[[Split], float]:
    """A phase on a rank, at most what its step saves if no rank has that phase.

    That is the least sum, over the ranks, of the phase and the wait for the last rank: a rank with neither holds the
    others up as before.
    """
    least: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for split in splits:
        step = split.block, split.index
        least[step] = min(least[step], phase(split) + split.skew_ns)
    return lambda split: min(phase(split), least[split.block, split.index])


def _phases(splits: Sequence[Split], late: Lateness | None) -> Mapping[str, Callable[[Split], float]]:
    """PHASES, each at most what its step saves without it, where it is known who waits for whom."""
    return PHASES if late is None else {name: _saved_without(splits, phase) for name, phase in PHASES.items()}


def _parts_ns(
    splits: Sequence[Split], others: Sequence[Split], phases: Mapping[str, Callable[[Split], float]]
) -> dict[str, Estimate]:
    """others: of the ranks that are not late. What these take longer than each other in a phase, a step waits for."""
    parts = {name: _of_typical(splits, value) for name, value in PARTS.items()}
    return parts | {name: _of_typical(others, value, max) for name, value in phases.items()}


def _share(splits: Sequence[Split], part: str) -> Estimate:
    """A part of all steps together, by its name in PARTS, with its 95 % interval.

    The interval is that of a ratio of means, from the residuals (Cochran, Sampling Techniques, 6.4).
    """
    lost, steps = (np.asarray(_over_steps(splits, PARTS[each])) for each in (part, "step"))
    mean_ns = max(float(steps.mean()), 1.0)
    share = float(lost.mean()) / mean_ns
    apart = mean_of_steps(lost - share * steps)
    return Estimate(share, max(0.0, share + apart.low / mean_ns), min(1.0, share + apart.high / mean_ns))


def _passes(trace: Trace, arm: Arm, warmup: int) -> dict[int, Floats]:
    """By block: ns of forward and backward of each counted step of an arm."""
    own = [step for step in counted(trace, warmup) if step.arm == arm and is_split(step)]
    rows = ((step, (float(total(passes(step))),)) for step in own)
    return {block: steps[:, 0] for block, steps in by_block(rows).items()}


def _step_time(trace: Trace, arm: Arm, warmup: int) -> StepTime | None:
    blocks = step_times(trace, arm, warmup)
    if not blocks:
        return None
    steps = np.concatenate(list(blocks.values()))
    p10, p50, p90 = np.percentile(steps, [10, 50, 90])
    return StepTime(float(p50), float(steps.mean()), float(p10), float(p90), len(steps), len(blocks))


def _mixed(trace: Trace, arms: Iterable[Arm], warmup: int) -> frozenset[Arm]:
    return frozenset(arm for arm in arms if sends_in_some(trace, arm, warmup))


def _late(splits: Sequence[Split], size: int) -> dict[int, float]:
    """Ns a step that the mean other rank waits for each rank."""
    waited: dict[int, float] = defaultdict(float)
    for split in splits:
        for rank, ns in split.late_ns.items():
            waited[rank] += ns
    per_rank = len(splits) / max(size, 1)
    return {rank: ns / per_rank / max(size - 1, 1) for rank, ns in sorted(waited.items())}


def _waiting(splits: Sequence[Split]) -> dict[int, float]:
    """By rank: ns of its mean step before the last rank submitted the operation that it waits for."""
    skews: dict[int, list[int]] = defaultdict(list)
    for split in splits:
        skews[split.rank].append(split.skew_ns)
    return {rank: float(np.mean(own)) for rank, own in sorted(skews.items())}


def _busy(rank: int, steps: Sequence[Step]) -> float | None:
    """Number of cores that a rank keeps busy during its `steps`; None if CPU time was not recorded."""
    own = [step for step in steps if step.rank == rank]
    used = [step.cpu_ns for step in own if step.cpu_ns is not None]
    long_ns = sum(step.duration_ns for step in own)
    return sum(used) / long_ns if len(used) == len(own) and long_ns > 0 else None


def _cores_used(trace: Trace, steps: Sequence[Step]) -> dict[int, float]:
    """By rank: the cores that it keeps busy during `steps`, where it recorded its processor time."""
    used = {rank.rank: _busy(rank.rank, steps) for rank in trace.ranks}
    return {rank: busy for rank, busy in used.items() if busy is not None}


def _usable_cores(ranks: Sequence[Rank]) -> float:
    """The cores that the ranks of a machine may use together."""
    cores = float(len({core for rank in ranks for core in rank.cores}))
    quotas = {(rank.hostname, rank.quota_group): rank.quota_cores for rank in ranks}
    allowed = [quota for quota in quotas.values() if quota is not None]
    return min(cores, sum(allowed)) if len(allowed) == len(quotas) else cores


def _cores_busy(trace: Trace, steps: Sequence[Step]) -> float | None:
    """Part of a machine's cores, of those its ranks may run on, that the ranks keep busy during `steps`.

    Quotas of all its ranks' control groups, if they allow less, count as so many cores. The value of the busiest
    machine; None if any rank did not record it. The hosts of a lab share one machine.
    """
    machines: dict[str, list[Rank]] = defaultdict(list)
    for rank in trace.ranks:
        machines[rank.machine].append(rank)
    shares = []
    for ranks in machines.values():
        used = [busy for busy in (_busy(rank.rank, steps) for rank in ranks) if busy is not None]
        if len(used) < len(ranks) or not all(rank.cores for rank in ranks) or trace.origin != "measured":
            return None
        shares.append(sum(used) / _usable_cores(ranks))
    return max(shares, default=None)


def _in_bursts(rate: float, between_bps: float, moved: Achieved) -> bool:
    """True if a shaper of that rate can have let operations pass at a higher one: what it saved up in pauses.

    Or if the link is in use nearly all the time: operations that end before their bytes have left only seem faster.
    """
    saved_up_s = (between_bps / rate - 1) * moved.operation_s
    used = moved.average_bps / rate
    return used >= LINK_USED or (saved_up_s <= BURST_S and used >= LINK_USED_IN_BURSTS)


def between_hosts_bps(trace: Trace, moved: Achieved) -> float:
    """Return the active rate of an arm as far as any algorithm sends its bytes between hosts."""
    hosts = len({rank.host_id for rank in trace.ranks})
    return moved.active_bps * bus_factor("allreduce", hosts) / bus_factor("allreduce", trace.size)


def link_rate(trace: Trace, arm: Arm | None, moved: Achieved | None) -> tuple[float | None, str]:
    """Return the rate of the link that an arm uses, None if not known, and a note if a stated one is too low.

    moved: the arm's bandwidth. More than an interface's rate over whole steps disproves that rate, and so does much
    more in transfer, as far as any algorithm sends it between hosts, and more than the burst of a shaper.
    """
    rate = stated_link_bps(trace, arm)
    if trace.network is not None or rate is None or arm is None or moved is None:
        return rate, ""
    infos = [info for rank in trace.ranks for info in rank.transports if info.name == arm.transport]
    between = between_hosts_bps(trace, moved)
    if moved.average_bps > LINK_EXCEEDED * rate:
        seen = f"{gbit(moved.average_bps)} over whole steps"
    elif between > LINK_EXCEEDED_AT_TIMES * rate and not (
        all(info.interface_known for info in infos) and _in_bursts(rate, between, moved)
    ):
        seen = f"{gbit(between)} between hosts in transfer"
    else:
        return rate, ""
    return None, (
        f"the link's stated rate of {gbit(rate)} is not used: {arm} moved {seen}. "
        "Measure again with NETBOTTLENECK_LINK_GBPS, the true rate"
    )


def _links(
    trace: Trace, base_bps: float | None, achieved: Mapping[Arm, Achieved | None], warmup: int
) -> dict[Arm, ArmLink]:
    """The links of the arms, which may use other interfaces than the base. base_bps: the rate of that of the base."""
    if base_bps is None:
        return {}
    rates = {arm: link_rate(trace, arm, moved)[0] for arm, moved in achieved.items()}
    return {arm: ArmLink(bps, on_interface(trace, arm, warmup)) for arm, bps in _there(rates).items()}


def _base(trace: Trace, available: Mapping[Arm, object], times: Mapping[Arm, StepTime | None]) -> Arm | None:
    """Return stock, else the first real arm; one with too few steps only if no other has enough.

    An automatic run may leave stock after a block.
    """
    order = [arm for arm in (STOCK, *(arm for arm in trace.arms if arm.real), *trace.arms) if arm in available]
    enough = (arm for arm in order if arm.real and (found := times.get(arm)) and found.steps >= STEPS_MIN)
    return next(enough, next(iter(order), None))


def _scaling(trace: Trace, arm: Arm, splits: Sequence[Split]) -> Scaling | None:
    """The scaling factor of an arm; None if it would be estimated without all communication of a step."""
    found = scaling_factor(trace, arm, splits)
    known = found is None or found.measured or not any(NOT_RECORDED in note for note in trace.notes)
    return found if known else None


def _comparisons(common: Findings, base: Arm, warmup: int) -> tuple[Paired, ...]:
    """`base` against each other arm that moves gradients; none if base moves none: the arms are the same then."""
    if all(one.by_script for one in common.trace.collectives if one.arm == base):
        return ()
    others = [arm for arm in common.times if arm.real and arm != base]
    pairs = [compare(common.trace, base, arm, warmup) for arm in others]
    return tuple(pair for pair in pairs if pair is not None)


def _slowed(trace: Trace, base: Arm, warmup: int) -> Paired | None:
    """Forward and backward without communication against those of an arm."""
    return compare_blocks(NULL, base, _passes(trace, NULL, warmup), _passes(trace, base, warmup))


Row = tuple[Step, Split, Exposed]
T = TypeVar("T")


def _exposed_ns(rows: Sequence[Row], counts: Callable[[Collective], bool]) -> float:
    """Exposed ns a step of the operations that count."""
    return float(np.mean([sum(ns for one, ns in exposed if counts(one)) for _, _, exposed in rows]))


def _there(values: Mapping[Arm, T | None]) -> dict[Arm, T]:
    """The entries that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _of_others(splits: Sequence[Split], late: Lateness | None) -> Sequence[Split]:
    """The steps of the ranks that are not late step after step."""
    return splits if late is None else [split for split in splits if split.rank not in late.ranks]


def _lateness(common: Findings, base: Arm, splits: Sequence[Split]) -> Lateness | None:
    """Lateness of the ranks; None if it is not known which rank waits for which."""
    return None if common.not_matched or base in common.unheard else lateness(common.trace, base, splits)


def _about(common: Findings, base: Arm, rows: Sequence[Row], warmup: int) -> Findings:
    """`common` plus the numbers of `base`, whose counted steps are `rows`."""
    trace = common.trace
    middle = typical(rows, lambda row: row[1])
    splits, typical_splits = [row[1] for row in rows], [row[1] for row in middle]
    steps = {(step.rank, step.index) for step, _, _ in rows}
    own = [c for c in trace.collectives if c.arm == base and not c.by_script and (c.rank, c.step) in steps]
    sampled = [step for step in trace.steps if step.arm == base]
    late = _lateness(common, base, splits)
    others = _of_others(splits, late)
    phases = _phases(splits, late)
    slowed, within = _slowed(trace, base, warmup), within_hosts(trace)
    return replace(
        common,
        base=base,
        share=_share(splits, "idle"),
        moving_share=_share(splits, "moving"),
        parts_ns=_parts_ns(splits, others, phases),
        delays=_delays(splits),
        input_delays=_input_delays(others, phases["input"]),
        late_ns=_late(typical_splits, trace.size),
        waiting_ns=_waiting(typical_splits),
        cores_used=_cores_used(trace, [step for step, _, _ in rows]),
        lateness=late,
        comparisons=_comparisons(common, base, warmup),
        handicap=compare(trace, BARE, base, warmup) if base == STOCK else None,
        headroom=headroom(trace, base),
        slowed=slowed,
        undisturbed=saved_by_undisturbed(trace, base, splits, slowed),
        script_ns=_exposed_ns(middle, lambda one: one.by_script),
        received_ns=_exposed_ns(middle, lambda one: one.kind == "recv"),
        within_ns=_exposed_ns(middle, lambda one: one.match in within),
        latency_share=latency_share(own, last_entries(trace)),
        gradient_operations=len(own) / len(rows),
        starved=_starved(rows),
        cores_busy=_cores_busy(trace, [step for step, _, _ in rows]),
        layers=layers(trace, [(step, exposed) for step, _, exposed in middle], sampled),
    )


def _of_all_ranks(trace: Trace, rows: Sequence[Row]) -> list[Row]:
    """The steps that all ranks recorded; all steps if these are too few.

    In a step that a rank did not record, waiting for that rank cannot be told from transfer.
    """
    ranks = Counter((split.block, split.index) for _, split, _ in rows)
    whole = {step for step, count in ranks.items() if count == len(trace.ranks)}
    return [row for row in rows if (row[1].block, row[1].index) in whole] if len(whole) >= STEPS_MIN else list(rows)


def _by_arm(trace: Trace, warmup: int) -> tuple[dict[Arm, list[Row]], dict[Arm, list[Split]]]:
    """Return (the counted steps of each arm, the parts of all its steps), as far as all ranks recorded them."""
    every: dict[Arm, list[Row]] = defaultdict(list)
    for row in split_steps(trace, 0):
        every[row[0].arm].append(row)
    every = {arm: _of_all_ranks(trace, rows) for arm, rows in every.items()}
    chosen = {(step.rank, step.begin_ns) for step in counted(trace, warmup)}  # steps of one rank alone share numbers
    rows = {arm: [row for row in own if (row[0].rank, row[0].begin_ns) in chosen] for arm, own in every.items()}
    found = {arm: own for arm, own in rows.items() if own}
    return found, {arm: [row[1] for row in own] for arm, own in every.items()}


def _whole(arms: Iterable[Arm], base: Arm, rows: Sequence[Row], every: Sequence[Split]) -> Parts:
    """The parts of the mean step: of all steps, or of the counted ones where transports alternate."""
    return _parts([row[1] for row in rows] if sum(arm.real for arm in arms) > 1 else every)


def _mean_ns(trace: Trace, arms: Iterable[Arm], whole: Parts) -> float:
    """The mean step of `whole`, with the steps of the untouched script if no other transport takes turns."""
    observed = sum(arm.real for arm in arms) == 1
    bare = [step.duration_ns for step in trace.steps if step.arm == BARE and observed]
    return (whole.step_ns * whole.steps + sum(bare)) / (whole.steps + len(bare))


def _no_forward(trace: Trace, base: Arm | None) -> str:
    """A note if no forward pass of a script was recorded, where gradients were; "" else."""
    own = [step for step in trace.steps if step.arm == base]
    if not trace.of_script or any(step.forward for step in own) or not any(step.grad_ready for step in own):
        return ""
    of_ddp = any(bucket.name.startswith("ddp/") for bucket in trace.buckets)
    return "no forward pass was recorded: what is before the first gradient counts as compute. " + (
        "If torch.compile wraps the DDP model, call netbottleneck.attach on the result, or compile the module inside"
        if of_ddp
        else "It is that of one module that holds all parameters of the optimizer, and whose code Python runs"
    )


def _unheard(trace: Trace, arms: Iterable[Arm]) -> dict[Arm, str]:
    """Findings.unheard, of the arms that move gradients."""
    found = {arm: unheard(trace, arm) for arm in arms if arm.real}
    return {arm: ranks for arm, ranks in found.items() if ranks}


def _achieved(
    trace: Trace, splits: Mapping[Arm, Sequence[Split]], short: Collection[Arm]
) -> dict[Arm, Achieved | None]:
    """The bandwidth of each arm; None where transfer cannot be told from waiting for the last rank, as for `short`."""
    told = not (not_matched(trace) or missing_ranks(trace))
    return {
        arm: achieved_bandwidth(arm, typical(own, lambda split: split), own) if told and arm not in short else None
        for arm, own in splits.items()
    }


def find(trace: Trace, warmup: int = WARMUP_STEPS) -> Findings:
    """Compute the findings of a trace."""
    trace = aligned(trace)
    rows, every = _by_arm(trace, warmup)
    arms = list(dict.fromkeys([*trace.arms, *rows]))
    splits = {arm: [row[1] for row in rows[arm]] for arm in arms if arm in rows}
    short = _unheard(trace, arms)
    times = {arm: _step_time(trace, arm, warmup) for arm in arms}
    achieved = _achieved(trace, splits, short)
    factors = {arm: _scaling(trace, arm, splits.get(arm, ())) for arm in times if arm.real}
    parts = {arm: _parts(typical(own, lambda split: split)) for arm, own in splits.items()}
    base = _base(trace, parts, times)
    link_bps, doubt = link_rate(trace, base, None if base is None else achieved[base])
    common = Findings(
        trace=replace(trace, notes=(*trace.notes, *filter(None, (doubt, _no_forward(trace, base))))),
        clock_error_ns=clock_error_ns(trace),
        times=_there(times),
        parts=parts,
        achieved=_there(achieved),
        achievable=achievable_bandwidth(trace, _there(achieved).values()),
        link_bps=link_bps,
        links=_links(trace, link_bps, {arm: achieved.get(arm) for arm in arms}, warmup),
        link_disproved=bool(doubt),
        scaling=_there(factors),
        mixed=_mixed(trace, splits, warmup),
        costs=costs(trace),
        travels=travels(trace),
        nccl=nccl.means(trace),
        joins=joins(trace),
        unheard=short,
    )
    if base is None:
        return common
    whole = _whole(common.times, base, rows[base], every[base])
    about = _about(common, base, rows[base], warmup)
    return replace(about, whole=whole, mean_ns=_mean_ns(trace, common.times, whole))


def wins(pair: Paired) -> bool:
    """True if the other arm is faster: its interval excludes zero and its gain is at least GAIN_MIN."""
    return pair.enough and pair.gain.low > 0 and pair.gain.value >= GAIN_MIN


def best_gain(findings: Findings) -> Paired | None:
    """The comparison with the largest gain that may be reported, a sure one before others; None if there is none."""
    if findings.handicapped:
        return None
    won = (p for p in findings.comparisons if wins(p))
    return max(won, key=lambda p: (p.gain.low >= GAIN_MIN, p.gain.value), default=None)


def stock_is_as_good(findings: Findings) -> bool:
    """True if other arms were compared with enough pairs, and surely none gains GAIN_MIN or more."""
    tried = [p for p in findings.comparisons if p.enough]
    return bool(tried) and not findings.handicapped and all(p.gain.high < GAIN_MIN for p in tried)
