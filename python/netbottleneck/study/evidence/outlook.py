"""What the what-if engine says of a cell's own run: its link fully used, compression, the link that is fast enough."""

from __future__ import annotations

import math
from dataclasses import replace

from netbottleneck.analysis.stats import Estimate
from netbottleneck.study.evidence.values import Curve, Outlook
from netbottleneck.trace.model import Trace
from netbottleneck.units import gbit
from netbottleneck.whatif import questions, sweeps
from netbottleneck.whatif.inverse import Least

TARGET = 0.9
RATIOS = (1.0, 2.0, 5.0, 10.0, 50.0, 100.0)
FREE_CODEC = sweeps.Codec()


def of(trace: Trace, transport: str, link_bps: float | None, single_ns: float | None) -> Outlook | None:
    """Ask; None where nothing can be fitted to the run. Scaling factors are over single_ns where it was measured."""
    try:
        job = questions.job(trace, transport)
    except ValueError:
        return None
    alone_ns = single_ns or job.alone_ns
    ratio, enough = sweeps.least_compression(job, TARGET, FREE_CODEC), sweeps.enough_link(job)
    found = Outlook(
        transport,
        TARGET,
        as_used=_curve(job, f"as {transport} used the link", alone_ns),
        ratio=_bounded(ratio, sweeps.RATIO[1]),
        ratio_why=ratio.reason,
        enough_bps=_bounded(enough, sweeps.LINK_BPS[1]),
        notes=job.notes,
    )
    return _at_full_use(found, job, link_bps, alone_ns) if link_bps else found


def _at_full_use(found: Outlook, job: questions.Job, link_bps: float, alone_ns: float) -> Outlook:
    full = questions.answer(job, sweeps.full_use(job, link_bps)).step_s
    fully = replace(job, cost=sweeps.over(job.cost, link_bps))
    least = sweeps.least_compression(fully, TARGET, FREE_CODEC)
    return replace(
        found,
        full_use_ns=None if full is None else Estimate(1e9 * full.value, 1e9 * full.low, 1e9 * full.high),
        full_use=None if full is None else _scaling(alone_ns, full),
        at_full_use=_curve(fully, f"{gbit(link_bps)}, fully used", alone_ns),
        full_use_ratio=_bounded(least, sweeps.RATIO[1]),
        full_use_ratio_why=least.reason,
    )


def _curve(job: questions.Job, words: str, alone_ns: float) -> Curve | None:
    rows = sweeps.answers(job, sweeps.compression(job, RATIOS, FREE_CODEC))
    points = tuple((one.setting.cost.ratio, _scaling(alone_ns, one.step_s)) for one in rows if one.step_s is not None)
    return Curve(words, points) if points else None


def _scaling(alone_ns: float, step_s: Estimate) -> Estimate:
    value, low, high = (alone_ns / (1e9 * step) for step in (step_s.value, step_s.high, step_s.low))
    return Estimate(value, low, high)


def _bounded(one: Least, end: float) -> Estimate | None:
    """An end of the interval that was not found is where the search ended."""
    if one.value is None:
        return None
    return Estimate(
        *(end if math.isinf(value) else value for value in (one.value.value, one.value.low, one.value.high))
    )
