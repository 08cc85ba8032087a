"""A cell's run folder to its facts: a function of what was recorded, nothing is measured here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from netbottleneck import stats
from netbottleneck.evidence import intervals, outlook
from netbottleneck.evidence.sent import Sent, sent
from netbottleneck.evidence.values import (
    ALONE,
    COMPUTED,
    NOTHING_MOVES,
    ArmFacts,
    CellFacts,
    Cpu,
    Foretold,
    Nic,
    Parts,
)
from netbottleneck.report import Run
from netbottleneck.scaling import (
    WARMUP_STEPS,
    Split,
    backward_intervals,
    counted,
    split_steps,
    subtraction,
    total,
    typical,
)
from netbottleneck.scaling import intervals as spans
from netbottleneck.stats import Estimate, Paired
from netbottleneck.trace import BARE, NULL, PSEUDO, SINGLE, Step, Trace
from netbottleneck.usage import HostUse

INFLATION = "inflation"  # the job whose bare arm moves nothing
TIMED = ("replay", "play")  # jobs whose compute is a wait

Blocks = Mapping[int, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class About:
    """What a study knows of a cell beside its run. job: "replay", "digits", "inflation"; network: as it was asked."""

    key: str
    model: str
    job: str
    network: str


class Ended(Protocol):
    """What a job came to: study.task.Outcome."""

    @property
    def equal(self) -> bool:
        """Whether all ranks hold the same weights, bit for bit."""

    @property
    def accuracy(self) -> float | None:
        """On held-out data."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Of each rank's weights."""


def of(
    run: Run,
    about: About,
    *,
    outcome: Ended | None = None,
    stock_alone: Ended | None = None,
    forecast: object | None = None,
    notes: Sequence[str] = (),
) -> CellFacts:
    """The facts of one cell.

    outcome: what its ranks ended with; stock_alone: the same training over stock alone, as many steps; forecast: what
    was written before the run (any value with `transports`: name -> step_ns, scaling, why).
    """
    trace = run.trace
    splits = _splits(trace)
    cell = _base(run, about, splits)
    sums = sent(run)
    arms = {name: _arm(run, cell, name, splits.get(name, ())) for name in run.findings.times if name != SINGLE}
    cell = replace(
        cell,
        arms={name: _with_sent(arm, sums) for name, arm in arms.items()},
        pairs=run.findings.comparisons,
        hooks=_hooks(trace) if about.job == INFLATION else None,
        contention=_contention(trace),
        forecast=foretold(forecast),
        notes=(*trace.notes, *notes),
    )
    base = run.findings.base
    if base is not None and base not in PSEUDO:
        single_ns = cell.single_ns.value if cell.single_ns is not None and cell.baseline != COMPUTED else None
        cell = replace(cell, outlook=outlook.of(trace, base, cell.link_bps, single_ns))
    if outcome is None:
        return cell
    same = None if stock_alone is None else stock_alone.digests == outcome.digests
    return replace(
        cell,
        equal_weights=outcome.equal,
        same_as_stock=same,
        accuracy=outcome.accuracy,
        accuracy_stock_alone=None if stock_alone is None else stock_alone.accuracy,
    )


def _splits(trace: Trace) -> dict[str, list[Split]]:
    found: dict[str, list[Split]] = defaultdict(list)
    for _, split, _ in split_steps(trace):
        found[split.transport].append(split)
    return found


def _base(run: Run, about: About, splits: Mapping[str, Sequence[Split]]) -> CellFacts:
    """What is known of the cell before its arms: the network, the model, and one rank's step."""
    trace = run.trace
    network = trace.network
    seen = network.verified if network is not None else {}
    name = SINGLE if stats.step_times(trace, SINGLE) else NULL if stats.step_times(trace, NULL) else ""
    baseline = {SINGLE: ALONE, NULL: NOTHING_MOVES, "": COMPUTED}[name]
    own = splits.get(name, ())
    hosts = {rank.host_id for rank in trace.ranks}
    cores = {(rank.hostname if len(trace.ranks) > 1 else "", core) for rank in trace.ranks for core in rank.cores}
    return CellFacts(
        **{field: getattr(about, field) for field in ("key", "model", "job", "network")},
        ranks=trace.size,
        link_bps=run.findings.link_bps,
        flow_bps=network.flow_bps if network is not None else (),
        one_flow_bps=seen.get("one_flow", {}).get("measured_bps"),
        many_flows_bps=seen.get("many_flows", {}).get("measured_bps"),
        model_title=trace.model,
        compute="timed" if about.job in TIMED else "real",
        ranks_per_host=max(1, len(trace.ranks) // max(1, len(hosts))),
        cores=len(cores),
        tensors=len(trace.parameters),
        tensor_bytes=sum(parameter.bytes for parameter in trace.parameters),
        baseline=baseline,
        single_ns=intervals.median(stats.step_times(trace, name)) if name else None,
        single_compute_ns=_parts(own).compute_ns if own else None,
        single_forward_backward_ns=intervals.median(forward_backward(trace, name)) if name else None,
    )


def _arm(run: Run, cell: CellFacts, name: str, splits: Sequence[Split]) -> ArmFacts:
    trace, findings = run.trace, run.findings
    blocks = stats.step_times(trace, name)
    step_ns = intervals.median(blocks)
    assert step_ns is not None
    moved = findings.achieved.get(name)
    hosts = [host for host in run.hosts if host.transport == name]
    streams = {info.streams_used for rank in trace.ranks for info in rank.transports if info.name == name}
    return ArmFacts(
        name,
        step_ns,
        sum(map(len, blocks.values())),
        tuple((block, float(np.median(own))) for block, own in sorted(blocks.items())),
        scaling=None if name == NULL else scaling(trace, name, cell.baseline, splits),
        parts=_parts(splits) if splits else None,
        forward_backward_ns=intervals.median(forward_backward(trace, name)),
        active_bps=None if moved is None else moved.active_bps,
        average_bps=None if moved is None else moved.average_bps,
        nic=_nic(hosts),
        cpu=_cpu(hosts),
        sent_segments=_sum([host.sent_segments for host in hosts]),
        retransmitted_segments=_sum([host.retransmitted_segments for host in hosts]),
        streams=max((count for count in streams if count), default=None),
    )


def _parts(splits: Sequence[Split]) -> Parts:
    middle = typical(splits, lambda split: split.step_ns)
    return Parts(**{name: fmean(getattr(one, name) for one in middle) for name in Parts.__dataclass_fields__})


def scaling(trace: Trace, name: str, baseline: str, splits: Sequence[Split]) -> Estimate | None:
    """T_1 / T_n of an arm for equal work per rank, its interval by blocks, paired where the baseline took turns."""
    times = stats.step_times(trace, name)
    if baseline == ALONE:
        return intervals.ratio(stats.step_times(trace, SINGLE), times)
    if baseline == NOTHING_MOVES:
        pair = stats.compare(trace, NULL, name)
        return None if pair is None else intervals.inverse(pair.ratio)
    shares: dict[int, list[float]] = defaultdict(list)
    for one in splits:
        shares[one.block].append(1 - (one.exposed_ns + one.wait_ns) / max(one.step_ns, 1))
    return intervals.median({block: np.array(own) for block, own in shares.items()})


def _alone(step: Step) -> int:
    """Ns of forward and backward of a step, less what the training thread spent blocked."""
    busy = spans([*step.forward, *backward_intervals(step)])
    return total(subtraction(busy, spans((begin, end) for _, begin, end in step.waits)))


def _computing(trace: Trace) -> Trace:
    """The same run, each step as long as its forward and backward; steps that do not tell them are left out."""
    told = [step for step in trace.steps if step.forward or step.grad_ready]
    return replace(trace, steps=tuple(replace(step, end_ns=step.begin_ns + _alone(step)) for step in told))


def forward_backward(trace: Trace, name: str, warmup: int = WARMUP_STEPS) -> Blocks:
    """By block: ns of forward and backward of each counted step, the median over ranks."""
    return stats.step_times(_computing(trace), name, warmup)


def _hooks(trace: Trace) -> Paired | None:
    """The null arm's steps over the bare arm's: forward and backward where both tell them, else whole steps."""
    told = _computing(trace)
    whole = not all(any(step.transport == name for step in told.steps) for name in (BARE, NULL))
    return stats.compare(trace if whole else told, BARE, NULL)


def _contention(trace: Trace) -> tuple[Paired, ...]:
    """Forward and backward of each arm that moves bytes, over those of the null arm."""
    told = _computing(trace)
    names = dict.fromkeys(step.transport for step in counted(told) if step.transport not in PSEUDO)
    pairs = [stats.compare(told, NULL, name) for name in names]
    return tuple(pair for pair in pairs if pair is not None)


def _nic(hosts: Sequence[HostUse]) -> Nic | None:
    rows = []
    for host in hosts:
        named = [use for use in host.interfaces if use.interface != "lo"] or list(host.interfaces)
        ways = {use.way: use for use in named if use.interface == named[0].interface}
        if len(ways) == 2:
            rows.append(ways)
    if not rows:
        return None

    def active(way: str) -> float | None:
        known = [bps for bps in (row[way].active_bps for row in rows) if bps is not None]
        return fmean(known) if len(known) == len(rows) else None

    average = {way: fmean(row[way].average_bps for row in rows) for way in ("rx", "tx")}
    return Nic(rows[0]["tx"].interface, average["rx"], average["tx"], active("rx"), active("tx"))


def _cpu(hosts: Sequence[HostUse]) -> Cpu | None:
    rows = [host.cores for host in hosts if host.cores is not None]
    if not rows:
        return None
    kinds = {kind: fmean(row.mean[kind] for row in rows) for kind in rows[0].mean}
    return Cpu(kinds, fmean(row.busiest_share for row in rows))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _ratios(own: Sequence[Sent], counted_by: str) -> list[float]:
    """Bytes that were counted over the model's, by rank; [] where one rank's are not known."""
    counts = [getattr(one, counted_by) for one in own]
    return [] if None in counts else [count / (one.model or 1) for count, one in zip(counts, own, strict=True)]


def _with_sent(arm: ArmFacts, rows: Sequence[Sent]) -> ArmFacts:
    own = [one for one in rows if one.transport == arm.name and one.model]
    if arm.name in PSEUDO or not own:
        return arm
    by = next((name for name in ("interface", "engine") if _ratios(own, name)), "")
    return replace(
        arm,
        algorithms=tuple(dict.fromkeys(word for one in own for word in one.algorithms)),
        sent_over_model=fmean(_ratios(own, by)) if by else None,
        sent_by=by,
    )


def foretold(forecast: object | None) -> dict[str, Foretold]:
    """A forecast's arms as they are kept with the facts; {} of none."""
    arms: Mapping[str, object] = getattr(forecast, "transports", {})
    return {
        name: Foretold(
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
