"""report.html, a single file without scripts or links, and its short form for notebooks.

The page's pictures are SVG, from a run's findings and its hosts' counters; each gives the reason if the run cannot show
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.comparisons import step_times
from netbottleneck.analysis.findings import Findings, Parts, best_gain
from netbottleneck.analysis.intervals import (
    Intervals,
    Split,
    backward_intervals,
    compute_intervals,
    intersection,
    intervals,
    is_split,
    last_entries,
    split_steps,
    subtraction,
    typical,
)
from netbottleneck.analysis.nccl import nccl_label
from netbottleneck.analysis.usage import LOOPBACK, Connected, HostUse
from netbottleneck.analysis.verdict import Verdict
from netbottleneck.report import caveats, text
from netbottleneck.report.drawing import (
    GAP,
    PLOT_HEIGHT,
    TEXT_HEIGHT,
    Picture,
    Piece,
    Row,
    Scale,
    Shown,
    bars,
    short_name,
    with_unit,
)
from netbottleneck.report.whole_run import whole_run
from netbottleneck.trace.counter_files import Counters, Samples
from netbottleneck.trace.files import CONTROLS
from netbottleneck.trace.model import Clock, Collective, Step, Trace
from netbottleneck.trace.transports import MEANING, TRANSPORT_COLOURS, Arm
from netbottleneck.units import gbit, ms, nbytes, percent, short, streams

Floats = NDArray[np.float64]

KINDS = (
    ("compute", "compute"),
    ("hidden", "compute with hidden communication"),
    ("exposed", "exposed communication"),
    ("wait", "waiting for negotiation"),
    ("other", "other"),
)
OTHER_COLOUR = "#7b6fa6"  # of arms that the list of transports gives none
TOP_LAYERS = 20
RANKS_MOST = 16
OPERATION_ROWS = 8
OTHER_TIMELINES = 3
BINS, HOST_BINS = 60, 300
HOST_TOP, HOST_BOTTOM = 34, 110
TICKS_LEAST = 15  # processor time is counted in ticks: a bin of fewer has too coarse a share


@dataclass(frozen=True, slots=True)
class Curve:
    """Predicted step by the rate of a fully used link: points are (bits/s, ns, low ns, high ns), ascending.

    present: rate of the recorded run and its measured step, with its ends; free_ns: the step without communication.
    missing: why there is none.
    """

    points: tuple[tuple[float, float, float, float], ...] = ()
    present: tuple[float, float, float, float] | None = None
    free_ns: float | None = None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a page draws beside the findings."""

    hosts: tuple[HostUse, ...] = ()
    samples: tuple[Samples, ...] = ()
    curve: Curve = field(default_factory=lambda: Curve(missing="no prediction was requested"))
    connected: Connected = field(default_factory=Connected)


def count_text(count: int, what: str) -> str:
    """1, "step": "1 step"; 2: "2 steps"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def colour(arm: str) -> str:
    """Colour of an arm."""
    return TRANSPORT_COLOURS.get(Arm.parse(arm).transport, OTHER_COLOUR)


# The parts of a step.


def lengths(parts: Parts) -> dict[str, float]:
    """Return ns by kind, in the order of KINDS: they add up to the step."""
    return {
        "compute": parts.compute_ns - parts.hidden_ns,
        "hidden": parts.hidden_ns,
        "exposed": parts.exposed_ns,
        "wait": parts.wait_ns,
        "other": parts.other_ns,
    }


def split(findings: Findings) -> Shown:
    """The parts of each arm's step, on one scale."""
    title = f"Parts of a step ({findings.label}, mean of {findings.averaged})"
    if not findings.parts:
        return Shown(title, missing=text.no_split(findings))
    rows = []
    for name, parts in findings.parts.items():
        by_kind = lengths(parts)
        pieces = tuple(Piece(kind, by_kind[kind], f"{what}: {ms(by_kind[kind])}") for kind, what in KINDS)
        rows.append(Row(name, ms(parts.step_ns), (pieces,)))
    longest = max(parts.step_ns for parts in findings.parts.values())
    drawn = bars("parts of a step by arm", rows, longest)
    base = findings.parts[findings.base] if findings.base is not None else None
    return Shown(
        title, (drawn,), KINDS, "" if base is None else text.waiting_for_the_slowest(base, findings.trace.size)
    )


# The causes.


def causes(findings: Findings, verdict: Verdict) -> Shown:
    """What a step would save without each cause, with its interval."""
    title = "What a step would save without each cause (95 % intervals)"
    known = [one for one in verdict.evidence if one.applies and one.saving is not None]
    if not known:
        return Shown(title, missing="No rule gave a saving.")
    rows = [
        Row(
            one.cause,
            text.saving_text(one),
            ((Piece("fired" if one.fired else "idle", one.saving.value, one.rests),),),
            (one.saving.low, one.saving.high),
            one.limit_ns or None,
        )
        for one in known
        if one.saving is not None
    ]
    drawn = bars("saving by cause", rows)
    key = (("fired", "counts"), ("idle", "does not count"))
    limits = [one.limit_ns for one in known]
    ends = dict.fromkeys((ms(min(limits)), ms(max(limits))))
    note = f"The dashed line is the least saving that counts, {' to '.join(ends)}."
    left = len(verdict.evidence) - len(known)
    if left:
        note += f" Not drawn: {count_text(left, 'cause')} whose condition does not hold."
    return Shown(title, (drawn,), key, note)


# One step on all ranks.


def _typical_step(trace: Trace, arm: Arm, splits: Sequence[Split]) -> dict[int, Step]:
    """By rank: the step of an arm whose length is nearest the median, of those that most ranks recorded."""
    own = {(split.rank, split.index) for split in splits if split.arm == arm}
    by_index: dict[int, dict[int, Step]] = defaultdict(dict)
    for step in trace.steps:
        if step.arm == arm and is_split(step) and (step.rank, step.index) in own:
            by_index[step.index][step.rank] = step
    most = max((len(ranks) for ranks in by_index.values()), default=0)
    whole = {index: ranks for index, ranks in by_index.items() if len(ranks) == most}
    if not whole:
        return {}
    lengths_ns = {index: float(np.median([s.duration_ns for s in ranks.values()])) for index, ranks in whole.items()}
    middle = float(np.median(list(lengths_ns.values())))
    return whole[min(whole, key=lambda index: (abs(lengths_ns[index] - middle), index))]


def _rows_of(operations: Sequence[Collective]) -> list[list[Collective]]:
    """Operations in rows without overlap; what needs more than OPERATION_ROWS rows is in the last."""
    rows: list[list[Collective]] = []
    for one in sorted(operations, key=lambda c: (c.start_ns or c.submit_ns, c.submit_ns)):
        free = next((row for row in rows if (row[-1].done_ns or 0) <= (one.start_ns or one.submit_ns)), None)
        if free is not None:
            free.append(one)
        elif len(rows) < OPERATION_ROWS:
            rows.append([one])
        else:
            rows[-1].append(one)
    return rows


class _Timeline:
    """One step of one arm: for each rank its compute, its operations, and the lanes that moved them."""

    def __init__(self, trace: Trace, steps: Mapping[int, Step]) -> None:
        self.trace, self.steps = trace, steps
        first = min(step.begin_ns for step in steps.values())
        self.scale = Scale(first, max(step.end_ns for step in steps.values()))
        self.index = next(iter(steps.values())).index
        self.picture = Picture(f"timeline of step {self.index}")
        self.last = last_entries(trace)
        self.lanes = False

    def _spans(self, spans: Intervals, y: tuple[float, float], kind: str, note: str) -> None:
        for begin, end in spans.tolist():
            self.picture.bar((self.scale.at(begin), self.scale.at(end)), y, kind, f"{note}: {ms(end - begin)}")

    def _compute(self, step: Step, own: Sequence[Collective], y: float) -> None:
        waits = intervals((begin, end) for _, begin, end in step.waits)
        self._spans(intervals([(step.begin_ns, step.end_ns)]), (y, 14), "other", "step")
        for kind, spans in (
            ("forward", step.forward),
            ("compute", backward_intervals(step, own)),
            ("optimizer", step.optimizer),
        ):
            what = "backward" if kind == "compute" else kind
            self._spans(subtraction(intervals(spans), waits), (y, 14), kind, what)
        self._spans(waits, (y, 14), "blocked", "training thread blocked")

    def _operation(self, one: Collective, y: tuple[float, float], compute: Intervals) -> None:
        what = one.name or one.kind
        what += "" if one.tensor_bytes is None else f", {nbytes(one.tensor_bytes)}"
        begin, end = one.start_ns or one.submit_ns, one.done_ns or one.submit_ns
        self._spans(intervals([(one.submit_ns, begin)]), y, "wait", f"{what}, submitted")
        moving = intervals([(begin, end)])
        self._spans(intersection(moving, compute), y, "hidden", f"{what}, hidden")
        at, rank = self.last.get(one.match, (begin, one.rank))
        exposed = subtraction(moving, compute)
        late = intersection(exposed, intervals([(begin, at)])) if rank != one.rank else exposed[:0]
        self._spans(subtraction(exposed, late), y, "exposed", f"{what}, exposed")
        self._spans(late, y, "late", f"{what}, until rank {rank} submits it")

    def _lanes(self, operations: Sequence[Collective], y: float) -> float:
        """One row for each lane; its height is the lane's part of the bytes that an operation's busiest lane sent."""
        used = sorted({lane for one in operations for lane, _, _ in one.lanes or ()})
        self.lanes = self.lanes or bool(used)
        for number, lane in enumerate(used):
            bottom = y + 6 * (number + 1)
            for one in operations:
                sent = {own: out for own, out, _ in one.lanes or ()}
                if not sent.get(lane):
                    continue
                high = 5 * sent[lane] / max(sent.values())
                x = self.scale.at(one.first_byte_ns or one.start_ns or 0), self.scale.at(one.done_ns or 0)
                self.picture.bar(x, (bottom - high, high), "lane", f"lane {lane}: {nbytes(sent[lane])} sent")
        return y + 6 * len(used) + (2 if used else 0)

    def rank(self, rank: int) -> None:
        """Add the rows of a rank."""
        step, y = self.steps[rank], self.picture.height
        host = next((one.hostname for one in self.trace.ranks if one.rank == rank), "")
        self.picture.text(0, y + 13, f"rank {rank}" + (f", {short_name(host)}" if host else ""))
        self.picture.text(1, y + 13, ms(step.duration_ns), "end")
        y += TEXT_HEIGHT
        own = [c for c in self.trace.collectives if c.rank == rank and c.step == step.index and c.done_ns is not None]
        self._compute(step, own, y)
        y += 16
        compute = compute_intervals(step, own)
        for row in _rows_of(own):
            for one in row:
                self._operation(one, (y, 8), compute)
            y += 9
        self.picture.height = self._lanes(own, y + 1) + GAP

    def finished(self) -> Picture:
        """The picture with its axis."""
        span_ms = Scale(0.0, (self.scale.high - self.scale.low) / 1e6)
        labels = [(self.scale.low + value * 1e6, label) for value, label in with_unit(span_ms.ticks(), "ms")]
        self.picture.axis(self.scale, self.picture.height, labels)
        self.picture.height += TEXT_HEIGHT + 5
        return self.picture


TIMELINE_KEY = (
    ("forward", "forward"),
    ("compute", "backward"),
    ("optimizer", "optimizer"),
    ("blocked", "training thread blocked"),
    ("other", "other"),
    ("hidden", "hidden communication"),
    ("exposed", "exposed communication"),
    ("late", "until the slowest rank submits"),
    ("wait", "submitted, not started"),
)


def _most_ranks(ranks: Sequence[int], first: Sequence[int] = ()) -> list[int]:
    """At most RANKS_MOST ranks, ascending: `first`, then the lowest."""
    return sorted([*first, *(rank for rank in ranks if rank not in first)][:RANKS_MOST])


def timeline(findings: Findings, arm: Arm, splits: Sequence[Split]) -> Shown:
    """One step of an arm on each rank; its length is nearest the median."""
    trace = findings.trace
    steps = _typical_step(trace, arm, splits)
    title = f"One step of {arm} ({findings.label})"
    if not steps:
        return Shown(title, missing=f"No step of {arm} recorded its parts.")
    drawn = _Timeline(trace, steps)
    ranks = _most_ranks(sorted(steps))
    for rank in ranks:
        drawn.rank(rank)
    notes = [f"Step {drawn.index}, the one whose length is nearest the median. Below a rank's compute: its operations"]
    notes[0] += ", then its lanes; a lane's height is its part of the bytes." if drawn.lanes else "."
    if not drawn.lanes and arm.native:
        notes.append("The run did not record what each lane moved.")
    elif not drawn.lanes:
        notes.append(f"Lanes are not known: {arm} does not use this package's streams.")
    if len(steps) > len(ranks):
        notes.append(f"trace.json.gz has {count_text(len(steps) - len(ranks), 'more rank')}.")
    if findings.clock_error_ns > 0 and len(steps) > 1:
        notes.append(f"The ranks' clocks agree within {short(findings.clock_error_ns)}.")
    return Shown(title, (drawn.finished(),), TIMELINE_KEY, " ".join(notes))


# Steps by arm.


def _histogram(picture: Picture, scale: Scale, times: Floats, shade: str) -> None:
    counts, edges = np.histogram(np.clip(times, scale.low, scale.high), BINS, (scale.low, scale.high))
    top = picture.height + TEXT_HEIGHT
    for count, low, high in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if count:
            tall = 34 * count / counts.max()
            note = f"{count_text(count, 'step')} of {ms(low)} to {ms(high)}"
            picture.bar((scale.at(low), scale.at(high)), (top + 34 - tall, tall), "", note, shade)
    middle = scale.at(float(np.median(times)))
    picture.line((0, 1), (top + 34, top + 34))
    picture.line((middle, middle), (top, top + 38), "whisker")
    picture.height = top + 34 + GAP


def histograms(title: str, times: Mapping[str, Sequence[float]], shades: Sequence[str]) -> Shown:
    """A histogram of each series of ns by name, on one scale."""
    if not times:
        return Shown(title, missing="No arm has a counted step.")
    everything = np.concatenate([np.asarray(own, np.float64) for own in times.values()])
    low, high = float(everything.min()), max(float(np.percentile(own, 99.5)) for own in times.values())
    room = max(0.04 * (high - low), 0.005 * high, 1.0)
    scale = Scale(max(0.0, low - room), high + room)
    picture = Picture("histogram of step lengths")
    for (name, own), shade in zip(times.items(), shades, strict=True):
        value = f"median {ms(float(np.median(own)))}, {count_text(len(own), 'step')}"
        picture.text(0, picture.height + 13, short_name(name))
        picture.text(1, picture.height + 13, value, "end")
        _histogram(picture, scale, np.asarray(own, np.float64), shade)
    ticks = Scale(scale.low / 1e6, scale.high / 1e6).ticks(5)
    picture.axis(scale, picture.height - GAP, [(value * 1e6, f"{value:g} ms") for value in ticks])
    picture.height += TEXT_HEIGHT
    note, beyond = "The line marks the median.", int((everything > scale.high).sum())
    if beyond:
        note += f" The last bar has {count_text(beyond, 'longer step')}, up to {ms(float(everything.max()))}."
    return Shown(title, (picture,), (), note)


def distribution(findings: Findings) -> Shown:
    """Lengths of the steps of each arm, on one scale."""
    times = {arm: np.concatenate(list(step_times(findings.trace, arm).values())) for arm in findings.times}
    title = f"Lengths of the steps ({findings.label})"
    return histograms(title, {str(arm): own.tolist() for arm, own in times.items()}, [colour(arm) for arm in times])


# Rates.


def bandwidth(findings: Findings) -> Shown:
    """Achieved rates beside the rates of the probe by number of streams, and the link."""
    title = f"Achieved and achievable by streams (busbw, one way, {findings.label})"
    if not findings.achieved:
        return Shown(title, missing="No operation was timed, so no rate is known.")
    probe = findings.achievable
    if probe is None:
        rows = [
            Row(arm, f"{gbit(did.active_bps)} in transfer", ((Piece("exposed", did.active_bps),),))
            for arm, did in findings.achieved.items()
        ]
        one_link = len({link.full_bps for link in findings.links.values()}) == 1
        drawn = bars("achieved rate by arm", rows, (findings.full_link_bps or 0.0) * one_link)
        whole = f" The full width is {text.link_text(findings)}." if one_link else ""
        why = f"Achievable: not probed ({text.why_not_probed(findings)}).{whole}"
        return Shown(title, (drawn,), (), why)
    levels = {arm: did.active_bps for arm, did in findings.achieved.items()}
    key = [("probe", f"probe over {probe.transport}")]
    key += [(colour(arm), f"{arm} {gbit(bps)} in transfer") for arm, bps in levels.items()]
    key += [("link", text.link_text(findings))] if findings.link_bps else []
    return Shown(title, (_rates(probe.points, levels, findings.full_link_bps),), tuple(key))


def _rates(points: Sequence[tuple[int, float]], levels: Mapping[Arm, float], link_bps: float | None) -> Picture:
    """The probe's curve over the streams, and a level for each arm and the link."""
    highest = max([rate for _, rate in points] + list(levels.values()) + ([link_bps] if link_bps else []))
    top, bottom = 24, 24 + PLOT_HEIGHT
    x = Scale(0.9 * points[0][0], 1.1 * max(points[-1][0], 2 * points[0][0]), log=True)
    y = Scale(0.0, 1.08 * highest / 1e9)
    picture = Picture("bandwidth by number of streams", bottom)

    def height(bps: float) -> float:
        return bottom - (bottom - top) * y.at(bps / 1e9)

    picture.levels(y, top, bottom, with_unit(y.ticks(5), "Gbit/s"))
    for arm, bps in levels.items():
        picture.curve([(0, height(bps)), (1, height(bps))], "level", colour(arm))
    if link_bps:
        picture.curve([(0, height(link_bps)), (1, height(link_bps))], "link")
    picture.curve([(x.at(count), height(rate)) for count, rate in points], "probe")
    for count, rate in points:
        picture.dot(x.at(count), height(rate), "probe", f"{streams(count)}: {gbit(rate)}")
    labels = [(float(count), streams(count) if count == points[-1][0] else f"{count}") for count, _ in points]
    picture.axis(x, bottom, labels, bottom)
    picture.height = bottom + TEXT_HEIGHT + 5
    return picture


# Ranks.


def waiting(findings: Findings, splits: Sequence[Split]) -> Shown:
    """For each rank: how long it waits for slower ranks, and how long the others wait for it."""
    title = f"Waiting between ranks ({findings.label}, a mean step of {findings.base})"
    own = [split for split in splits if split.arm == findings.base]
    if findings.trace.size < 2:
        return Shown(title, missing="One rank has no other to wait for.")
    if not own or len(findings.trace.ranks) < findings.trace.size:
        return Shown(title, missing="Not all ranks recorded the same operations, so waiting between them is not known.")
    waits: dict[int, list[int]] = defaultdict(list)
    for one in typical(own, lambda split: split):
        waits[one.rank].append(one.skew_ns)
    means = {rank: float(np.mean(values)) for rank, values in sorted(waits.items())}
    most = sorted(means, key=lambda rank: -findings.late_ns.get(rank, 0.0))[: RANKS_MOST // 2]
    ranks = _most_ranks(sorted(means), most)
    rows = [
        Row(
            f"rank {rank}",
            f"waits {ms(means[rank])}, others {ms(findings.late_ns.get(rank, 0.0))}",
            (
                (Piece("late", means[rank], "waits for slower ranks"),),
                (Piece("waited", findings.late_ns.get(rank, 0.0), "the mean other rank waits for it"),),
            ),
        )
        for rank in ranks
    ]
    notes = []
    if len(means) > len(ranks):
        notes.append(f"Not drawn: {count_text(len(means) - len(ranks), 'rank')}.")
    if findings.clock_error_ns > 0:
        notes.append(f"The ranks' clocks agree within {short(findings.clock_error_ns)}.")
    key = (("late", "it waits for slower ranks"), ("waited", "the mean other rank waits for it"))
    return Shown(title, (bars("waiting by rank", rows),), key, " ".join(notes))


# Layers.


def layers(findings: Findings) -> Shown:
    """The layers with the most exposed communication, and their backward."""
    title = f"Layers under {findings.base} (exposed: {findings.label} per bucket, attributed by bytes)"
    if not findings.layers:
        return Shown(title, missing="The run did not record which parameters its buckets hold.")
    found = sorted(findings.layers, key=lambda layer: (-layer.exposed_ns, -layer.backward_ns))
    rows = [
        Row(
            layer.name,
            f"{ms(layer.exposed_ns)}, {ms(layer.backward_ns)}",
            ((Piece("exposed", layer.exposed_ns, "exposed"),), (Piece("compute", layer.backward_ns, "backward"),)),
        )
        for layer in found[:TOP_LAYERS]
    ]
    left = found[TOP_LAYERS:]
    left_ns = sum(layer.exposed_ns for layer in left)
    note = f"{count_text(len(left), 'more layer')}: {ms(left_ns)} exposed." if left else ""
    key = (("exposed", "exposed communication"), ("compute", "backward"))
    return Shown(title, (bars("exposed communication and backward by layer", rows),), key, note)


# Hosts over time.


def _rates_over_time(counters: Counters, columns: Sequence[str], edges: Floats) -> Floats:
    """Increase of the sum of columns in each bin, per second."""
    values = np.sum([counters.column(name) for name in columns], axis=0)
    first = counters.time_ns[0]
    at = np.interp(edges - first, counters.time_ns - first, values - values[0])
    rates: Floats = np.diff(at) * 1e9 / np.diff(edges)
    return rates


def _edges(counters: Counters, least_ns: float) -> Floats:
    """Bins over the record, each at least `least_ns` and at least as long as two samples."""
    begin, end = float(counters.time_ns[0]), float(counters.time_ns[-1])
    shortest = max(least_ns, 2 * (end - begin) / max(len(counters.time_ns) - 1, 1))
    return np.linspace(begin, end, max(2, min(HOST_BINS, int((end - begin) / shortest))) + 1)


def _plot(label: str, x: Scale, y: Scale, unit: str) -> Picture:
    """An empty plot with its grid; the lowest 5 pixels above its axis are free for the blocks."""
    picture = Picture(label, HOST_BOTTOM + 36)
    picture.text(0, 12, label)
    picture.levels(y, HOST_TOP, HOST_BOTTOM, with_unit(y.ticks(4), unit))
    picture.axis(x, HOST_BOTTOM + 6, with_unit(x.ticks(), "s"), HOST_BOTTOM + 6)
    return picture


def _drawn_over(picture: Picture, scales: tuple[Scale, Scale], rates: Floats, kind: str) -> None:
    """A curve of steps: one value for each of equal bins."""
    x, y = scales
    edges = np.linspace(x.low, x.high, len(rates) + 1)
    bottom, top = HOST_BOTTOM, HOST_TOP
    points = []
    for begin, end, rate in zip(edges[:-1], edges[1:], rates, strict=True):
        place = bottom - (bottom - top) * y.at(float(rate))
        points += [(x.at(float(begin)), place), (x.at(float(end)), place)]
    picture.curve(points, kind)


def _blocks(picture: Picture, trace: Trace, rank: int, scale: Scale, begin_ns: float) -> None:
    """Blocks of steps, by the colour of their arm, below the curves."""
    spans: dict[tuple[int, Arm], list[int]] = {}
    for step in trace.steps:
        if step.rank == rank:
            span = spans.setdefault((step.block, step.arm), [step.begin_ns, step.end_ns])
            span[0], span[1] = min(span[0], step.begin_ns), max(span[1], step.end_ns)
    for (_, arm), (begin, end) in spans.items():
        x = scale.at((begin - begin_ns) / 1e9), scale.at((end - begin_ns) / 1e9)
        picture.bar(x, (HOST_BOTTOM + 1, 5), "", arm, colour(arm))


def _interface_picture(findings: Findings, host: HostUse, net: Counters) -> Picture:
    network = findings.trace.network
    names = host.links if network is not None and network.several_links else (host.busiest,)
    edges = _edges(net, 0.0)
    columns = {way: [f"{name}:{way}_bytes" for name in names] for way in ("tx", "rx")}
    rates = {way: 8 * _rates_over_time(net, own, edges) / 1e9 for way, own in columns.items()}
    link = 0.0 if host.busiest == LOOPBACK else (findings.link_bps or 0.0) / 1e9
    y = Scale(0.0, 1.1 * max(*(float(own.max()) for own in rates.values()), 1e-3, link))
    x = Scale(0.0, (edges[-1] - edges[0]) / 1e9)
    picture = _plot(f"{host.hostname or f'rank {host.rank}'}: {','.join(names)}", x, y, "Gbit/s")
    if link:
        place = HOST_BOTTOM - (HOST_BOTTOM - HOST_TOP) * y.at(link)
        picture.curve([(0, place), (1, place)], "link")
    for way, own in rates.items():
        _drawn_over(picture, (x, y), own, way)
    _blocks(picture, findings.trace, host.rank, x, float(edges[0]))
    return picture


def _cores_picture(findings: Findings, host: HostUse, counters: Counters) -> Picture:
    edges = _edges(counters, TICKS_LEAST * 1e9 / max(counters.ticks_per_s, 1))
    busy = []
    for core in counters.owners("user"):
        kinds = [name for name in counters.columns if name.rpartition(":")[0] == core]
        idle = [name for name in kinds if name.rpartition(":")[2] in ("idle", "iowait")]
        whole = _rates_over_time(counters, kinds, edges)
        busy.append(1 - _rates_over_time(counters, idle, edges) / np.maximum(whole, 1e-9))
    x, y = Scale(0.0, (edges[-1] - edges[0]) / 1e9), Scale(0.0, 100.0)
    picture = _plot(f"{host.hostname or f'rank {host.rank}'}: {len(busy)} cores", x, y, "% busy")
    shares = 100 * np.clip(np.array(busy), 0, 1)
    _drawn_over(picture, (x, y), shares.max(axis=0), "busiest")
    _drawn_over(picture, (x, y), shares.mean(axis=0), "mean")
    _blocks(picture, findings.trace, host.rank, x, float(edges[0]))
    return picture


HOST_KEY = (
    ("tx", "sent"),
    ("rx", "received"),
    ("link", "the link"),
    ("busiest", "the busiest core"),
    ("mean", "mean of the cores"),
)
HOSTS_MOST = 8


def _host_pictures(findings: Findings, recorded: Recorded) -> Iterator[Picture]:
    clocks = {rank.rank: rank.clock for rank in findings.trace.ranks}
    base_last = sorted(reversed(recorded.hosts), key=lambda use: use.arm == findings.base)
    uses = {use.rank: use for use in base_last}  # of base, else of the first arm
    for samples in recorded.samples[:HOSTS_MOST]:
        mine, use = samples.on_rank_0(clocks.get(samples.rank, Clock())), uses.get(samples.rank)
        if use is None:
            continue
        if mine.net is not None and len(mine.net.time_ns) > 2 and use.interfaces:
            yield _interface_picture(findings, use, mine.net)
        if mine.host is not None and len(mine.host.time_ns) > 2:
            yield _cores_picture(findings, use, mine.host)


def _no_counters(trace: Trace, recorded: Recorded) -> str:
    """Why no counters of a host are drawn."""
    if trace.recorder:
        return f"{trace.recorder} records no counters of the hosts."
    if recorded.samples:
        return "The hosts' counters have too few readings in counted steps: set NETBOTTLENECK_MONITOR_HZ=20 for more."
    return "No host's counters were recorded: set NETBOTTLENECK_MONITOR_HZ=20 to record them."


def host_use(findings: Findings, recorded: Recorded) -> Shown:
    """Each host's busiest interface, or all of its links, and its cores over the run."""
    title = "Interfaces and processors over time (measured by the kernel's counters)"
    drawn = tuple(_host_pictures(findings, recorded))
    if not drawn:
        return Shown(title, missing=_no_counters(findings.trace, recorded))
    arms = dict.fromkeys(step.arm for step in findings.trace.steps)
    linked = findings.link_bps and any(use.busiest != LOOPBACK for use in recorded.hosts)
    known = [one for one in HOST_KEY if one[0] != "link" or linked]
    key = (*known, *((colour(arm), f"block of {arm}") for arm in arms))
    note = "Bytes include headers. The strip below a curve shows the blocks of steps."
    left = len(recorded.samples) - HOSTS_MOST
    if left > 0:
        note += f" summary.json has {count_text(left, 'more host')}."
    return Shown(title, drawn, key, note)


# What-if.


def what_if(findings: Findings, curve: Curve) -> Shown:
    """Predicted step by rate of the link, and the recorded run."""
    title = f"What if the link were faster or slower: the step of {findings.base} (predicted)"
    if curve.missing or not curve.points:
        why = curve.missing or "no rate could be predicted"
        return Shown(title, missing=f"{why[0].upper()}{why[1:].rstrip('.')}.")
    return _curve(title, curve)


def _curve(title: str, curve: Curve) -> Shown:
    top, bottom = 14, 14 + PLOT_HEIGHT
    rates = [point[0] for point in curve.points] + ([curve.present[0]] if curve.present else [])
    steps = [point[3] for point in curve.points] + ([curve.present[3]] if curve.present else [])
    if min(rates) == max(rates):
        return Shown(title, missing="The step is predicted at one rate of the link alone.")
    x = Scale(min(rates) / 1e9, max(rates) / 1e9, log=True)
    y = Scale(0.0, 1.05 * max(steps) / 1e6)
    picture = Picture("predicted step by rate of the link", bottom)

    def height(ns: float) -> float:
        return bottom - (bottom - top) * y.at(ns / 1e6)

    picture.levels(y, top, bottom, with_unit(y.ticks(5), "ms"))
    places = [x.at(point[0] / 1e9) for point in curve.points]
    upper = [(place, height(point[3])) for place, point in zip(places, curve.points, strict=True)]
    lower = [(place, height(point[2])) for place, point in zip(places, curve.points, strict=True)]
    picture.curve([*upper, *reversed(lower)], "predicted", filled=True)
    picture.curve([(place, height(p[1])) for place, p in zip(places, curve.points, strict=True)], "predicted")
    key = [("predicted", "predicted, with its 95 % interval")]
    if curve.free_ns is not None:
        picture.curve([(0, height(curve.free_ns)), (1, height(curve.free_ns))], "link")
        key.append(("link", f"communication that takes no time: {ms(curve.free_ns)}"))
    note = "The rate is that of a fully used link."
    if curve.present is not None:
        bps, ns, low, high = curve.present
        place = x.at(bps / 1e9)
        picture.line((place, place), (height(low), height(high)), "whisker")
        picture.dot(place, height(ns), "present", f"this run: {gbit(bps)}, {ms(ns)}", 6)
        key.append(("present", f"this run: {ms(ns)} at {gbit(bps)} (measured)"))
        note += " This run stands at the rate that its operations reached."
    picture.axis(x, bottom, with_unit(x.ticks(5), "Gbit/s"), bottom)
    picture.height = bottom + TEXT_HEIGHT + 5
    return Shown(title, (picture,), tuple(key), note)


def figures(findings: Findings, recorded: Recorded) -> list[Shown]:
    """The pictures of a page below its verdict and its split."""
    if findings.base is None:
        return [distribution(findings), *whole_run(findings), host_use(findings, recorded)]
    splits = [row[1] for row in split_steps(findings.trace)]
    others = [arm for arm in findings.parts if arm.real and arm != findings.base][:OTHER_TIMELINES]
    return [
        timeline(findings, findings.base, splits),
        *(replace(timeline(findings, arm, splits), folded=True) for arm in others),
        distribution(findings),
        *whole_run(findings),
        bandwidth(findings),
        waiting(findings, splits),
        layers(findings),
        host_use(findings, recorded),
        what_if(findings, recorded.curve),
    ]


def tiles(findings: Findings, verdict: Verdict) -> list[tuple[str, str, str]]:
    """The numbers of the verdict card: (name, value, what it means)."""
    base = findings.base
    if base is None:
        return []
    parts, found = findings.parts[base], []
    found.append((f"step of {base}", ms(parts.step_ns), findings.label))
    share = (parts.exposed_ns + parts.wait_ns) / parts.step_ns if parts.step_ns else 0.0
    found.append(("exposed and waiting", percent(share), ms(parts.exposed_ns + parts.wait_ns)))
    did = findings.achieved.get(base)
    if did is not None:
        link = findings.links.get(base)
        part = "all" if link is None or did.active_bps >= link.full_bps else percent(link.used(did)[0])
        of_link = f"{part} of the link" if link else "link unknown"
        found.append(("in transfer", gbit(did.active_bps), of_link))
    pair = best_gain(findings)
    if pair is not None and pair.gain.known:
        between = f"{percent(pair.gain.low)} to {percent(pair.gain.high)}"
        found.append((f"{pair.other} is shorter by", percent(pair.gain.value), between))
    elif verdict.full_use is not None:
        found.append(("at full use", ms(verdict.full_use.step_ns), "predicted"))
    return found


# The page and the short form.


def environment() -> jinja2.Environment:
    """Templates and style of this package; text is escaped, and has no control characters."""

    def load(name: str) -> str:
        return resources.files("netbottleneck.report").joinpath(name).read_text(encoding="utf-8")

    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value.translate(CONTROLS | {ord("\n"): "\n"}) if isinstance(value, str) else value,
    )
    found.filters.update(ms=ms, gbit=gbit, percent=percent, nbytes=nbytes)
    return found


def _context(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    layers = sorted(findings.layers, key=lambda layer: -layer.exposed_ns)
    return {
        "f": findings,
        "trace": findings.trace,
        "verdict": verdict,
        "tiles": tiles(findings, verdict),
        "evidence": [
            (one, text.fired_text(one), text.saving_text(one), text.margin_text(one)) for one in verdict.evidence
        ],
        "secondary": text.secondary(verdict),
        "sentence": " ".join(text.sentences(findings, verdict)),
        "warnings": caveats.warnings(findings),
        "split": split(findings),
        "layers": layers[:TOP_LAYERS],
        "layers_left": len(layers[TOP_LAYERS:]),
        "layers_left_ns": sum(layer.exposed_ns for layer in layers[TOP_LAYERS:]),
        "link_rates": text.link_rates(findings),
        "wire_lines": [*text.beyond_the_link(findings), *text.costs(findings), *text.algorithms(findings)],
        "nccl": [(nccl_label(mean, findings.nccl), mean, text.nccl_cells(mean)) for mean in findings.nccl[:TOP_LAYERS]],
        "joins": text.join_rows(findings.joins),
        "join_columns": text.JOIN_COLUMNS,
        "joins_title": text.JOINS_TITLE,
        "nccl_columns": text.NCCL_COLUMNS,
        "nccl_title": text.NCCL_TITLE,
        "not_probed": "" if findings.achievable else text.why_not_probed(findings),
        "meanings": {name: MEANING[name] for name in findings.times if name in MEANING},
        "pairs": text.differences(findings),
    }


def page(findings: Findings, verdict: Verdict, recorded: Recorded | None = None) -> str:
    """The complete page. recorded: what it draws beside the findings."""
    context = _context(findings, verdict)
    context["causes"] = causes(findings, verdict)
    context["figures"] = figures(findings, recorded or Recorded())
    connected = (recorded or Recorded()).connected
    context["connections"] = text.connection_rows(connected)
    context["connection_columns"] = text.CONNECTION_COLUMNS
    context["connection_lines"] = text.connection_lines(connected)
    context["connections_title"] = text.CONNECTIONS_TITLE
    return environment().get_template("report.html.j2").render(context)


def fragment(findings: Findings, verdict: Verdict) -> str:
    """The sentence, the bars and the verdict."""
    return environment().get_template("fragment.html.j2").render(_context(findings, verdict))
