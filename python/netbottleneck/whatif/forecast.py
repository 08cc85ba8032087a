"""Forecast of a run before it is made: from the fit of another run, over a network that was measured or configured.

A forecast is written before its run and compared with it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from netbottleneck import _core
from netbottleneck.analysis.comparisons import Estimate, widened
from netbottleneck.trace.model import Trace
from netbottleneck.trace.transports import NULL, PSEUDO, Arm
from netbottleneck.units import percent
from netbottleneck.whatif import questions
from netbottleneck.whatif.cost import ALGORITHMS, UNLIMITED, Cost, Link, Wire
from netbottleneck.whatif.fit import Fit, fit, flows
from netbottleneck.whatif.plan import Plan, ReplaySchedule, as_trace

__all__ = ["FULL_USE", "ArmForecast", "Forecast", "Wire", "make"]

FULL_USE = "full_use"


@dataclass(frozen=True, slots=True)
class ArmForecast:
    """One transport's step and scaling factor, with intervals; None, and the reason in `why`, if refused.

    single_ns: step of one rank alone. rate_bps: rate of the link as it will be used. algorithm: of the formula.
    """

    step_ns: Estimate | None
    single_ns: float
    scaling: Estimate | None
    why: str = ""
    rate_bps: float | None = None
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast steps of a cell. transports: by arm; "full_use": at full use of the link's nominal rate.

    cell, fitted_to: names. notes: assumptions, as sentences.
    """

    cell: str
    fitted_to: str
    ranks: int
    transports: dict[str, ArmForecast]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Share:
    """Link of a transport in the target network: the share of its flows' rate that it used before, and the whole rate.

    by_caps: the link from the same share of the flows' caps, where both networks have caps. saved_ns: time saved
    because idle flows may send a burst at once.
    """

    link: Link
    whole: Link
    note: str
    by_caps: Link | None = None
    saved_ns: float = 0.0


def _share(found: Fit, source: Wire, target: Wire, used: tuple[float, float]) -> _Share:
    """Raises ValueError if the two networks cannot be compared."""
    achieved = found.cost.link.rate_bps
    known = []
    for how, basis in (
        ("measured", "the measured rate of its flows"),
        ("configured", "the configured rate of its flows"),
    ):
        source_bps, target_bps = getattr(source, how)(used[0]), getattr(target, how)(used[1])
        if source_bps and target_bps:
            part = achieved / source_bps
            note = f"{found.transport}: {percent(part, digits=1)} of {basis}, {target_bps / 1e9:.3f} Gbit/s"
            known.append(
                _Share(Link(part * target_bps), Link(max(part, 1.0) * target_bps), note, saved_ns=target.burst_ns)
            )
    if not known:
        raise ValueError(
            "the two networks cannot be compared: neither caps nor rates measured before the run are known"
        )
    return replace(known[0], by_caps=known[1].link) if len(known) > 1 else known[0]


@dataclass(frozen=True, slots=True)
class _Workload:
    """The workload of a forecast: its compute, and its buckets if it has its own."""

    trace: Trace
    buckets: tuple[tuple[int, ...], ...] | None
    ranks: int

    def job(self, found: Fit, link: Link) -> questions.Job:
        """The job over `link`, with the plan and cost fitted to a transport."""
        plan = Plan.explicit(self.buckets, found.in_flight) if self.buckets else Plan.of(self.trace, found.transport)
        made = questions.job(self.trace, plan=plan, cost=replace(found.cost, link=link))
        return replace(made, workers=self.ranks)


def _likely(workload: _Workload, found: Fit, link: Link, alone_ns: float) -> tuple[ArmForecast, tuple[str, ...]]:
    job = workload.job(found, link)
    one = questions.answer(job, questions.Setting("forecast", found.transport, job.plan, job.cost, job.workers))
    if one.step_s is None:
        return ArmForecast(None, alone_ns, None, one.refused), ()
    step = Estimate(*(1e9 * x for x in (one.step_s.value, one.step_s.low, one.step_s.high)))
    return ArmForecast(step, alone_ns, one.scaling, "", link.rate_bps, job.cost.algorithm), one.notes


def _step_ns(workload: _Workload, found: Fit, cost: Cost, link: Link) -> float:
    job = workload.job(replace(found, cost=cost), link)
    return questions.simulate_setting(
        job, questions.Setting("forecast", found.transport, job.plan, job.cost, job.workers)
    ).step_ns


def _by_steps(cost: Cost, size: int) -> Cost:
    """The same cost at the fitted number of ranks, with the fixed cost moved into the steps between hosts."""
    steps = _core.collective_shape(ALGORITHMS.index(cost.algorithm), size, cost.ranks_per_host)[0]
    return replace(cost, fixed_ns=0.0, alpha_ns=cost.fixed_ns / steps) if steps else cost


def _sources(found: Fit, share: _Share) -> Iterator[list[tuple[Cost, Link]]]:
    """Sources of error other than the fit's residual: for each source, the costs and links at its ends."""
    cost, link = found.cost, share.link
    yield [(cost, share.whole)]  # the target run may avoid the losses of the fitted run
    if share.by_caps is not None:  # caps and measurement are two estimates of the network's rate
        yield [(cost, share.by_caps)]
    if cost.link.rate_bps < UNLIMITED:
        yield [(other, Link(link.bps * other.link.bps / cost.link.bps)) for other in found.others]
    if not (cost.alpha_ns or cost.host_alpha_ns) and cost.fitted_size:
        yield [(_by_steps(cost, cost.fitted_size), link)]
    if found.contention is not None:
        yield [(replace(cost, contention=end), link) for end in (found.contention.low, found.contention.high)]


def _arm(workload: _Workload, found: Fit, share: _Share, alone_ns: float) -> tuple[ArmForecast, tuple[str, ...]]:
    """Forecast of a transport's step. Its interval combines the fit's residual and the other sources of error."""
    likely, notes = _likely(workload, found, share.link, alone_ns)
    if likely.step_ns is None or likely.scaling is None:
        return likely, notes
    value = likely.step_ns.value
    ends = [[likely.step_ns.low, likely.step_ns.high], [max(min(alone_ns, value), value - share.saved_ns)]]
    ends += [[_step_ns(workload, found, *end) for end in source] for source in _sources(found, share)]
    step = widened(value, ends)
    step = replace(step, low=max(step.low, min(alone_ns, value)))  # combined errors do not shorten the compute
    factor = Estimate(likely.scaling.value, alone_ns / step.high, alone_ns / step.low)
    return replace(likely, step_ns=step, scaling=factor), notes


def make(
    source: Trace,
    workload: ReplaySchedule | Trace,
    ranks: int,
    wire: Wire,
    transports: Sequence[Arm],
    *,
    cell: str = "",
) -> Forecast:
    """Return the forecast of `transports` playing a workload on `ranks` ranks over a network.

    source: the run that the transports are fitted to. wire: the target network. Each transport is assumed to use the
    same share of its flows' rate as in the source's network. A transport that cannot be fitted is refused on its own.
    Raises ValueError for fewer than 1 rank, and for a workload without gradients.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    if isinstance(workload, ReplaySchedule):
        load = _Workload(as_trace(workload), workload.buckets, ranks)
    else:
        load = _Workload(workload, None, ranks)
    alone_ns = questions.job(load.trace, plan=Plan.ddp(), cost=Cost.free()).alone_ns
    made: dict[str, ArmForecast] = {}
    notes: list[str] = []
    best: Fit | None = None
    for arm in transports:
        if arm == NULL:
            made[arm] = ArmForecast(Estimate(alone_ns, alone_ns, alone_ns), alone_ns, Estimate(1.0, 1.0, 1.0))
        if arm in PSEUDO:
            continue
        try:
            found = fit(source, arm, ranks_per_host=1)
            share = _share(found, Wire.of(source.network), wire, flows(source, arm))
            made[arm], arm_notes = _arm(load, found, share, alone_ns)
        except ValueError as error:
            made[arm] = ArmForecast(None, alone_ns, None, str(error))
            continue
        contention = [f"{arm}: {found.contention_text}"] if found.contention is not None else []
        notes += [share.note, *contention, *arm_notes]
        if best is None or found.cost.link.rate_bps > best.cost.link.rate_bps:
            best = found
    if best is not None and wire.link_bps:
        made[FULL_USE], _ = _likely(load, best, Link(wire.link_bps), alone_ns)
        notes.append(f"full use: {wire.link_bps / 1e9:g} Gbit/s of payload, with all other costs of {best.transport}")
    return Forecast(cell, source.id, ranks, made, tuple(dict.fromkeys(notes)))
