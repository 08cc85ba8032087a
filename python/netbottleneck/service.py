"""How long operations would have taken alone: what they took, less what they waited for and shared with others."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from netbottleneck.scaling import counted, last_entries
from netbottleneck.trace import Collective, Trace

# How a run names what csrc/sim/shape.h has a formula for; csrc/coll/choose.h is what names them. Gloo's own are rings.
FORMULAS = (
    ("two_level", "two_level"),
    ("ring", "ring"),
    ("tree", "tree"),
    ("halving", "halving_doubling"),
    ("doubling", "direct"),
    ("direct", "direct"),
    ("star", "direct"),
)
ROUNDS = 20
# Beyond so many times the middle deviation, a sample counts less (Huber; 1.4826 makes it a normal one's).
HUBER = 1.5 * 1.4826


@dataclass(frozen=True, slots=True)
class Service:
    """One operation: its step, its bytes, what it would have taken alone.

    launch_ns: from the last submission until all ranks had agreed, None where the run does not know."""

    step: int
    nbytes: int
    ns: float
    launch_ns: float | None


def formula(algorithm: str | None) -> str:
    """Return the formula for what the run calls its algorithm; a ring where it does not say."""
    return next((name for part, name in FORMULAS if part in (algorithm or "ring")), "ring")


def _operations(trace: Trace, transport: str) -> tuple[str, list[list[Collective]]]:
    """The all-reduces of counted steps that all ranks finished, by operation; only those of the main algorithm."""
    inside = {(step.rank, step.index) for step in counted(trace) if step.transport == transport}
    inside = inside or {(step.rank, step.index) for step in trace.steps if step.transport == transport}
    groups: dict[tuple[str, int, int, int], list[Collective]] = defaultdict(list)
    for row in trace.collectives:
        if row.transport == transport and row.kind == "allreduce" and row.finished and (row.rank, row.step) in inside:
            groups[row.match].append(row)
    recorded = len({row.rank for rows in groups.values() for row in rows})
    whole = [rows for rows in groups.values() if len(rows) == recorded and rows[0].tensor_bytes > 0]
    weight: Counter[str] = Counter()
    for rows in whole:
        weight[formula(rows[0].algorithm)] += rows[0].tensor_bytes
    main = weight.most_common(1)[0][0] if weight else "ring"
    return main, [rows for rows in whole if formula(rows[0].algorithm) == main]


def _alone(entries: Sequence[float], ends: Sequence[float], in_flight: int) -> list[float]:
    """What each would have taken alone, in order of entry: while n share the link, each has an n-th of it."""
    places: list[float] = []
    begins = []
    for entry, end in zip(entries, ends, strict=True):
        begin = entry if len(places) < in_flight else max(entry, heapq.heappop(places))
        begins.append(begin)
        heapq.heappush(places, max(begin, end))
    marks = sorted([(at, 1) for at in begins] + [(max(b, e), -1) for b, e in zip(begins, ends, strict=True)])
    times, done, sharing, before = [], [0.0], 0, marks[0][0]
    for at, change in marks:
        done.append(done[-1] + ((at - before) / sharing if sharing else 0.0))
        times.append(at)
        sharing, before = sharing + change, at
    whole = np.array(done[1:])
    found = np.interp(np.array([begins, ends]), np.array(times), whole)
    return [max(0.0, float(x)) for x in found[1] - found[0]]


def services(trace: Trace, transport: str, in_flight: int) -> tuple[str, list[Service]]:
    """Return the formula of a transport's main algorithm, and its operations in order of their last submission."""
    main, groups = _operations(trace, transport)
    entries = last_entries(trace)
    rows = []
    for group in groups:
        submit = entries.get(group[0].match, (max(c.submit_ns for c in group), 0))[0]
        agreed = [c.agreed_ns - submit for c in group if c.agreed_ns is not None]
        launch = max(0.0, statistics.fmean(agreed)) if len(agreed) == len(group) else None
        end = statistics.fmean(c.done_ns or 0 for c in group)
        rows.append((submit + (launch or 0.0), end, group[0], launch))
    rows.sort(key=lambda row: row[:2])
    if not rows:
        return main, []
    alone = _alone([row[0] for row in rows], [row[1] for row in rows], in_flight)
    return main, [
        Service(row[2].step if row[2].step is not None else -1, row[2].tensor_bytes, ns, row[3])
        for row, ns in zip(rows, alone, strict=True)
    ]


def line(nbytes: Iterable[float], ns: Iterable[float], fixed_ns: float | None = None) -> tuple[float, float]:
    """Return (ns of an operation, ns of a byte), both at least 0, that explain the times best, relatively and robustly.

    fixed_ns: what an operation costs, where it is known. Iteratively reweighted least squares with Huber's weights."""
    x, y = np.array(list(nbytes), np.float64), np.array(list(ns), np.float64)
    base = fixed_ns or 0.0
    if fixed_ns is not None or np.ptp(x) == 0:
        return base, max(0.0, float(np.median((y - base) / x)))
    weight: NDArray[np.float64] = np.ones_like(x)
    a, b = 0.0, float(np.median(y / x))
    for _ in range(ROUNDS):
        expected = np.maximum(a + b * x, 1.0)
        w = weight / expected**2
        mean_x, mean_y = np.average(x, weights=w), np.average(y, weights=w)
        b = float(np.sum(w * (x - mean_x) * (y - mean_y)) / np.sum(w * (x - mean_x) ** 2))
        a = float(mean_y - b * mean_x)
        if a < 0 or b < 0:
            a, b = (0.0, float(np.median(y / x))) if a < 0 else (float(np.median(y)), 0.0)
        off = np.abs(y / np.maximum(a + b * x, 1.0) - 1)
        limit = max(HUBER * float(np.median(off)), 1e-6)
        weight = np.minimum(1.0, limit / np.maximum(off, 1e-12))
    return a, b
