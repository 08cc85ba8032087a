"""A rank's clock against rank 0's, by the messages that measured it. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace.model import Clock

HEARTBEAT = "heartbeat"
JUMPED = "jumped"  # as that of a virtual machine that was suspended; its offset is that of a part of the run
# A span of the run counts by its shortest round trip. A span has so many measurements, or more in a long run.
SPAN_BEATS = 8
SPANS_MAX = 64
# Spans between the first and the last whose shortest round trip is above this multiple of the middle are not used.
ROUND_TRIP_FACTOR = 2
# Where the drift is not known, it is at most so much: crystals of computers are within it.
DRIFT_MAX = 50e-6
# Kernels slew a clock by at most 500 parts in a million. More between two spans, on both sides: a clock has jumped.
SLEW_MAX = 1e-3


def clock_of(beats: NDArray[Any], begin_ns: int, end_ns: int) -> Clock:
    """Return the clock of a rank from its CLOCK events, at least one, for a record from begin_ns to end_ns.

    A straight line goes through the spans of the run where it fits each within half its round trip, else a line from
    span to span. error_ns: of the worst span, with what drift may add outside them.
    """
    _, first = np.unique(beats["time_ns"], return_index=True)  # two rings may have the same one
    at, offset, trip = _spans(beats[first])
    if _jumped(at, offset, trip):
        best = int(np.argmin(trip))
        return Clock(JUMPED, int(offset[best]), None)
    since, above = (at - at[0]).astype(float), (offset - offset[0]).astype(float)
    line = np.polyval(np.polyfit(since, above, 1, w=1 / trip), since) if len(at) > 1 else above
    straight = bool((np.abs(above - line) <= trip / 2).all())
    fitted = line if straight else above
    error = float((trip / 2 + np.abs(above - fitted)).max())
    outside = max(int(at[0]) - begin_ns, end_ns - int(at[-1]), 0)
    slope_error = (trip[0] + trip[-1]) / 2 / since[-1] if straight and len(at) > 1 else DRIFT_MAX
    ends = [0, -1] if straight else range(len(at))
    points = tuple((int(at[i]), int(offset[0]) + round(fitted[i])) for i in ends) if len(at) > 1 else ()
    return Clock(HEARTBEAT, int(offset[np.argmin(trip)]), round(error + outside * slope_error), points)


def _spans(beats: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Time, offset and round trip of the shortest round trip of each span."""
    spans = [beats]
    if len(beats) >= SPAN_BEATS:  # the first and the last are short, so that little of the run is outside them
        edge = min(SPAN_BEATS, len(beats) // 2)
        between = beats[edge : len(beats) - edge]
        count = min(SPANS_MAX - 2, len(between) // SPAN_BEATS)
        spans = [beats[:edge], *(np.array_split(between, count) if count else ()), beats[len(beats) - edge :]]
    best = np.array([span[np.argmin(span["b"])] for span in spans], beats.dtype)
    trip = np.maximum(best["b"].astype(float), 1.0)
    good = trip <= ROUND_TRIP_FACTOR * np.median(trip)
    good[[0, -1]] = True
    return best["time_ns"][good].astype("i8"), best["a"][good].astype("i8"), trip[good]


def _jumped(at: NDArray[np.int64], offset: NDArray[np.int64], trip: NDArray[np.float64]) -> bool:
    most = (trip[1:] + trip[:-1]) / 2 + SLEW_MAX * np.diff(at)
    return bool((np.abs(np.diff(offset)) > most).any())
