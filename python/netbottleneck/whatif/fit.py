"""Fits of a run: the cost of its operations by transport, of fusion-buffer copies, and of contention with compute."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from netbottleneck import _core
from netbottleneck.analysis.bandwidth import achievable_bandwidth, probed, stated_link_bps
from netbottleneck.analysis.comparisons import Estimate, block_pairs, by_block, middle_of_sequence
from netbottleneck.analysis.intervals import (
    counted,
    in_flight_spans,
    intersection,
    intervals,
    is_split,
    last_entries,
    passes,
    total,
)
from netbottleneck.analysis.thresholds import PAIRS_MIN
from netbottleneck.trace.model import Collective, Trace, TransportInfo
from netbottleneck.trace.transports import NULL, PSEUDO, Arm
from netbottleneck.units import percent
from netbottleneck.whatif.cost import ALGORITHMS, UNLIMITED, Cost, Link, Table, Wire, non_negative
from netbottleneck.whatif.plan import in_flight

# Part of an algorithm's name in a run (csrc/coll/choose.h), and its formula in csrc/sim/shape.h. Gloo uses rings.
FORMULAS = (
    ("two_level", "two_level"),
    ("ring", "ring"),
    ("tree", "tree"),
    ("halving", "halving_doubling"),
    ("doubling", "direct"),
    ("direct", "direct"),
    ("inline", "direct"),
    ("star", "direct"),  # name in older traces
)
ROUNDS = 20
# Samples further off than this many median deviations get less weight (Huber; 1.4826 scales to a normal deviation).
HUBER = 1.5 * 1.4826


@dataclass(frozen=True, slots=True)
class Service:
    """One operation: its step, its bytes, and ns, the time it would have taken alone.

    launch_ns: from the last submission to the end of negotiation on all ranks. members: its number of tensors. Both are
    None if the run did not record them.
    """

    step: int
    nbytes: int
    ns: float
    launch_ns: float | None
    members: int | None = None


def formula(algorithm: str | None) -> str:
    """Return the formula for an algorithm's name in a run; a ring if there is no name."""
    return next((name for part, name in FORMULAS if part in (algorithm or "ring")), "ring")


def _rows(trace: Trace, transport: Arm) -> list[Collective]:
    """The finished all-reduces of counted steps; of all steps if none is counted."""
    own = [(step.rank, step.index) for step in counted(trace) if step.arm == transport]
    inside = set(own or [(step.rank, step.index) for step in trace.steps if step.arm == transport])
    gradients = (c for c in trace.collectives if c.arm == transport and not c.by_script)
    rows = [c for c in gradients if c.kind == "allreduce" and c.known_bytes > 0]
    return [row for row in rows if row.finished and (row.rank, row.step) in inside]


def _operations(trace: Trace, transport: Arm) -> tuple[str, list[list[Collective]]]:
    """The formula that moved most bytes, and the operations that used it and that all ranks finished."""
    groups: dict[tuple[str, int, int, int], list[Collective]] = defaultdict(list)
    for row in _rows(trace, transport):
        groups[row.match].append(row)
    recorded = len(trace.ranks)  # a simulated trace has one rank, which stands for all
    members = max((min(rows[0].ranks or recorded, recorded) for rows in groups.values()), default=0)
    whole = [rows for rows in groups.values() if len(rows) == min(rows[0].ranks or recorded, recorded) == members]
    weight: Counter[str] = Counter()
    for rows in whole:
        weight[formula(rows[0].algorithm)] += rows[0].known_bytes
    main = weight.most_common(1)[0][0] if weight else "ring"
    return main, [rows for rows in whole if formula(rows[0].algorithm) == main]


def _times_alone(entries: Sequence[float], ends: Sequence[float], in_flight: int) -> list[float]:
    """Time of each operation alone, in order of entry. While n operations share the link, each gets 1/n of it."""
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
    """Number of tensors of an operation; None if the run did not record it."""
    index = operation.bucket
    return (
        len(trace.buckets[index].parameters) or None if index is not None and 0 <= index < len(trace.buckets) else None
    )


def services(trace: Trace, transport: Arm, in_flight: int) -> tuple[str, list[Service]]:
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
    alone = _times_alone([row[0] for row in rows], [row[1] for row in rows], in_flight)
    return main, [
        Service(row[2].step if row[2].step is not None else -1, row[2].known_bytes, ns, row[3], _members(trace, row[2]))
        for row, ns in zip(rows, alone, strict=True)
    ]


def fit_line(nbytes: Iterable[float], ns: Iterable[float], fixed_ns: float | None = None) -> tuple[float, float]:
    """Fit ns = a + b bytes, both at least 0, to relative deviations. Returns (a, b).

    fixed_ns: a, where it is known. Iteratively reweighted least squares with Huber's weights.
    """
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


def _transport_infos(trace: Trace, transport: Arm) -> list[TransportInfo]:
    """Records of an arm's transport on all ranks."""
    name = Arm.parse(transport).transport
    return [info for rank in trace.ranks for info in rank.transports if info.name == name]


def flows(trace: Trace, transport: Arm) -> tuple[float, float]:
    """Number of flows to a peer that a transport used, and the number it may use elsewhere (inf: any number)."""
    infos = _transport_infos(trace, transport)
    info = infos[0] if infos else None
    if info is None or info.streams_open is None:
        # A transport without stream counts has one flow for each of its interfaces, as gloo has.
        names = (info.interface if info is not None else None) or ""
        count = float(max(1, len(names.split(","))))
        return count, count
    used = float(info.streams_used or info.streams_open)
    return used, float(info.streams_asked) if info.streams_asked else math.inf


def achievable(trace: Trace, transport: Arm | None = None) -> Link | None:
    """Return the best point of the transport's own probe, else of the fastest one; None without a probe."""
    own = None if transport is None else probed(trace).get(Arm.parse(transport).transport)
    found = own or achievable_bandwidth(trace)
    return None if found is None else Link(found.best[1], found.best[0])


def nominal(trace: Trace, transport: Arm) -> Link | None:
    """Return the configured link, else the rated speed of the transport's slowest interface; None if it is not known.

    Ranks that share a host have no rated link.
    """
    rate = stated_link_bps(trace, Arm.parse(transport))
    if not rate:
        return None
    flows = trace.network.flow_bps if trace.network is not None else ()
    return Link(rate, max(1, len(flows)), min(flows, default=None))


def step_and_sum(trace: Trace, transport: Arm) -> tuple[float | None, float]:
    """Ns of a step and of an added byte, where the job measured them (csrc/coll/choose.h)."""
    found = [info.costs for info in _transport_infos(trace, transport) if len(info.costs) >= 3]
    return (float(found[0][0]), float(found[0][2])) if found else (None, 0.0)


# Line fit of operation times: ns per operation, ns per byte, the number that share the link, and the quality of the
# fit.

# A fit is poor with fewer operations than this, or with a larger median or 90th-percentile deviation.
LEAST_OPERATIONS, MIDDLE_OFF, MOST_OFF = 8, 0.15, 0.5
# Operations of one size have a cost of a byte if their time is that of a full link up to this part.
FIXED_MOST = 0.2
# Bootstrap draws for the uncertainty of a line, and their seed.
LINES, BOOTSTRAP_SEED = 2000, 0
# Largest number of operations tried as sharing the link. A larger number counts only if it cuts the deviation by this.
SHARED_MOST, BY_FAR = 4, 0.5
LINE_PARTS = 2  # parameters of a line


def _by_step(rows: Sequence[Service], each: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Per-step sums of a value of each operation."""
    steps = np.unique([row.step for row in rows], return_inverse=True)[1]
    return np.bincount(steps, each).astype(np.float64)


def _deviation(took: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[float, float]:
    """Median and 90th percentile of the relative deviation."""
    off = np.abs(took / np.maximum(expected, 1.0) - 1)
    return float(np.median(off)), float(np.quantile(off, 0.9))


def _is_poor(off: tuple[float, float]) -> bool:
    return off[0] > MIDDLE_OFF or off[1] > MOST_OFF


def _refit_by_step(rows: Sequence[Service], a: float, b: float, least_byte_ns: float) -> tuple[float, float]:
    """The same line, refitted to the sums of each step, with no byte faster than the network's.

    A single operation's time is less certain, because it shared the link. If all operations were faster than
    least_byte_ns, the earlier network measurement was wrong and is ignored.
    """
    b = max(b, least_byte_ns)
    count = _by_step(rows, np.ones(len(rows)))
    sizes, took = _by_step(rows, [row.nbytes for row in rows]), _by_step(rows, [row.ns for row in rows])
    if a > 0 or b == least_byte_ns > 0:
        a = float(np.median((took - b * sizes) / count))
    if a > 0:
        return a, b
    return 0.0, float(np.median(took / sizes))


def fit_operations(rows: Sequence[Service], known: float | None, least_byte_ns: float) -> tuple[float, float, str, str]:
    """Return (ns of an operation, ns of a byte, why the fit is poor, a note).

    known: ns of an operation, where measured. least_byte_ns: lower bound of a byte's time. If operations shared the
    link unevenly, their own times say little. The sum over a step may still give the cost of a byte.
    """
    sizes = np.array([row.nbytes for row in rows], np.float64)
    took = np.array([row.ns for row in rows])
    one_size = float(np.ptp(sizes)) == 0
    a, b = fit_line(sizes, took, known if one_size else None)
    if not one_size:
        a, b = _refit_by_step(rows, a, b, least_byte_ns)
    off = _deviation(took, a + b * sizes)
    reasons = [f"only {len(rows)} operations"] if len(rows) < LEAST_OPERATIONS else []
    if one_size and known is None:
        reasons.append(
            "all operations have one size: the cost of a byte cannot be separated from the cost of an operation"
        )
    if not _is_poor(off):
        return a, b, "; ".join(reasons), ""
    fixed = known or 0.0
    step_sizes, step_took = _by_step(rows, sizes), _by_step(rows, took)
    own = _by_step(rows, np.full(len(rows), fixed))
    byte_ns = max(0.0, float(np.median((step_took - own) / step_sizes)))
    middle, most = _deviation(step_took, own + byte_ns * step_sizes)
    if len(step_took) >= LEAST_OPERATIONS and most <= MIDDLE_OFF:
        note = (
            f"the median deviation is {percent(off[0])} for one operation, and {percent(middle)} for all operations of "
            "a step"
        )
        return fixed, byte_ns, "; ".join(reasons), note
    reasons.append(f"half of the operations deviate by {percent(off[0])} or more, a tenth by {percent(off[1])} or more")
    return a, b, "; ".join(reasons), ""


def by_size(rows: Sequence[Service]) -> list[tuple[int, int, float]]:
    """Operations by size: (bytes, count, median ns)."""
    took: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        took[row.nbytes].append(row.ns)
    return [(nbytes, len(own), float(np.median(own))) for nbytes, own in sorted(took.items())]


def bounding_lines(
    rows: Sequence[Service], a: float, b: float, least_byte_ns: float
) -> tuple[tuple[float, float], ...]:
    """Return two lines (a, b) that bound 95 % of the lines compatible with the run. () if there is only one size.

    Both lines give the same total time as ns = a + b bytes. A bootstrap over sizes gives the share of the fixed part,
    because operations of one size have correlated errors.
    """
    sizes_and_times = by_size(rows)
    if len(sizes_and_times) < 2:
        return ()
    sizes, counts, took = (np.array(column, np.float64) for column in zip(*sizes_and_times, strict=True))
    whole = float(a * counts.sum() + b * (counts * sizes).sum())
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(len(sizes), size=(LINES, len(sizes)))
    x, y, count = sizes[picks], took[picks], counts[picks]
    weight = count / y**2
    weight = weight / weight.sum(axis=1, keepdims=True)
    mean_x, mean_y = (weight * x).sum(axis=1), (weight * y).sum(axis=1)
    spread = (weight * (x - mean_x[:, None]) ** 2).sum(axis=1)
    usable = spread > 0  # otherwise all draws are one size, which fixes no slope
    slope = (weight * (x - mean_x[:, None]) * (y - mean_y[:, None])).sum(axis=1)[usable] / spread[usable]
    slope = np.maximum(
        slope, least_byte_ns
    )  # as in _refit_by_step: no byte is faster than the network, and the total time is kept
    fixed = np.maximum(
        ((count * y).sum(axis=1)[usable] - slope * (count * x).sum(axis=1)[usable]) / count.sum(axis=1)[usable], 0
    )
    part = fixed * counts.sum() / np.maximum(fixed * counts.sum() + slope * (counts * sizes).sum(), 1.0)
    most = max(0.0, 1 - min(b, least_byte_ns) * float((counts * sizes).sum()) / max(whole, 1.0))
    ends = np.minimum(np.percentile(part, [2.5, 97.5]), most) if len(part) else ()
    return tuple((float(end * whole / counts.sum()), float((1 - end) * whole / (counts * sizes).sum())) for end in ends)


def concurrent_operations(trace: Trace, transport: Arm) -> tuple[str, list[Service], int]:
    """The formula, the operations, and the number of operations that shared the link.

    The order of completion gives the least number. A larger one, up to SHARED_MOST, counts only if it makes the times
    fit a line far better: operations that share a link equally do not overtake each other. With two
    operations in a step it does not count: their times are always on a line.
    """
    least = in_flight(trace, transport)
    main, found, concurrent = "ring", list[Service](), least
    best = np.inf
    for count in range(least, max(least, SHARED_MOST) + 1):
        formula, rows = services(trace, transport, count)
        rows = [row for row in rows if row.ns > 0]
        if not rows:
            return formula, rows, count
        sizes, took = np.array([row.nbytes for row in rows], np.float64), np.array([row.ns for row in rows])
        a, b = fit_line(sizes, took)
        off = _deviation(took, a + b * sizes)[0]
        if off < best * BY_FAR:
            main, found, concurrent, best = formula, rows, count, off
        if np.median(np.unique([row.step for row in rows], return_counts=True)[1]) <= LINE_PARTS:
            break
    return main, found, concurrent


def interval(rows: Sequence[Service], expected: NDArray[np.float64]) -> tuple[float, float]:
    """5 % and 95 % quantiles over steps of (total time of the step's operations / expected time) - 1."""
    took = _by_step(rows, [row.ns for row in rows])
    low, high = np.quantile(took / np.maximum(_by_step(rows, expected), 1.0) - 1, [0.05, 0.95])
    return max(-0.99, min(0.0, float(low))), max(0.0, float(high))


# Contention: how much longer compute takes while operations are in flight, compared with steps without any.

# No contention is fitted if operations overlap less than this part of compute.
BESIDE_LEAST = 0.05
# Nor if the interval of the lost part is wider than this.
WIDTH_MOST = 0.5
LOST_MOST = 0.99


def _blocks(trace: Trace, arm: Arm) -> dict[int, NDArray[np.float64]]:
    """By block, for each counted step: (ns of forward and backward, part with an operation of the arm in flight)."""
    flights = in_flight_spans(trace, arm)
    rows = []
    for step in counted(trace):
        if step.arm == arm and is_split(step):
            computed = passes(step)
            overlapped = intersection(computed, flights.get(step.rank, intervals([])))
            rows.append((step, (float(total(computed)), float(total(overlapped)))))
    return by_block(rows)


def contention(trace: Trace, transport: Arm) -> tuple[Estimate | None, str]:
    """Return the factor by which compute is longer while operations are in flight, and a sentence about it.

    With C ns of forward and backward a step, h of them with operations of the transport in flight, and W ns without
    communication (the arm null, in neighbouring blocks): C - h + h/c = W, so c = 1 / (1 - (C - W)/h), at least 1. The
    value and its interval are those of `middle_of_sequence` over pairs of blocks. Returns None and the reason if the
    run does not suffice.
    """
    pairs = block_pairs(_blocks(trace, NULL), _blocks(trace, transport))
    unknown = "contention between operations and compute is not known"
    if pairs is None or len(pairs.base) < PAIRS_MIN:
        return None, f"{unknown}: it needs {PAIRS_MIN} pairs of blocks with the arm {NULL}"
    overlapped = float(np.median(pairs.other[:, 1] / np.maximum(pairs.other[:, 0], 1.0)))
    if overlapped < BESIDE_LEAST:
        return None, f"{unknown}: only {percent(overlapped)} of compute overlaps an operation"
    lost = middle_of_sequence((pairs.other[:, 0] - pairs.base[:, 0]) / np.maximum(pairs.other[:, 1], 1.0))
    if lost.high - lost.low > WIDTH_MOST:
        return (
            None,
            f"{unknown}: the interval of the lost part, {percent(lost.low)} to {percent(lost.high)}, is too wide",
        )
    value, low, high = (1 / (1 - min(max(part, 0.0), LOST_MOST)) for part in (lost.value, lost.low, lost.high))
    sentence = f"compute takes {value:.3f} times as long while an operation is in flight, {low:.3f} to {high:.3f}"
    return Estimate(value, low, high), f"{sentence} (measured, {len(pairs.base)} pairs of blocks of {NULL})"


# Cost of copies into and out of a fusion buffer: operations of several tensors compared with operations of one.

# Fewest operations of each kind; each kind also needs more than one size.
LEAST_OF_A_KIND = 8
DRAWS = 500
# Each byte is copied in and out.
WAYS = 2
UNKNOWN = "the cost of fusion-buffer copies is not known, and counts as part of the operations"

Floats = NDArray[np.float64]


def _line(columns: Floats, took: Floats, weight: Floats, expected: Floats) -> Floats:
    scale = np.sqrt(weight) / expected
    return np.asarray(np.linalg.lstsq(columns * scale[:, None], took * scale, rcond=None)[0], np.float64)


def _fit_copies(rows: Sequence[Service]) -> tuple[float, float, float]:
    """Ns of a copied byte with its 95 % interval. Relative and robust, like `line`; the bootstrap draws steps."""
    sizes = np.array([row.nbytes for row in rows], np.float64)
    took = np.array([row.ns for row in rows], np.float64)
    several = np.array([(row.members or 0) > 1 for row in rows], np.float64)
    columns = np.stack([np.ones_like(sizes), sizes, WAYS * sizes * several], axis=1)
    weight = np.ones_like(took)
    expected: Floats = np.maximum(took, 1.0)
    for _ in range(ROUNDS):
        found = _line(columns, took, weight, expected)
        expected = np.maximum(columns @ found, 1.0)
        off = np.abs(took / expected - 1)
        weight = np.minimum(1.0, max(HUBER * float(np.median(off)), 1e-6) / np.maximum(off, 1e-12))
    steps, place = np.unique([row.step for row in rows], return_inverse=True)
    random = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = []
    for _ in range(DRAWS):
        times = np.bincount(random.integers(len(steps), size=len(steps)), minlength=len(steps))
        drawn.append(_line(columns, took, weight * times[place], expected)[2])
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(found[2]), float(low), float(high)


def copy_cost_from_table(table: Table, sizes: Iterable[int]) -> float:
    """Return ns of a byte copied one way for tensors of these sizes copied one by one, from a table of copies."""
    whole = [size for size in sizes if size > 0]
    return sum(map(table.at, whole)) / sum(whole) if whole else 0.0


def measured_copy_cost(rows: Sequence[Service], in_flight: int) -> tuple[float | None, str]:
    """Return ns of a byte copied one way, fitted to a run's operations, and a sentence about it.

    Time is fixed + bytes x beta, plus 2 bytes x copy for an operation of several tensors. Returns None and the reason
    if one kind is missing or has one size, or if operations shared the link: there copies overlap other transfers. So
    if the fitted copies take longer than the operations. Returns 0 if the interval of the cost includes 0.
    """
    kinds = [[row.nbytes for row in rows if row.members and (row.members > 1) == several] for several in (False, True)]
    if any(row.members is None for row in rows) or any(
        len(kind) < LEAST_OF_A_KIND or len(set(kind)) < 2 for kind in kinds
    ):
        return None, UNKNOWN
    if in_flight > 1:
        return None, f"{UNKNOWN}: {in_flight} operations shared the link"
    value, low, high = _fit_copies(rows)
    spread = (
        f"{low:.3f} to {high:.3f} ns a byte, from operations of several tensors compared with those of one (measured)"
    )
    if low <= 0:
        return 0.0, f"the cost of fusion-buffer copies cannot be distinguished from 0: {spread}"
    if _too_long(rows, value) is not None:
        return None, f"{UNKNOWN}: they would take longer than the operations ({spread})"
    return value, f"a copy into a fusion buffer takes {value:.3f} ns a byte, {spread}"


def copy_cost(rows: Sequence[Service], in_flight: int, given_byte_ns: float | None) -> tuple[float, str]:
    """Return ns of a byte copied one way, and its source: the run, else given_byte_ns, else 0."""
    if given_byte_ns is not None:
        non_negative(copy_byte_ns=given_byte_ns)
    found, note = measured_copy_cost(rows, in_flight)
    if found is None and given_byte_ns is not None:
        return given_byte_ns, f"a copy into a fusion buffer takes {given_byte_ns:.3f} ns a byte, from the table"
    return found or 0.0, note


def _copies_ns(row: Service, byte_ns: float) -> float:
    return WAYS * byte_ns * row.nbytes if (row.members or 0) > 1 else 0.0


def _too_long(rows: Sequence[Service], byte_ns: float) -> Service | None:
    """The median operation of several tensors, if copies at this cost take longer than it did; None if they do not."""
    several = sorted((row for row in rows if (row.members or 0) > 1), key=lambda row: row.ns / max(row.nbytes, 1))
    middle = several[len(several) // 2] if several else None
    return middle if middle is not None and _copies_ns(middle, byte_ns) >= middle.ns else None


def without_copies(rows: Sequence[Service], byte_ns: float) -> list[Service]:
    """Return the operations with the time of their copies subtracted, without those that were shorter than that.

    Raises ValueError if the copies would take longer than the median operation did.
    """
    short = _too_long(rows, byte_ns)
    if short is not None:
        raise ValueError(
            f"copies of {byte_ns:.3g} ns a byte would take {_copies_ns(short, byte_ns):.0f} ns of an operation of "
            f"{short.nbytes} bytes, which took {short.ns:.0f} ns in all: leave --copy-table out"
        )
    left = [replace(row, ns=row.ns - _copies_ns(row, byte_ns)) for row in rows]
    return [row for row in left if row.ns > 0]


# Fit: the operation cost that explains a run.


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost, and how well it explains its run.

    cost: with the achieved rate. residuals: measured over predicted time of each operation, minus 1, in order of time.
    reason: why the fit is poor, "" if it is not. in_flight: operations that shared the link. achieved, achievable (from
    the probe), nominal: links; None if unknown. notes: assumptions. contention: the cost's factor with its interval;
    None if unknown; contention_text: the same as text. others: costs that explain the total time as well, with a
    different split between operations and bytes.
    """

    cost: Cost
    transport: Arm
    residuals: tuple[float, ...]
    reason: str = ""
    in_flight: int = 1
    achieved: Link | None = None
    achievable: Link | None = None
    nominal: Link | None = None
    notes: tuple[str, ...] = ()
    contention: Estimate | None = None
    contention_text: str = ""
    others: tuple[Cost, ...] = ()

    @property
    def count(self) -> int:
        return len(self.residuals)

    @property
    def error(self) -> float:
        """Median relative deviation of an operation."""
        return float(np.median(np.abs(self.residuals)))


def fit(
    trace: Trace,
    transport: Arm | None = None,
    *,
    algorithm: str | None = None,
    ranks_per_host: int | None = None,
    copy_byte_ns: float | None = None,
) -> Fit:
    """Return the cost of one transport's operations in this run.

    An operation's time runs from its last rank's submission to its end, minus time shared with other operations. It
    equals fixed + steps x alpha + bytes x beta, by the formula of its algorithm. alpha is known only if the job
    measured it; otherwise it is part of fixed. transport: None: the first that recorded operations. algorithm: None: as
    recorded, or a ring. ranks_per_host: None: from the host ids. copy_byte_ns: cost of a byte copied into or out of the
    fusion buffer, used if the run does not give it; if neither does, copies are part of the operation cost.

    Raises ValueError if no all-reduce of that transport was finished by all ranks in a step, and if copies of the given
    cost would take longer than the median operation of several tensors.
    """
    name, (formula, rows, concurrent) = _recorded(trace, transport)
    chosen = algorithm or formula
    if chosen not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {chosen!r}")
    hosts = Counter(rank.host_id for rank in trace.ranks if rank.host_id)
    inside = ranks_per_host or max(hosts.values(), default=1)
    byte_ns, copies_note = copy_cost(rows, concurrent, copy_byte_ns)
    found = _fitted(trace, name, (chosen, inside), without_copies(rows, byte_ns), concurrent)
    others = tuple(replace(other, copy_byte_ns=byte_ns) for other in found.others)
    return replace(
        found, cost=replace(found.cost, copy_byte_ns=byte_ns), notes=(*found.notes, copies_note), others=others
    )


def _recorded(trace: Trace, transport: Arm | None) -> tuple[Arm, tuple[str, list[Service], int]]:
    """The transport and its operations; with None, the first transport that has any."""
    for name in [Arm.parse(transport)] if transport is not None else [t for t in trace.arms if t not in PSEUDO]:
        found = concurrent_operations(trace, name)
        if found[1] and trace.size > 1:
            return name, found
    there = f": the run has {', '.join(map(str, trace.arms))}" if transport is not None else ""
    raise ValueError(f"no all-reduce over {transport or 'any transport'} that all ranks finished in a step{there}")


def _launch_ns(rows: Sequence[Service]) -> float:
    launches = [row.launch_ns for row in rows if row.launch_ns is not None]
    return float(np.median(launches)) if launches else 0.0


def _cost(algorithm: str, size: int, inside: int, parts: tuple[float, float, float], add: float) -> Cost:
    """parts: ns of an operation, the part of it in its steps, ns of a byte."""
    fixed_ns, in_steps, byte_ns = parts
    shape = _core.collective_shape(ALGORITHMS.index(algorithm), size, inside)
    steps, share = shape[:2] if shape[1] else shape[2:]
    alpha_ns = in_steps / steps if steps else 0.0
    bps = 8e9 * share / byte_ns if byte_ns > 0 else UNLIMITED
    if shape[1]:
        cost = Cost(algorithm, alpha_ns, Link(bps), inside)
    else:
        cost = Cost(algorithm, host_alpha_ns=alpha_ns, host_bps=bps, ranks_per_host=inside)
    return replace(cost, fixed_ns=fixed_ns - in_steps, add=add)


def _least_byte_ns(trace: Trace, name: Arm, share: float) -> float:
    """Least ns of an operation's byte, of which `share` is sent, from the measured rate of the network's flows."""
    rate_bps = Wire.of(trace.network).measured(flows(trace, name)[0])
    return 8e9 * share / rate_bps if rate_bps else 0.0


def _most_fixed_ns(rows: Sequence[Service], least_byte_ns: float) -> float | None:
    """Most ns of an operation that do not depend on its bytes, of one size: what a full link leaves of its time.

    None if operations have several sizes, which tell more, and if the link is not known or was not full. Nor is it
    known if they were far faster than the link.
    """
    sizes = {row.nbytes for row in rows}
    if least_byte_ns == 0 or len(sizes) > 1:
        return None
    took, least = float(np.median([row.ns for row in rows])), sizes.pop() * least_byte_ns
    full = least >= (1 - FIXED_MOST) * took and took >= (1 - FIXED_MOST) * least
    return max(0.0, took - least) if full else None


def _full_byte_ns(rows: Sequence[Service], least_byte_ns: float) -> float:
    """Least ns of a byte where operations fill a link of which a byte takes `least_byte_ns`; 0 where they do not.

    Their sizes differ little, so a line through their times may be far too flat.
    """
    took, least = sum(row.ns for row in rows), least_byte_ns * sum(row.nbytes for row in rows)
    return (1 - FIXED_MOST) * least_byte_ns if (1 - FIXED_MOST) * took <= least <= took / (1 - FIXED_MOST) else 0.0


def _fitted(trace: Trace, name: Arm, formula: tuple[str, int], rows: Sequence[Service], concurrent: int) -> Fit:
    algorithm, inside = formula
    shape = _core.collective_shape(ALGORITHMS.index(algorithm), trace.size, inside)
    step_ns, add = step_and_sum(trace, name)
    known = None if step_ns is None else step_ns * (shape[0] if shape[1] else shape[2])
    floor = _least_byte_ns(trace, name, shape[1])
    link = nominal(trace, name)
    full = max(floor, 8e9 * shape[1] / link.rate_bps if link is not None else 0.0)
    most_fixed = _most_fixed_ns(rows, full) if known is None else None
    least_byte_ns = max(floor, _full_byte_ns(rows, full))
    a, b, why, note = fit_operations(rows, known if most_fixed is None else 0.0, least_byte_ns)
    expected = np.array([a + b * row.nbytes for row in rows])
    residuals = np.array([row.ns for row in rows]) / np.maximum(expected, 1.0) - 1
    sizes = (min(row.nbytes for row in rows), max(row.nbytes for row in rows))
    factor, contention_note = contention(trace, name)
    notes = (f"{algorithm} of {trace.size} ranks, {inside} per host", *([note] if note else []), contention_note)

    def cost_of(line: tuple[float, float]) -> Cost:
        each_ns, byte_ns = line
        return replace(
            _cost(algorithm, trace.size, inside, (each_ns, min(each_ns, known or 0.0), byte_ns), add),
            launch_ns=_launch_ns(rows),
            contention=1.0 if factor is None else factor.value,
            residual=interval(rows, expected),
            fitted_bytes=sizes,
            fitted_size=trace.size,
            poor=why,
        )

    cost = cost_of((a, b))
    reached = (cost.link, achievable(trace, name), link)
    lines = bounding_lines(rows, a, b, least_byte_ns)
    if most_fixed:
        lines = ((most_fixed, b - most_fixed / rows[0].nbytes),)
    others = [cost_of(line) for line in lines]
    return Fit(
        cost,
        name,
        tuple(residuals.tolist()),
        why,
        concurrent,
        *reached,
        notes,
        factor,
        contention_note,
        tuple(others),
    )
