"""A line through what operations took: ns of each, ns of a byte, how many shared the link, and how good that is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.blocks import BOOTSTRAP_SEED
from netbottleneck.trace.model import Trace
from netbottleneck.whatif.link_model import Service, line, services
from netbottleneck.whatif.plan import in_flight

# A fit of fewer operations is poor, and one whose operations are off by more: the middle one, the last tenth.
LEAST, MIDDLE_OFF, MOST_OFF = 8, 0.15, 0.5
# So many lines are drawn to tell how well one is known.
LINES = 2000
# So many operations are tried as sharing the link; more than told count where they are off by less than this part.
SHARED_MOST, BY_FAR = 4, 0.5


def _by_step(rows: Sequence[Service], each: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """A number of each operation, added up over steps."""
    steps = np.unique([row.step for row in rows], return_inverse=True)[1]
    return np.bincount(steps, each).astype(np.float64)


def _off(took: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[float, float]:
    """By how much the middle one and the last tenth are off, relative."""
    off = np.abs(took / np.maximum(expected, 1.0) - 1)
    return float(np.median(off)), float(np.quantile(off, 0.9))


def _is_far(off: tuple[float, float]) -> bool:
    return off[0] > MIDDLE_OFF or off[1] > MOST_OFF


def _steady(rows: Sequence[Service], a: float, b: float, least_byte_ns: float) -> tuple[float, float]:
    """The same line, but those of a step together are met in the middle, and no byte is faster than the network's.

    What an operation took by itself is known less well than that: it shared the link with others. Where they all were
    faster than the network's bytes, what was measured of the network before was wrong, and does not count."""
    b = max(b, least_byte_ns)
    count = _by_step(rows, np.ones(len(rows)))
    sizes, took = _by_step(rows, [row.nbytes for row in rows]), _by_step(rows, [row.ns for row in rows])
    if a > 0 or b == least_byte_ns > 0:
        a = float(np.median((took - b * sizes) / count))
    if a > 0:
        return a, b
    return 0.0, float(np.median(took / sizes))


def explained(rows: Sequence[Service], known: float | None, least_byte_ns: float) -> tuple[float, float, str, str]:
    """Return (ns of an operation, ns of a byte, why that is poor, a note). known: ns of an operation, where measured.

    least_byte_ns: what a byte takes at least. Where operations shared the link otherwise than one after the other, or
    as equals, their own times say little; what those of a step took together may still say what a byte costs."""
    sizes = np.array([row.nbytes for row in rows], np.float64)
    took = np.array([row.ns for row in rows])
    one_size = float(np.ptp(sizes)) == 0
    a, b = line(sizes, took, known if one_size else None)
    if not one_size:
        a, b = _steady(rows, a, b, least_byte_ns)
    off = _off(took, a + b * sizes)
    said = [f"only {len(rows)} operations"] if len(rows) < LEAST else []
    if one_size and known is None:
        said.append("all operations have one size: what a byte costs is not told from what an operation costs")
    if not _is_far(off):
        return a, b, "; ".join(said), ""
    fixed = known or 0.0
    step_sizes, step_took = _by_step(rows, sizes), _by_step(rows, took)
    own = _by_step(rows, np.full(len(rows), fixed))
    byte_ns = max(0.0, float(np.median((step_took - own) / step_sizes)))
    middle, most = _off(step_took, own + byte_ns * step_sizes)
    if len(step_took) >= LEAST and most <= MIDDLE_OFF:
        note = f"single operations are off by {off[0]:.0%} in the middle, those of a step together by {middle:.1%}"
        return fixed, byte_ns, "; ".join(said), note
    said.append(f"half of the operations are off by {off[0]:.0%} and more, a tenth by {off[1]:.0%}")
    return a, b, "; ".join(said), ""


def by_size(rows: Sequence[Service]) -> list[tuple[int, int, float]]:
    """Operations by their size: (bytes, how many, ns of the middle one)."""
    took: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        took[row.nbytes].append(row.ns)
    return [(nbytes, len(own), float(np.median(own))) for nbytes, own in sorted(took.items())]


def lines(rows: Sequence[Service], a: float, b: float, least_byte_ns: float) -> tuple[tuple[float, float], ...]:
    """Return two lines that the run holds for possible as well as ns = a + b bytes: (a, b) with 95 % between them.

    All operations together take as long by each as by a and b; how much of that goes by the number of operations and
    how much by their bytes is drawn by sizes, whose operations err alike. () where one size cannot tell."""
    found = by_size(rows)
    if len(found) < 2:
        return ()
    sizes, counts, took = (np.array(column, np.float64) for column in zip(*found, strict=True))
    whole = float(a * counts.sum() + b * (counts * sizes).sum())
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(len(sizes), size=(LINES, len(sizes)))
    x, y, count = sizes[picks], took[picks], counts[picks]
    weight = count / y**2
    weight = weight / weight.sum(axis=1, keepdims=True)
    mean_x, mean_y = (weight * x).sum(axis=1), (weight * y).sum(axis=1)
    spread = (weight * (x - mean_x[:, None]) ** 2).sum(axis=1)
    told = spread > 0  # else one size was drawn: it tells nothing
    slope = (weight * (x - mean_x[:, None]) * (y - mean_y[:, None])).sum(axis=1)[told] / spread[told]
    slope = np.maximum(slope, least_byte_ns)  # as _steady has it: no byte faster than the network, and all is met
    fixed = np.maximum(
        ((count * y).sum(axis=1)[told] - slope * (count * x).sum(axis=1)[told]) / count.sum(axis=1)[told], 0
    )
    part = fixed * counts.sum() / np.maximum(fixed * counts.sum() + slope * (counts * sizes).sum(), 1.0)
    most = max(0.0, 1 - min(b, least_byte_ns) * float((counts * sizes).sum()) / max(whole, 1.0))
    ends = np.minimum(np.percentile(part, [2.5, 97.5]), most) if len(part) else ()
    return tuple((float(end * whole / counts.sum()), float((1 - end) * whole / (counts * sizes).sum())) for end in ends)


def shared(trace: Trace, transport: str) -> tuple[str, list[Service], int]:
    """The formula, the operations, and how many of them shared the link.

    At least as many as the order in which they ended tells; more, up to a few, where their times then fit a line by far
    better: equals that share a link overtake nobody."""
    least = in_flight(trace, transport)
    main, found, flying = "ring", list[Service](), least
    best = np.inf
    for count in range(least, max(least, SHARED_MOST) + 1):
        formula, rows = services(trace, transport, count)
        rows = [row for row in rows if row.ns > 0]
        if not rows:
            return formula, rows, count
        sizes, took = np.array([row.nbytes for row in rows], np.float64), np.array([row.ns for row in rows])
        a, b = line(sizes, took)
        off = _off(took, a + b * sizes)[0]
        if off < best * BY_FAR:
            main, found, flying, best = formula, rows, count, off
    return main, found, flying


def interval(rows: Sequence[Service], expected: NDArray[np.float64]) -> tuple[float, float]:
    """What the operations of a step took together, over what they should have, less 1: 5 % and 95 % of the steps."""
    took = _by_step(rows, [row.ns for row in rows])
    low, high = np.quantile(took / np.maximum(_by_step(rows, expected), 1.0) - 1, [0.05, 0.95])
    return max(-0.99, min(0.0, float(low))), max(0.0, float(high))
