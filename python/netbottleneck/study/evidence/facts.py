"""A cell's run folder to its facts: a function of what was recorded, nothing is measured here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis import stats
from netbottleneck.analysis.scaling import Split, passes, split_steps, subtraction, total, typical
from netbottleneck.analysis.scaling import intervals as spans
from netbottleneck.analysis.stats import Estimate, Paired
from netbottleneck.report import Run
from netbottleneck.study.evidence import counted, intervals, outlook
from netbottleneck.study.evidence.sent import sent
from netbottleneck.study.evidence.values import (
    ALONE,
    COMPUTED,
    INFLATION,
    NOTHING_MOVES,
    ArmFacts,
    CellFacts,
    Foretold,
    Parts,
)
from netbottleneck.trace.model import BARE, NULL, PSEUDO, SINGLE, Network, Step, Trace

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
    told, sums = computing(trace, about.job), sent(run)
    cell = _base(run, about, told, splits)
    arms = {name: _arm(run, cell, told, (name, splits.get(name, ()))) for name in run.findings.times if name != SINGLE}
    cell = replace(
        cell,
        arms={name: counted.with_sent(arm, sums) for name, arm in arms.items()},
        pairs=run.findings.comparisons,
        hooks=stats.compare(told, BARE, NULL) if about.job == INFLATION else None,
        contention=_contention(told),
        forecast=foretold(forecast),
        notes=(*trace.notes, *notes),
    )
    base = run.findings.base
    if base is not None and base not in PSEUDO and about.job != INFLATION:
        single_ns = cell.single_ns.value if cell.single_ns is not None and cell.baseline != COMPUTED else None
        cell = replace(cell, outlook=outlook.of(trace, base, cell.link_bps, single_ns))
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


def _splits(trace: Trace) -> dict[str, list[Split]]:
    found: dict[str, list[Split]] = defaultdict(list)
    for _, split, _ in split_steps(trace):
        found[split.transport].append(split)
    return found


def _base(run: Run, about: About, told: Trace, splits: Mapping[str, Sequence[Split]]) -> CellFacts:
    """What is known of the cell before its arms: the network, the model, and one rank's step."""
    trace = run.trace
    network = trace.network or Network()
    name = SINGLE if stats.step_times(trace, SINGLE) else NULL if stats.step_times(trace, NULL) else ""
    baseline = {SINGLE: ALONE, NULL: NOTHING_MOVES, "": COMPUTED}[name]
    own = splits.get(name, ())
    hosts = {rank.host_id for rank in trace.ranks}
    cores = {(rank.hostname, core) for rank in trace.ranks for core in rank.cores}
    return CellFacts(
        **{field: getattr(about, field) for field in ("key", "model", "job", "network")},
        ranks=trace.size,
        link_bps=run.findings.link_bps,
        flow_bps=network.flow_bps,
        one_flow_bps=_seen(network, "one_flow"),
        many_flows_bps=_seen(network, "many_flows"),
        link_burst_bytes=run.findings.link_burst_bytes,
        model_title=trace.model,
        compute="timed" if about.job in TIMED else "real",
        ranks_per_host=max(1, len(trace.ranks) // max(1, len(hosts))),
        cores=len(cores),
        tensors=len(trace.parameters),
        tensor_bytes=sum(parameter.bytes for parameter in trace.parameters),
        baseline=baseline,
        single_ns=intervals.median(stats.step_times(trace, name)) if name else None,
        single_compute_ns=_parts(own).compute_ns if own else None,
        single_forward_backward_ns=intervals.median(stats.step_times(told, name)) if name else None,
    )


def _seen(network: Network, flows: str) -> float | None:
    """What was measured of a network before the job."""
    found = (network.verified.get(flows) or {}).get("measured_bps")
    return None if found is None else float(found)


def _arm(run: Run, cell: CellFacts, told: Trace, arm: tuple[str, Sequence[Split]]) -> ArmFacts:
    trace, (name, splits) = run.trace, arm
    blocks = stats.step_times(trace, name)
    step_ns = intervals.median(blocks)
    assert step_ns is not None
    moved = run.findings.achieved.get(name)
    active_bps, average_bps = (None, None) if moved is None else (moved.active_bps, moved.average_bps)
    hosts = [host for host in run.hosts if host.transport == name]
    infos = [info for rank in trace.ranks for info in rank.transports if info.name == name]
    return ArmFacts(
        name,
        step_ns,
        sum(map(len, blocks.values())),
        tuple((block, float(np.median(own))) for block, own in sorted(blocks.items())),
        scaling=None if name == NULL or cell.job == INFLATION else scaling(trace, name, cell.baseline, splits),
        parts=_parts(splits) if splits else None,
        forward_backward_ns=intervals.median(stats.step_times(told, name)),
        active_bps=active_bps,
        average_bps=average_bps,
        nic=counted.nic(hosts),
        cpu=counted.cpu(hosts),
        sent_segments=counted.added([host.sent_segments for host in hosts]),
        retransmitted_segments=counted.added([host.retransmitted_segments for host in hosts]),
        streams=max((info.streams_used for info in infos if info.streams_used), default=None),
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


def _busy(step: Step, whole: bool) -> Step:
    """A step as long as its forward and backward, or as all of it, less what the training thread spent blocked."""
    if whole:
        blocked = spans((begin, end) for _, begin, end in step.waits)
        busy = subtraction(spans([(step.begin_ns, step.end_ns)]), blocked)
    else:
        busy = passes(step)
    return replace(step, end_ns=step.begin_ns + total(busy))


def computing(trace: Trace, job: str) -> Trace:
    """The same run, each step as long as its forward and backward; steps that do not tell them are left out.

    A step of the job inflation is nothing else, in every arm.
    """
    whole = job == INFLATION
    told = [step for step in trace.steps if whole or step.forward or step.grad_ready]
    return replace(trace, steps=tuple(_busy(step, whole) for step in told))


def _contention(told: Trace) -> tuple[Paired, ...]:
    """Forward and backward of each arm that moves bytes, over those of the null arm."""
    names = dict.fromkeys(step.transport for step in told.steps if step.transport not in PSEUDO)
    pairs = [stats.compare(told, NULL, name) for name in names]
    return tuple(pair for pair in pairs if pair is not None)


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
