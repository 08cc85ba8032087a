"""What else must hold of a scenario: predictions of its run, compared with limits and with the twin's run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from netbottleneck.report import what_if
from netbottleneck.trace.model import Network
from netbottleneck.trace.transports import STOCK, Arm
from netbottleneck.whatif import forecast, questions, sweeps
from netbottleneck.whatif.cost import Wire

if TYPE_CHECKING:
    from scenario.cases import Check
    from scenario.judge import Judged

MIB = 1 << 20


def _step_ns(judged: Judged) -> float:
    """The step of a run that the report shows."""
    return judged.found.parts_ns["step"].value


def _apart(what: str, value: float, least: float, most: float) -> Iterator[str]:
    if not least <= value <= most:
        yield f"{what} is {value:.6g}, not {least:.6g} to {most:.6g}"


def least_link(target: float, least_bps: float, most_bps: float) -> Check:
    """The what-if of the run has a sentence with the least link of a scaling factor, between these rates."""

    def check(got: Judged, _: Judged | None) -> Iterator[str]:
        job = questions.job(got.found.trace, got.found.base)
        found = sweeps.least_link(job, target)
        told = what_if.sentences(sweeps.Answers(job, (), (found,)))[-1]
        if f"a scaling factor of {target:g} needs " not in told:
            yield f"no least link: {told}"
        elif found.value is not None:
            yield from _apart("the least link", found.value.value, least_bps, most_bps)

    return check


def fused(mib: int, within: float) -> Check:
    """The predicted step with fusion is that of the twin, which fuses, within a part of it."""

    def check(got: Judged, twin: Judged | None) -> Iterator[str]:
        assert twin is not None
        job = questions.job(got.found.trace, got.found.base)
        one = next(iter(sweeps.answers(job, sweeps.fusions(job, [mib * MIB]))))
        if one.step_s is None:
            yield f"the step with fusion is not predicted: {one.refused}"
        else:
            ratio = 1e9 * one.step_s.value / _step_ns(twin)
            yield from _apart("the predicted step with fusion, over the measured one", ratio, 1 - within, 1 + within)

    return check


COSTS = re.compile(
    r"An operation takes ([\d.]+) ms \(([\d.]+) ms to ([\d.]+) ms\) beside its bytes, "
    r"which move at ([\d.]+) Gbit/s \(([\d.]+) Gbit/s to ([\d.]+) Gbit/s\)"
)


def costs(alpha_ms: float, beta_gbps: float, within: float) -> Check:
    """The reason has the time of an operation and the rate of its bytes, these within a part, with intervals."""

    def check(got: Judged, _: Judged | None) -> Iterator[str]:
        told = COSTS.search(got.verdict.why)
        if told is None:
            yield "the reason has no costs of an operation"
            return
        alpha, alpha_low, alpha_high, beta, beta_low, beta_high = map(float, told.groups())
        yield from _apart("the time of an operation, over the true one", alpha / alpha_ms, 1 - within, 1 + within)
        yield from _apart("the rate of its bytes, over the true one", beta / beta_gbps, 1 - within, 1 + within)
        yield from _apart("the time of an operation", alpha, alpha_low, alpha_high)
        yield from _apart("the rate of its bytes", beta, beta_low, beta_high)

    return check


def raised_link(flow_bps: float, before_bps: float, after_bps: float, within: float, full: str = "") -> Check:
    """A faster link with the same cap of flows is predicted to gain little, and its full use much.

    The twin has that link: its step over stock is the predicted one, within a part of it; so is that over the arm
    `full`, which uses all of the link.
    """

    def check(got: Judged, twin: Judged | None) -> Iterator[str]:
        assert twin is not None
        trace = replace(got.found.trace, network=Network("caps", before_bps, (flow_bps,)))
        made = forecast.make(trace, trace, trace.size, Wire(after_bps, flow_bps), (STOCK,)).transports
        steps: Mapping[str, float] = {name: one.step_ns.value for name, one in made.items() if one.step_ns is not None}
        if set(steps) != {STOCK, forecast.FULL_USE}:
            yield f"not predicted: {'; '.join(one.why for one in made.values())}"
            return
        own_ns = _step_ns(got)
        yield from _apart("the predicted gain of a faster link", 1 - steps[STOCK] / own_ns, -0.05, 0.05)
        yield from _apart("the predicted gain of its full use", 1 - steps[forecast.FULL_USE] / own_ns, 0.25, 1.0)
        ratio = steps[STOCK] / _step_ns(twin)
        yield from _apart("the predicted step with a faster link, over the measured", ratio, 1 - within, 1 + within)
        if full:
            ratio = steps[forecast.FULL_USE] / twin.found.times[Arm(full)].median_ns
            yield from _apart("the predicted step at full use, over the measured", ratio, 1 - within, 1 + within)

    return check
