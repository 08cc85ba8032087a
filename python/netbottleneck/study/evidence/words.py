"""Facts in a few words: estimates with their intervals, cells by name, what a number is."""

from __future__ import annotations

from collections.abc import Iterable

from netbottleneck.analysis.stats import Estimate
from netbottleneck.study.evidence.values import COMPUTED, NOTHING_MOVES, CellFacts
from netbottleneck.units import ms

BASELINES = {COMPUTED: "estimated", NOTHING_MOVES: "measured, against the arm in which nothing moves"}

# More names than this are counted.
NAMES_MAX = 4


def factor(one: Estimate) -> str:
    """0.217 (0.216 to 0.218)."""
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def percents(one: Estimate) -> str:
    """A part: +2.1 % (-0.3 to +4.5)."""
    return f"{100 * one.value:+.1f} % ({100 * one.low:+.1f} to {100 * one.high:+.1f})"


def time(one: Estimate) -> str:
    """101 ms (100 to 103)."""
    low, high = (ms(ns).removesuffix(" ms") for ns in (one.low, one.high))
    return f"{ms(one.value)} ({low} to {high})"


def over_one(ratio: Estimate) -> Estimate:
    """A ratio as what it is more than 1."""
    return Estimate(ratio.value - 1, ratio.low - 1, ratio.high - 1)


def label(cell: CellFacts) -> str:
    """What its scaling factors are."""
    return BASELINES.get(cell.baseline, "measured")


def listed(names: Iterable[str]) -> str:
    """Each once, in order, with commas; the first few where they are many."""
    found = list(dict.fromkeys(names))
    left = len(found) - NAMES_MAX
    return ", ".join(found[:NAMES_MAX]) + (f" and {left} more" if left > 0 else "")
