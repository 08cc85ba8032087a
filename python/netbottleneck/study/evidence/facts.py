"""Facts of a cell, computed from its run folder. This module measures nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis import comparisons, rule_facts, usage
from netbottleneck.analysis.comparisons import Estimate, Paired
from netbottleneck.analysis.intervals import (
    Intervals,
    Split,
    counted,
    intervals,
    passes,
    split_steps,
    subtraction,
    total,
    typical,
)
from netbottleneck.analysis.intervals import intervals as spans
from netbottleneck.analysis.usage import HostUse
from netbottleneck.report import Run
from netbottleneck.study.evidence import values
from netbottleneck.study.evidence.values import (
    ALONE,
    COMPUTED,
    INFLATION,
    NOTHING_MOVES,
    ArmFacts,
    CellFacts,
    Cpu,
    Curve,
    ForecastFacts,
    Nic,
    Outlook,
    Parts,
)
from netbottleneck.trace import counter_files
from netbottleneck.trace.counter_files import Counters
from netbottleneck.trace.model import Clock, Collective, Network, Step, Trace
from netbottleneck.trace.transports import BARE, NULL, PSEUDO, SINGLE, Arm
from netbottleneck.units import gbit
from netbottleneck.whatif import questions, sweeps
from netbottleneck.whatif.cost import Wire
from netbottleneck.whatif.questions import LeastValue

# Bytes that the ranks of a run sent, from three sources: the algorithm's formula, the engine, the kernel's counters.

# Ethernet, IPv4 and TCP with timestamps: bytes per packet that an interface counts beyond the payload.
HEADER_BYTES = 14 + 20 + 32
# A reading is up to one sampling interval from the end of a span: in shorter spans, in intervals, bytes are missed.
SPAN_READINGS = 10


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sent in the counted steps of a transport, in bytes of payload.

    model: from the formula of the algorithm that ran. engine: from the engine's own count. interface: from the kernel's
    counters of that host's interface, without headers; not known if blocks are short for its readings. None: not known.
    """

    rank: int
    transport: Arm
    algorithms: tuple[str, ...]
    model: float | None
    engine: int | None
    interface: float | None

    @property
    def ratio(self) -> float | None:
        """The interface's bytes divided by the model's."""
        return self.interface / self.model if self.interface is not None and self.model else None


def sent(run: Run) -> list[Sent]:
    """Return what each rank sent, with the model; interface counters are used only with one rank per host."""
    nets = _nets(run)
    pairs = sorted({(step.rank, step.arm) for step in run.trace.steps})
    return [_sent_by_rank(run.trace, rank, transport, nets.get(rank)) for rank, transport in pairs]


def _sent_by_rank(trace: Trace, rank: int, transport: Arm, net: Counters | None) -> Sent:
    mine = [c for c in trace.collectives if c.rank == rank and c.finished]
    steps = {step.index for step in counted(trace.of_rank(rank)) if step.arm == transport}
    own = [c for c in mine if c.arm == transport and c.step in steps]
    engine = _sum([c.wire_bytes for c in own])
    return Sent(
        rank,
        transport,
        _algorithms(own),
        _sum([sent_bytes(c.algorithm, trace.size, c.known_bytes) for c in own]),
        None if engine is None else int(engine),
        _interface_bytes(net, quiet_spans(trace, rank, own, mine)) if net is not None and own else None,
    )


def sent_bytes(algorithm: str | None, size: int, nbytes: int) -> float | None:
    """Return the payload bytes that one of `size` ranks sends, the mean over ranks; None for an unknown algorithm.

    algorithm None: stock, which is gloo's ring. Ring and halving-doubling: 2 S (n-1)/n (Thakur et al. 2005); recursive
    doubling with a power of two ranks: S log2(n).
    """
    power = size & (size - 1) == 0
    if size == 1:
        return 0.0
    if algorithm in (None, "ring all-reduce") or (algorithm == "halving-doubling" and power):
        return 2 * nbytes * (size - 1) / size
    if algorithm == "recursive doubling" and power:
        return float(nbytes * (size.bit_length() - 1))
    return None


def _algorithms(operations: Sequence[Collective]) -> tuple[str, ...]:
    return tuple(sorted({c.algorithm or "gloo's ring" for c in operations}))


def _nets(run: Run) -> dict[int, Counters]:
    """Return each rank's interface counters on rank 0's clock; {} unless each rank has a host of its own."""
    trace = run.trace
    if len({rank.host_id for rank in trace.ranks}) < len(trace.ranks) or not run.path.is_dir():
        return {}
    clocks = {rank.rank: rank.clock for rank in trace.ranks}
    found = {
        sample.rank: sample.on_rank_0(clocks.get(sample.rank, Clock())).net for sample in counter_files.of_run(run.path)
    }
    return {rank: net for rank, net in found.items() if net is not None}


def _sum(values: Sequence[float | None]) -> float | None:
    """Return the sum; None if a value is not known or there are no values."""
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


def quiet_spans(trace: Trace, rank: int, own: Sequence[Collective], all_of_rank: Sequence[Collective]) -> Intervals:
    """Return the time spans of some operations of a rank, one per block.

    A span begins and ends in the middle of the idle gap around the operations. A late reading of the counters therefore
    does no harm unless it is late by half of that gap.
    """
    block = {step.index: step.block for step in trace.steps if step.rank == rank}
    blocks: dict[int, list[Collective]] = defaultdict(list)
    for operation in own:
        if operation.step is not None:
            blocks[block[operation.step]].append(operation)
    return intervals(_quiet(inside, all_of_rank) for inside in blocks.values())


def _quiet(inside: Sequence[Collective], others: Sequence[Collective]) -> tuple[int, int]:
    first, last = min(c.submit_ns for c in inside), max(c.done_ns or 0 for c in inside)
    ends = [c.done_ns or 0 for c in others]
    before = max((end for end in ends if end <= first), default=first)
    after = min((c.submit_ns for c in others if c.submit_ns >= last), default=2 * last - first)
    return (before + first) // 2, (last + after) // 2


def _interface_bytes(net: Counters, spans: Intervals) -> float | None:
    """Return the payload that the busiest interface sent.

    None for the loopback, which all simulated hosts share, and if a span is short for the readings.
    """
    if not len(spans) or (spans[:, 1] - spans[:, 0]).min() < SPAN_READINGS * usage.sampling_interval_ns(net):
        return None
    uses = [usage.interface(net, name, "tx", spans, spans[:0]) for name in net.owners("tx_bytes")]
    busiest = max(uses, key=lambda use: use.bytes, default=None)
    if busiest is None or busiest.interface == usage.LOOPBACK or not busiest.bytes:
        return None
    return busiest.bytes - HEADER_BYTES * busiest.packets


# Counters of the hosts for one arm: interfaces, cores, bytes sent. Means over hosts.


def _ways(host: HostUse) -> dict[str, usage.Use]:
    """Return by direction the interface of a host that counts; {} if it has none."""
    ways = {use.way: use for use in host.interfaces if use.interface == host.busiest}
    return ways if len(ways) == len(usage.WAYS) else {}


def nic(hosts: Sequence[HostUse]) -> Nic | None:
    """Return the mean over hosts of each host's busiest interface; the loopback only if there is no other."""
    rows = [ways for host in hosts if (ways := _ways(host))]
    if not rows:
        return None

    def active(way: str) -> float | None:
        known = [bps for row in rows if (bps := row[way].active_bps) is not None]
        return fmean(known) if len(known) == len(rows) else None

    average = {way: fmean(row[way].average_bps for row in rows) for way in usage.WAYS}
    return Nic(rows[0]["tx"].interface, average["rx"], average["tx"], active("rx"), active("tx"))


def cpu(hosts: Sequence[HostUse]) -> Cpu | None:
    """Return the mean over hosts of their cores' use."""
    rows = [host.cores for host in hosts if host.cores is not None]
    if not rows:
        return None
    kinds = {kind: fmean(row.mean[kind] for row in rows) for kind in rows[0].mean}
    return Cpu(kinds, fmean(row.busiest_share for row in rows))


def known_sum(values: Sequence[float | None]) -> float | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratios(own: Sequence[Sent], counted_by: str) -> list[float]:
    """Return each rank's counted bytes divided by the model's; [] if one rank's count is not known."""
    counts = [getattr(one, counted_by) for one in own]
    return [] if None in counts else [count / (one.model or 1) for count, one in zip(counts, own, strict=True)]


def with_sent(arm: ArmFacts, rows: Sequence[Sent]) -> ArmFacts:
    """Return the arm with the bytes that its ranks sent, relative to the formula of the algorithm that ran."""
    own = [one for one in rows if one.transport == arm.name and one.model]
    if arm.name in PSEUDO or not own:
        return arm
    by = next((name for name in ("interface", "engine") if _ratios(own, name)), "")
    return replace(
        arm,
        algorithms=tuple(dict.fromkeys(name for one in own for name in one.algorithms)),
        sent_over_model=fmean(_ratios(own, by)) if by else None,
        sent_by=by,
    )


# What-if answers about a cell's own run: full use of its link, compression, and the fastest link that still helps.

TARGET = 0.9
RATIOS = (1.0, 2.0, 5.0, 10.0, 50.0, 100.0)
FREE_CODEC = sweeps.Codec()


def outlook_of(trace: Trace, transport: Arm, link_bps: float | None, single_ns: float | None) -> Outlook | None:
    """Return the what-if answers; None if no cost model can be fitted to the run.

    Scaling factors, and the targets of inverse questions, use single_ns where it was measured."""
    try:
        job = questions.job(trace, transport)
    except ValueError:
        return None
    if single_ns:
        ends = tuple(replace(end, alone_ns=single_ns) for end in job.at_ends)
        job = replace(job, alone_ns=single_ns, at_ends=ends)
    ratio, enough = sweeps.least_compression(job, TARGET, FREE_CODEC), sweeps.enough_link(job)
    outlook = Outlook(
        transport,
        TARGET,
        as_used=_curve(job, f"at {transport}'s achieved rate"),
        ratio=_bounded(ratio, sweeps.RATIO[1]),
        ratio_why=ratio.reason,
        ratio_refused=ratio.refused,
        enough_bps=_bounded(enough, sweeps.LINK_BPS[1]),
        notes=job.notes,
    )
    return _at_full_use(outlook, job, link_bps) if link_bps else outlook


def _at_full_use(outlook: Outlook, job: questions.Job, link_bps: float) -> Outlook:
    full = questions.answer(job, sweeps.full_use(job, link_bps)).step_s
    fully = replace(job, cost=sweeps.with_link(job.cost, link_bps))
    least = sweeps.least_compression(fully, TARGET, FREE_CODEC)
    return replace(
        outlook,
        full_use_ns=None if full is None else Estimate(1e9 * full.value, 1e9 * full.low, 1e9 * full.high),
        full_use=None if full is None else _scaling(job, full),
        at_full_use=_curve(fully, f"{gbit(link_bps)}, fully used"),
        full_use_ratio=_bounded(least, sweeps.RATIO[1]),
        full_use_ratio_why=least.reason,
        full_use_ratio_refused=least.refused,
    )


def _curve(job: questions.Job, label: str) -> Curve | None:
    rows = sweeps.answers(job, sweeps.compression(job, RATIOS, FREE_CODEC))
    points = tuple((one.setting.cost.ratio, _scaling(job, one.step_s)) for one in rows if one.step_s is not None)
    return Curve(label, points) if points else None


def _scaling(job: questions.Job, step_s: Estimate) -> Estimate:
    value, low, high = (job.alone_ns / (1e9 * step) for step in (step_s.value, step_s.high, step_s.low))
    return Estimate(value, low, high)


def _bounded(one: LeastValue, end: float) -> Estimate | None:
    """Return the estimate; an infinite end of its interval becomes `end`, the limit of the search."""
    if one.value is None:
        return None
    return Estimate(
        *(end if math.isinf(value) else value for value in (one.value.value, one.value.low, one.value.high))
    )


# Facts of a cell.

TIMED = ("replay", "play")  # jobs whose compute is a timed wait

Blocks = Mapping[int, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class CellDescription:
    """What a study knows of a cell without its run. job: "replay", "digits", "inflation"; network: as requested."""

    key: str
    model: str
    job: str
    network: str


class JobOutcome(Protocol):
    """The outcome of a job: study.task.Outcome."""

    @property
    def equal(self) -> bool | None:
        """True if all ranks hold bit-identical weights; None if there are none to compare."""

    @property
    def accuracy(self) -> float | None:
        """Accuracy on held-out data."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of each rank's weights."""


def cell_facts(
    run: Run,
    about: CellDescription,
    *,
    outcome: JobOutcome | None = None,
    stock_alone: JobOutcome | None = None,
    forecast: object | None = None,
    notes: Sequence[str] = (),
) -> CellFacts:
    """Return the facts of one cell.

    outcome: the outcome of its ranks. stock_alone: the outcome of the same training with stock alone, over as many
    steps. forecast: the prediction written before the run (any value with `transports`: name -> step_ns, scaling, why).
    """
    trace = run.trace
    splits = _splits(trace)
    passes_only, sums = compute_only(trace, about.job), sent(run)
    cell = _base(run, about, passes_only, splits)
    arms = {
        name: _arm(run, cell, passes_only, (name, splits.get(name, ())))
        for name in run.findings.times
        if name != SINGLE
    }
    cell = replace(
        cell,
        arms={name: with_sent(arm, sums) for name, arm in arms.items()},
        pairs=_enough(run.findings.comparisons),
        few_pairs=_too_few(run.findings.comparisons),
        handicap=rule_facts.handicap_sentence(run.findings) or "",
        hooks=next(iter(_enough([comparisons.compare(passes_only, BARE, NULL)])), None)
        if about.job == INFLATION
        else None,
        contention=_contention(passes_only),
        forecast=forecast_facts(forecast),
        notes=(*trace.notes, *notes),
    )
    base = run.findings.base
    if base is not None and base not in PSEUDO and about.job != INFLATION:
        single_ns = cell.single_ns.value if cell.single_ns is not None and cell.baseline != COMPUTED else None
        cell = replace(cell, outlook=outlook_of(trace, base, cell.link_bps, single_ns))
    if outcome is None or about.job == INFLATION:
        return cell
    same = None if stock_alone is None else stock_alone.digests == outcome.digests
    return replace(
        cell,
        equal_weights=outcome.equal,
        same_as_stock=same,
        accuracy=outcome.accuracy,
        accuracy_stock_alone=None if stock_alone is None else stock_alone.accuracy,
    )


def _splits(trace: Trace) -> dict[Arm, list[Split]]:
    found: dict[Arm, list[Split]] = defaultdict(list)
    for _, split, _ in split_steps(trace):
        found[split.arm].append(split)
    return found


def _base(run: Run, about: CellDescription, passes_only: Trace, splits: Mapping[Arm, Sequence[Split]]) -> CellFacts:
    """Return the facts that do not depend on an arm: the network, the model, and the step of one rank."""
    trace = run.trace
    network = trace.network or Network()
    wire = Wire.of(network)
    name = next((arm for arm in (SINGLE, NULL) if comparisons.step_times(trace, arm)), None)
    baseline = {SINGLE: ALONE, NULL: NOTHING_MOVES, None: COMPUTED}[name]
    own = splits.get(name, ()) if name is not None else ()
    hosts = {rank.host_id for rank in trace.ranks}
    cores = {(rank.hostname, core) for rank in trace.ranks for core in rank.cores}
    return CellFacts(
        **{field: getattr(about, field) for field in ("key", "model", "job", "network")},
        ranks=trace.size,
        link_bps=run.findings.link_bps,
        flow_bps=network.flow_bps,
        one_flow_bps=wire.one_flow_bps,
        many_flows_bps=wire.many_flows_bps,
        link_burst_bytes=run.findings.link_burst_bytes,
        model_title=trace.model,
        compute="timed" if about.job in TIMED else "real",
        ranks_per_host=max(1, len(trace.ranks) // max(1, len(hosts))),
        cores=len(cores),
        tensors=len(trace.parameters),
        tensor_bytes=sum(parameter.bytes for parameter in trace.parameters),
        baseline=baseline,
        single_ns=values.median(comparisons.step_times(trace, name)) if name is not None else None,
        single_compute_ns=_parts(own).compute_ns if own else None,
        single_forward_backward_ns=values.median(comparisons.step_times(passes_only, name))
        if name is not None
        else None,
    )


def _arm(run: Run, cell: CellFacts, passes_only: Trace, arm: tuple[Arm, Sequence[Split]]) -> ArmFacts:
    trace, (name, splits) = run.trace, arm
    blocks = comparisons.step_times(trace, name)
    step_ns = values.median(blocks)
    assert step_ns is not None
    moved = run.findings.achieved.get(name)
    active_bps, average_bps = (None, None) if moved is None else (moved.active_bps, moved.average_bps)
    hosts = [host for host in run.hosts if host.arm == name]
    infos = [info for rank in trace.ranks for info in rank.transports if info.name == name.transport]
    return ArmFacts(
        name,
        step_ns,
        sum(map(len, blocks.values())),
        tuple((block, float(np.median(own))) for block, own in sorted(blocks.items())),
        scaling=None if name == NULL or cell.job == INFLATION else scaling(trace, name, cell.baseline, splits),
        parts=_parts(splits) if splits else None,
        forward_backward_ns=values.median(comparisons.step_times(passes_only, name)),
        active_bps=active_bps,
        average_bps=average_bps,
        nic=nic(usage.by_link(trace, hosts)),
        cpu=cpu(hosts),
        sent_segments=known_sum([host.sent_segments for host in hosts]),
        retransmitted_segments=known_sum([host.retransmitted_segments for host in hosts]),
        streams=max((info.streams_used for info in infos if info.streams_used), default=None),
    )


def _parts(splits: Sequence[Split]) -> Parts:
    middle = typical(splits, lambda split: split)
    return Parts(**{name: fmean(getattr(one, name) for one in middle) for name in Parts.__dataclass_fields__})


def scaling(trace: Trace, name: Arm, baseline: str, splits: Sequence[Split]) -> Estimate | None:
    """Return the scaling factor T_1 / T_n of an arm, for equal work per rank.

    The interval is by blocks, and paired if the baseline is an arm of the same run."""
    times = comparisons.step_times(trace, name)
    if baseline == ALONE:
        return values.ratio(comparisons.step_times(trace, SINGLE), times)
    if baseline == NOTHING_MOVES:
        pair = comparisons.compare(trace, NULL, name)
        return values.inverse(pair.ratio) if pair is not None and pair.enough else None
    shares: dict[int, list[float]] = defaultdict(list)
    for one in splits:
        shares[one.block].append(1 - (one.exposed_ns + one.wait_ns) / max(one.step_ns, 1))
    return values.median({block: np.array(own) for block, own in shares.items()})


def _busy_only(step: Step, whole: bool) -> Step:
    """Return the step shortened to its forward and backward (whole: to all of it), without blocked time."""
    if whole:
        blocked = spans((begin, end) for _, begin, end in step.waits)
        busy = subtraction(spans([(step.begin_ns, step.end_ns)]), blocked)
    else:
        busy = passes(step)
    return replace(step, end_ns=step.begin_ns + total(busy))


def compute_only(trace: Trace, job: str) -> Trace:
    """Return the run with each step shortened to its forward and backward; steps without these times are left out.

    In the job inflation a step is only a forward and a backward, in every arm.
    """
    whole = job == INFLATION
    passes_only = [step for step in trace.steps if whole or step.forward or step.grad_ready]
    return replace(trace, steps=tuple(_busy_only(step, whole) for step in passes_only))


def _contention(passes_only: Trace) -> tuple[Paired, ...]:
    """Compare forward and backward of each arm that moves bytes with those of the null arm."""
    names = dict.fromkeys(step.arm for step in passes_only.steps if step.arm not in PSEUDO)
    return _enough([comparisons.compare(passes_only, NULL, name) for name in names])


def _enough(pairs: Sequence[Paired | None]) -> tuple[Paired, ...]:
    """Return the comparisons that have enough pairs of blocks for an interval."""
    return tuple(pair for pair in pairs if pair is not None and pair.enough)


def _too_few(pairs: Sequence[Paired]) -> dict[str, int]:
    """Return by arm the number of pairs of blocks of the other comparisons."""
    return {pair.other: pair.pairs for pair in pairs if not pair.enough}


def forecast_facts(forecast: object | None) -> dict[str, ForecastFacts]:
    """Return a forecast's arms in the form stored with the facts; {} without a forecast."""
    arms: Mapping[str, object] = getattr(forecast, "transports", {})
    return {
        name: ForecastFacts(
            _estimated(getattr(one, "step_ns", None)),
            _estimated(getattr(one, "scaling", None)),
            str(getattr(one, "why", "")),
        )
        for name, one in arms.items()
    }


def _estimated(value: object) -> Estimate | None:
    if value is None or isinstance(value, Estimate):
        return value
    return Estimate(*value) if isinstance(value, Sequence) else None


# The budget of 1 - scaling factor, by arm: parts of the step whose sum is exactly the loss. Pure.

NOT_APART = "the loss inside a host counts as network: no cell with a single host was measured"
NO_BASELINE = "inflation counts as other: the step of one rank was not measured"


@dataclass(frozen=True, slots=True)
class Budget:
    """The loss of one arm of one cell, as parts of its step; host_internal + inflation + exposed + other = loss.

    loss: 1 - scaling factor.
    host_internal: exposed communication between ranks of one host. All of it if one host has all ranks; 0 if each rank
    has its own host. Otherwise what the same model showed on one host, at most all of it.
    inflation: increase of forward, backward and optimizer over those of one rank. If the parts of one rank's step are
    not known, its compute is its step less the other time of this arm's step.
    exposed: the rest of the exposed communication: the network, and the transport over it.
    other: the remainder: waiting for ranks or for negotiation (`waiting` is this part), data, and all else.
    """

    key: str
    arm: str
    loss: float
    host_internal: float
    inflation: float
    exposed: float
    other: float
    waiting: float
    notes: tuple[str, ...] = ()


def budget(cell: CellFacts, arm: ArmFacts, cells: Sequence[CellFacts] = ()) -> Budget | None:
    """Return the loss of an arm; None if its steps could not be split.

    cells: all cells of the study, for the loss inside one host."""
    if arm.parts is None or arm.scaling is None:
        return None
    step_ns = arm.parts.step_ns
    inside_ns, inside_note = _host_internal_ns(cell, arm.parts, _on_one_host(cell, arm, cells))
    longer_ns, longer_note = _inflation_ns(cell, arm.parts)
    loss = 1 - arm.scaling.value
    parts = (inside_ns / step_ns, longer_ns / step_ns, (arm.parts.exposed_ns - inside_ns) / step_ns)
    return Budget(
        cell.key,
        arm.name,
        loss,
        *parts,
        other=loss - sum(parts),
        waiting=arm.parts.wait_ns / step_ns,
        notes=tuple(note for note in (inside_note, longer_note) if note),
    )


def budgets(cells: Sequence[CellFacts]) -> tuple[Budget, ...]:
    """Return the budget of every arm that moves bytes, where it is known."""
    found = [budget(cell, arm, cells) for cell in cells for arm in cell.transports]
    return tuple(one for one in found if one is not None)


def _on_one_host(cell: CellFacts, arm: ArmFacts, cells: Sequence[CellFacts]) -> Parts | None:
    """Return the parts of the same arm and model on one host with as many ranks as a host of this cell has."""
    for other in cells:
        alike = (other.model, other.job, other.ranks) == (cell.model, cell.job, cell.ranks_per_host)
        if alike and other.ranks == other.ranks_per_host and arm.name in other.arms:
            return other.arms[arm.name].parts
    return None


def _host_internal_ns(cell: CellFacts, parts: Parts, one_host: Parts | None) -> tuple[float, str]:
    if cell.ranks == cell.ranks_per_host:
        return parts.exposed_ns, ""
    if cell.ranks_per_host == 1:
        return 0.0, ""
    if one_host is None:
        return 0.0, NOT_APART
    return min(parts.exposed_ns, one_host.exposed_ns), ""


def _inflation_ns(cell: CellFacts, parts: Parts) -> tuple[float, str]:
    if cell.single_ns is None or cell.baseline == COMPUTED:
        return 0.0, NO_BASELINE
    alone_ns = cell.single_compute_ns
    if alone_ns is None:
        alone_ns = cell.single_ns.value - parts.other_ns
    return parts.compute_ns - alone_ns, ""


# The forecast of each cell, compared with its measurement. Pure.

# An error up to GOOD is good; an error up to FAIR is still useful.
GOOD, FAIR = 0.05, 0.12
# A step that exposes less communication than this, as a part of the step, is easy to predict.
EXPOSED_MIN = 0.20


@dataclass(frozen=True, slots=True)
class ForecastError:
    """The prediction error of one arm of one cell.

    error: predicted over measured step, less 1. exposed: the exposed part of the measured step; None: not known."""

    key: str
    arm: str
    predicted_ns: Estimate
    measured_ns: Estimate
    exposed: float | None

    @property
    def error(self) -> float:
        """The signed error, as a part of the measured step."""
        return self.predicted_ns.value / self.measured_ns.value - 1


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """All forecasts of a study. forecast_errors: each forecast with its error; refused: (cell, arm, why)."""

    forecast_errors: tuple[ForecastError, ...]
    refused: tuple[tuple[str, str, str], ...] = ()

    @property
    def errors(self) -> tuple[float, ...]:
        """The absolute errors."""
        return tuple(abs(miss.error) for miss in self.forecast_errors)

    @property
    def median(self) -> float:
        """The median absolute error. Raises ValueError without forecasts."""
        return median(self.errors)

    @property
    def worst(self) -> ForecastError:
        """The forecast with the largest absolute error. Raises ValueError without forecasts."""
        return max(self.forecast_errors, key=lambda miss: abs(miss.error))

    def within(self, limit: float) -> int:
        """Return how many absolute errors are at most `limit`."""
        return sum(error <= limit for error in self.errors)

    @property
    def exposed(self) -> int:
        """How many forecasts are of a step that exposes at least EXPOSED_MIN of its length."""
        return sum(miss.exposed is not None and miss.exposed >= EXPOSED_MIN for miss in self.forecast_errors)


def forecast_record(cells: Sequence[CellFacts]) -> ForecastRecord:
    """Return the record of every arm that moves bytes and was forecast before it ran."""
    forecast_errors, refused = [], []
    for cell in cells:
        for arm in cell.transports:
            forecast = cell.forecast.get(arm.name)
            if forecast is None:
                continue
            if forecast.step_ns is None:
                refused.append((cell.key, arm.name, forecast.why))
                continue
            share = None if arm.parts is None else arm.parts.exposed_ns / arm.parts.step_ns
            forecast_errors.append(ForecastError(cell.key, arm.name, forecast.step_ns, arm.step_ns, share))
    return ForecastRecord(tuple(forecast_errors), tuple(refused))
