"""What a run will take that has not been made: from the fit of another one, over a network that was looked at before.

A forecast is written down before its run, and held against it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from netbottleneck import _core
from netbottleneck.analysis.stats import Estimate, widened
from netbottleneck.trace.model import NULL, PSEUDO, Trace
from netbottleneck.whatif import questions
from netbottleneck.whatif.cost import ALGORITHMS, UNLIMITED, Cost, Fit, Link, fit
from netbottleneck.whatif.link_model import flows
from netbottleneck.whatif.links import Wire
from netbottleneck.whatif.plan import Plan
from netbottleneck.whatif.replay_schedule import Score, as_trace

__all__ = ["FULL_USE", "ArmForecast", "Forecast", "Wire", "make"]

FULL_USE = "full_use"


@dataclass(frozen=True, slots=True)
class ArmForecast:
    """One transport's step and scaling factor, with the interval of the fit; None, and why, where it is refused.

    single_ns: the step of one rank alone. rate_bps: of the link, as it will be used. algorithm: whose formula."""

    step_ns: Estimate | None
    single_ns: float
    scaling: Estimate | None
    why: str = ""
    rate_bps: float | None = None
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A cell's steps before its run. transports: by arm; "full_use": at full use of the link's nominal rate.

    cell, fitted_to: names. notes: what was assumed, in words."""

    cell: str
    fitted_to: str
    ranks: int
    transports: dict[str, ArmForecast]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Share:
    """The link as a transport will use it, with the same share of what its flows carry as it had, and all of that.

    by_caps: the same share of what its flows are made for, where both are known. saved_ns: by what flows that were idle
    may send at once."""

    link: Link
    whole: Link
    words: str
    by_caps: Link | None = None
    saved_ns: float = 0.0


def _share(found: Fit, source: Wire, target: Wire, used: tuple[float, float]) -> _Share:
    """Raises ValueError where nothing tells how the two networks compare."""
    achieved = found.cost.link.rate_bps
    known = []
    for how, words in (("measured", "its flows were measured to carry"), ("made_for", "its flows are made for")):
        there, here = getattr(source, how)(used[0]), getattr(target, how)(used[1])
        if there and here:
            part = achieved / there
            told = f"{found.transport}: {part:.1%} of what {words}, {here / 1e9:.3f} Gbit/s"
            known.append(_Share(Link(part * here), Link(max(part, 1.0) * here), told, saved_ns=target.burst_ns))
    if not known:
        raise ValueError("nothing tells how the two networks compare: neither caps nor a measurement before the run")
    return replace(known[0], by_caps=known[1].link) if len(known) > 1 else known[0]


@dataclass(frozen=True, slots=True)
class _Played:
    """What will be played: its compute, and its buckets where it has its own."""

    trace: Trace
    buckets: tuple[tuple[int, ...], ...] | None
    ranks: int

    def job(self, found: Fit, link: Link) -> questions.Job:
        """The job, over a link, as a transport was found to be."""
        plan = Plan.explicit(self.buckets, found.in_flight) if self.buckets else Plan.of(self.trace, found.transport)
        made = questions.job(self.trace, plan=plan, cost=replace(found.cost, link=link))
        return replace(made, workers=self.ranks)


def _ask(what: _Played, found: Fit, link: Link, alone_ns: float) -> tuple[ArmForecast, tuple[str, ...]]:
    job = what.job(found, link)
    one = questions.answer(job, questions.Setting("forecast", found.transport, job.plan, job.cost, job.workers))
    if one.step_s is None:
        return ArmForecast(None, alone_ns, None, one.refused), ()
    step = Estimate(*(1e9 * x for x in (one.step_s.value, one.step_s.low, one.step_s.high)))
    return ArmForecast(step, alone_ns, one.scaling, "", link.rate_bps, job.cost.algorithm), one.notes


def _step_ns(what: _Played, found: Fit, cost: Cost, link: Link) -> float:
    job = what.job(replace(found, cost=cost), link)
    return questions.play(job, questions.Setting("forecast", found.transport, job.plan, job.cost, job.workers)).step_ns


def _by_steps(cost: Cost, size: int) -> Cost:
    """The same for the fitted number of ranks, what an operation costs being that of its steps between hosts."""
    steps = _core.collective_shape(ALGORITHMS.index(cost.algorithm), size, cost.ranks_per_host)[0]
    return replace(cost, fixed_ns=0.0, alpha_ns=cost.fixed_ns / steps) if steps else cost


def _sources(found: Fit, share: _Share) -> Iterator[list[tuple[Cost, Link]]]:
    """What a forecast is not sure of, beside what the fitted run's steps varied by: of each source its ends."""
    cost, link = found.cost, share.link
    yield [(cost, share.whole)]  # what the fitted run lost need not be lost again
    if share.by_caps is not None:  # two ways to tell what the network carries
        yield [(cost, share.by_caps)]
    if cost.link.rate_bps < UNLIMITED:
        yield [(other, Link(link.bps * other.link.bps / cost.link.bps)) for other in found.others]
    if not (cost.alpha_ns or cost.host_alpha_ns) and cost.fitted_size:
        yield [(_by_steps(cost, cost.fitted_size), link)]
    if found.contention is not None:
        yield [(replace(cost, contention=end), link) for end in (found.contention.low, found.contention.high)]


def _arm(what: _Played, found: Fit, share: _Share, alone_ns: float) -> tuple[ArmForecast, tuple[str, ...]]:
    """A transport's step. Its interval has the fit's residual, and each other source of what is not known."""
    likely, said = _ask(what, found, share.link, alone_ns)
    if likely.step_ns is None or likely.scaling is None:
        return likely, said
    value = likely.step_ns.value
    ends = [[likely.step_ns.low, likely.step_ns.high], [max(min(alone_ns, value), value - share.saved_ns)]]
    ends += [[_step_ns(what, found, *end) for end in source] for source in _sources(found, share)]
    step = widened(value, ends)
    factor = Estimate(likely.scaling.value, alone_ns / step.high, alone_ns / step.low)
    return replace(likely, step_ns=step, scaling=factor), said


def make(
    source: Trace, played: Score | Trace, ranks: int, wire: Wire, transports: Sequence[str], *, cell: str = ""
) -> Forecast:
    """Return what `transports` will take to play something on so many ranks over a network.

    source: a run that those transports are fitted to. wire: the network that will be there; a transport is taken to
    have the same share of what its flows carry as it had in the source's network. One that the source tells nothing of
    is refused by itself. Raises ValueError for fewer than 1 rank, and for what tells no gradients."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    if isinstance(played, Score):
        what = _Played(as_trace(played), played.buckets, ranks)
    else:
        what = _Played(played, None, ranks)
    alone_ns = questions.job(what.trace, plan=Plan.ddp(), cost=Cost.free()).alone_ns
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
            made[arm], said = _arm(what, found, share, alone_ns)
        except ValueError as error:
            made[arm] = ArmForecast(None, alone_ns, None, str(error))
            continue
        beside = [f"{arm}: {found.contention_words}"] if found.contention is not None else []
        notes += [share.words, *beside, *said]
        if best is None or found.cost.link.rate_bps > best.cost.link.rate_bps:
            best = found
    if best is not None and wire.link_bps:
        made[FULL_USE], _ = _ask(what, best, Link(wire.link_bps), alone_ns)
        notes.append(f"full use: {wire.link_bps / 1e9:g} Gbit/s of payload, all else as of {best.transport}")
    return Forecast(cell, source.id, ranks, made, tuple(dict.fromkeys(notes)))
