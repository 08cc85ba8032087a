"""Changes of level in a sequence of values, and the correlation of values with their neighbours. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# A change: of at least so many values on each side, with this score. Either the level changes by at least this factor,
# or the number of values above SLOW times the level by at least SLOW_VALUES from that of chance.
CHANGE_VALUES, CHANGE_SCORE, CHANGE_FACTOR = 10, 5.0, 1.1
SLOW, SLOW_VALUES = 1.5, 4
NEAR = 10  # values at the end of a block that are compared with as many of the next one


def last_change(values: Sequence[float] | Floats, groups: Sequence[int] | NDArray[np.int64]) -> int:
    """Return the place from which on values are surely unlike those before; 0 if there is none.

    values: positive, in order of time; they are compared after their groups' ratios are taken out. By the sum of their
    ranks, and by the number of slow ones, at the place where it differs most from that of chance (Pettitt, A
    non-parametric approach to the change-point problem, 1979), then again behind.
    """
    logs = np.log(np.maximum(np.asarray(values, np.float64), 1e-300))
    which = np.asarray(groups)
    begin = 0
    while (place := _change(logs[begin:], which[begin:])) > 0:
        begin += place
    return begin


def last_shift(rows: Floats) -> int:
    """Return the place from which on a column is surely higher or lower than before; 0 if there is none.

    rows: shape (times, columns). As last_change, by the sum of ranks of the column with the clearest change.
    """
    begin = 0
    while len(rows) - begin >= 2 * CHANGE_VALUES:
        place, score, _ = max((_clearest(_ranks(column)) for column in rows[begin:].T), key=lambda found: found[1])
        if score < CHANGE_SCORE:
            break
        begin += place
    return begin


def _change(logs: Floats, groups: NDArray[np.int64]) -> int:
    """Return the place of the clearest change; 0 if there is none."""
    if len(logs) < 2 * CHANGE_VALUES:
        return 0
    level = level_of(logs, groups)
    place, score, _ = _clearest(_ranks(level))
    factor = abs(float(np.median(level[place:]) - np.median(level[:place])))
    if score >= CHANGE_SCORE and factor >= math.log(CHANGE_FACTOR):
        return place
    slow = level > math.log(SLOW)
    place, score, distance = _clearest(slow.astype(np.float64))
    middle = (place + len(slow)) // 2
    lasts = slow[place:middle].any() == slow[middle:].any()  # not one group of slow values
    return place if score >= CHANGE_SCORE and distance >= SLOW_VALUES and lasts else 0


def level_of(logs: Floats, groups: NDArray[np.int64]) -> Floats:
    """Return the values less what their group differs from the largest one, and less the median of all.

    By the median difference between the ends of neighbouring blocks. The medians of whole groups would be of different
    states if a change is near the middle.
    """
    edges = [0, *(np.flatnonzero(np.diff(groups)) + 1), len(logs)]
    blocks = [logs[begin:end] for begin, end in pairwise(edges)]
    largest = int(np.bincount(groups).argmax())
    own = [place for place, begin in enumerate(edges[:-1]) if groups[begin] == largest]
    more: dict[int, list[float]] = {largest: [0.0]}
    for place, block in enumerate(blocks):
        group = int(groups[edges[place]])
        if group == largest:
            continue
        at = bisect_left(own, place)
        beside = own[max(at - 1, 0) : at + 1]
        least = min(abs(place - each) for each in beside)
        for each in beside:
            if abs(place - each) == least:
                ends = (block[:NEAR], blocks[each][-NEAR:]) if each < place else (block[-NEAR:], blocks[each][:NEAR])
                more.setdefault(group, []).append(float(np.median(ends[0]) - np.median(ends[1])))
    differs = {group: float(np.median(found)) for group, found in more.items()}
    level: Floats = logs - np.array([differs[int(group)] for group in groups])
    level -= np.median(level)
    return level


def _ranks(values: Floats) -> Floats:
    """Places of the values in their order; equal ones share a place."""
    _, same, times = np.unique(values, return_inverse=True, return_counts=True)
    places: Floats = (np.cumsum(times) - (times - 1) / 2)[same]
    return places


def _clearest(values: Floats) -> tuple[int, float, float]:
    """Return the place before which the sum of the values is farthest from that of chance, in standard deviations.

    Also how many these are, and the distance. Values that are like their neighbours count as fewer.
    """
    count, variance = len(values), float(values.var())
    before = np.arange(CHANGE_VALUES, count - CHANGE_VALUES + 1)
    if variance <= 0:
        return int(before[0]), 0.0, 0.0
    distance = np.abs(np.cumsum(values - values.mean())[before - 1])
    scores = distance / np.sqrt(before * (count - before) / count * variance)
    at = int(np.argmax(scores))
    place = int(before[at])
    rest = np.concatenate([values[:place] - values[:place].mean(), values[place:] - values[place:].mean()])
    like = min(max(alike(rest), 0.0), 0.99)
    return place, float(scores[at]) * math.sqrt((1 - like) / (1 + like)), float(distance[at])


def alike(rest: Floats) -> float:
    """Correlation of values, less their means, with those before them."""
    power = float(np.dot(rest, rest))
    return float(np.dot(rest[1:], rest[:-1])) / power if power > 0 else 0.0
