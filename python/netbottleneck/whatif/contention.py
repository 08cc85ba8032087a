"""How many times as long compute takes while operations are under way: a transport against steps in which none is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.blocks import by_block, redrawn
from netbottleneck.analysis.scaling import counted, intersection, intervals, is_split, passes, total, under_way
from netbottleneck.analysis.stats import PAIRS_MIN, Estimate, median_of
from netbottleneck.trace.model import NULL, Trace

# Where less of compute than this has an operation beside it, nothing is told of that.
BESIDE_LEAST = 0.05
# Nor where the part of it that is lost is not known better than this.
WIDTH_MOST = 0.5
LOST_MOST = 0.99


def _blocks(trace: Trace, arm: str) -> dict[int, NDArray[np.float64]]:
    """By block, of each counted step: forward and backward, and of them what had an operation of the arm beside it."""
    flights = under_way(trace, arm)
    rows = []
    for step in counted(trace):
        if step.transport == arm and is_split(step):
            computed = passes(step)
            beside = intersection(computed, flights.get(step.rank, intervals([])))
            rows.append((step, (float(total(computed)), float(total(beside)))))
    return by_block(rows)


def contention(trace: Trace, transport: str) -> tuple[Estimate | None, str]:
    """Return how many times as long compute takes beside operations of a transport, and that in words.

    With C ns of forward and backward a step, h of them beside operations, and W where nothing moves (the arm null, in
    neighbouring blocks), C - h + h/c = W: c = 1 / (1 - (C - W)/h), at least 1. The median over pairs of blocks; its
    interval is drawn from pairs and from the steps of each. None, and why, where the run does not tell."""
    found = redrawn(_blocks(trace, NULL), _blocks(trace, transport))
    unknown = "what operations cost the compute beside them is not known"
    if found is None or len(found.base) < PAIRS_MIN:
        return None, f"{unknown}: it takes {PAIRS_MIN} blocks of steps, in turn, in which nothing moves: the arm {NULL}"
    beside = float(np.median(found.other[:, 1] / np.maximum(found.other[:, 0], 1.0)))
    if beside < BESIDE_LEAST:
        return None, f"{unknown}: only {beside:.1%} of it had one beside it"
    lost = median_of(_lost(found.base, found.other), _lost(found.base_drawn, found.other_drawn))
    if lost.high - lost.low > WIDTH_MOST:
        return None, f"{unknown}: {lost.low:.0%} to {lost.high:.0%} of that time is lost"
    value, low, high = (1 / (1 - min(max(part, 0.0), LOST_MOST)) for part in (lost.value, lost.low, lost.high))
    words = f"compute takes {value:.3f} times as long beside operations, {low:.3f} to {high:.3f}"
    return Estimate(value, low, high), f"{words} (measured, {len(found.base)} pairs of blocks of {NULL})"


def _lost(base: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part of the time beside operations by which compute is longer."""
    lost: NDArray[np.float64] = (other[..., 0] - base[..., 0]) / np.maximum(other[..., 1], 1.0)
    return lost
