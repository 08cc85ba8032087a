"""What a run says of its transports: what operations would have taken alone, what links reached, what steps cost."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.scaling import counted, last_entries
from netbottleneck.trace.model import Collective, Trace, TransportInfo
from netbottleneck.whatif.links import Link

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
# The fewest streams within this part of the best rate count as its streams.
GOOD = 0.98
ROUNDS = 20
# Beyond so many times the middle deviation, a sample counts less (Huber; 1.4826 makes it a normal one's).
HUBER = 1.5 * 1.4826


@dataclass(frozen=True, slots=True)
class Service:
    """One operation: its step, its bytes, what it would have taken alone.

    launch_ns: from the last submission until all ranks had agreed; members: tensors in it. None where the run does not
    know."""

    step: int
    nbytes: int
    ns: float
    launch_ns: float | None
    members: int | None = None


def formula(algorithm: str | None) -> str:
    """Return the formula for what the run calls its algorithm; a ring where it does not say."""
    return next((name for part, name in FORMULAS if part in (algorithm or "ring")), "ring")


def _rows(trace: Trace, transport: str) -> list[Collective]:
    """The finished all-reduces of counted steps; of all steps where none is counted."""
    own = [(step.rank, step.index) for step in counted(trace) if step.transport == transport]
    inside = set(own or [(step.rank, step.index) for step in trace.steps if step.transport == transport])
    rows = [c for c in trace.collectives if c.transport == transport and c.kind == "allreduce" and c.tensor_bytes > 0]
    return [row for row in rows if row.finished and (row.rank, row.step) in inside]


def _operations(trace: Trace, transport: str) -> tuple[str, list[list[Collective]]]:
    """The formula that most bytes went by, and what went by it and all ranks finished, by operation."""
    groups: dict[tuple[str, int, int, int], list[Collective]] = defaultdict(list)
    for row in _rows(trace, transport):
        groups[row.match].append(row)
    recorded = max((len(rows) for rows in groups.values()), default=0)
    whole = [rows for rows in groups.values() if len(rows) == recorded]
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


def _members(trace: Trace, operation: Collective) -> int | None:
    """How many tensors an operation has; None where the run does not tell."""
    index = operation.bucket
    return len(trace.buckets[index].parameters) or None if index is not None and index < len(trace.buckets) else None


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
        Service(
            row[2].step if row[2].step is not None else -1, row[2].tensor_bytes, ns, row[3], _members(trace, row[2])
        )
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


def _infos(trace: Trace, transport: str) -> list[TransportInfo]:
    """What ranks say of their transports: this one first, then the others that are measured."""
    found = [info for rank in trace.ranks for info in rank.transports]
    return sorted(found, key=lambda info: info.name != transport)


def flows(trace: Trace, transport: str) -> tuple[float, float]:
    """How many flows to a peer a transport used, and how many it may use elsewhere: what it was told, else any."""
    infos = [info for rank in trace.ranks for info in rank.transports if info.name == transport]
    info = infos[0] if infos else None
    if info is None or info.streams_open is None:
        # Who does not tell has a flow for each interface that it was given, as gloo has.
        names = (info.interface if info is not None else None) or ""
        count = float(max(1, len(names.split(","))))
        return count, count
    used = float(info.streams_used or info.streams_open)
    return used, float(info.streams_asked) if info.streams_asked else math.inf


def achievable(trace: Trace, transport: str) -> Link | None:
    """Return what the run's probe reached with the streams it then used; None where there was no probe."""
    for info in _infos(trace, transport):
        rates = {probe.lanes: probe.bits_per_s for probe in info.probe if probe.bits_per_s > 0}
        if rates:
            best = max(rates.values())
            fewest = min(lanes for lanes, rate in rates.items() if rate >= GOOD * best)
            return Link(best, info.streams_used or fewest, rates.get(1))
    return None


def nominal(trace: Trace) -> Link | None:
    """Return the link that the run was given, or that its interface claims; None where neither is known."""
    if trace.network is not None and trace.network.link_bps:
        flows = trace.network.flow_bps
        return Link(trace.network.link_bps, max(1, len(flows)), min(flows) if flows else None)
    told = [info.link_bps for rank in trace.ranks for info in rank.transports if info.link_bps]
    return Link(min(told)) if told else None


def step_and_sum(trace: Trace, transport: str) -> tuple[float | None, float]:
    """Ns of a step and of a byte added, where the job has measured them: csrc/coll/choose.h."""
    found = [info.costs for info in _infos(trace, transport) if info.name == transport and len(info.costs) >= 3]
    return (float(found[0][0]), float(found[0][2])) if found else (None, 0.0)
