"""The picture of a run that is longer than its detailed record: the mean step of each rank over all its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from netbottleneck.analysis.findings import Findings
from netbottleneck.report.drawing import PLOT_HEIGHT, TEXT_HEIGHT, Picture, Scale, Shown, with_unit
from netbottleneck.trace.run_steps import RunSteps, together
from netbottleneck.units import ms

RANK_KINDS = ("rank0", "rank1", "rank2", "rank3")  # classes of the curves' colours
LEVELS_MOST = 256  # of a curve
TOP, STRIP = 14, 5
# The plot ends at this many times the 95th percentile of the levels: the first steps of a run may be far longer.
ROOM = 1.5

Rows = Mapping[int, Sequence[RunSteps]]  # by rank


def _levels(rows: Sequence[RunSteps]) -> list[RunSteps]:
    """At most LEVELS_MOST rows, each the sum of equally many neighbours."""
    size = math.ceil(len(rows) / LEVELS_MOST)
    return [together(rows[place : place + size]) for place in range(0, len(rows), size)]


def _mean_ms(row: RunSteps) -> float:
    return row.total_ns / row.count / 1e6


def _chosen(rows: Rows) -> dict[int, str]:
    """The ranks that are drawn, with what is said of each: all, or the slowest and the fastest of many."""
    if len(rows) <= len(RANK_KINDS):
        return {rank: f"rank {rank}" for rank in rows}
    slowest, fastest = (chosen(rows, key=lambda rank: _mean_ms(together(rows[rank]))) for chosen in (max, min))
    return {slowest: f"rank {slowest}, the slowest", fastest: f"rank {fastest}, the fastest"}


def _recorded(findings: Findings) -> list[tuple[int, int]]:
    """Ranges of steps, from the first to the last of each, that the detailed record holds."""
    steps = np.unique([step.index for step in findings.trace.steps])
    parts = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)
    return [(int(part[0]), int(part[-1])) for part in parts if len(part)]


def _draw(findings: Findings, levels: Rows, y: Scale) -> Picture:
    """The curves of the ranks in ms over the steps, and below them a strip of the steps recorded in detail."""
    bottom = TOP + PLOT_HEIGHT
    first = min(rows[0].first for rows in levels.values())
    end = max(rows[-1].first + rows[-1].count for rows in levels.values())
    x = Scale(first, end)
    picture = Picture(f"mean step of each rank over steps {first} to {end - 1}", bottom)
    picture.levels(y, TOP, bottom, with_unit(y.ticks(5), "ms"))
    for kind, rows in zip(RANK_KINDS, levels.values(), strict=False):
        points = []
        for row in rows:
            height = bottom - (bottom - TOP) * y.at(_mean_ms(row))
            points += [(x.at(row.first), height), (x.at(row.first + row.count), height)]
        picture.curve(points, kind)
    for low, high in _recorded(findings):
        note = f"steps {low} to {high}: recorded in detail"
        picture.bar((x.at(low), x.at(high + 1)), (bottom + 1, STRIP), "detailed", note)
    steps = [value for value in x.ticks() if value % 1 == 0]
    labels = [(value, f"step {value:.0f}" if value == steps[-1] else f"{value:.0f}") for value in steps]
    picture.axis(x, bottom + STRIP + 1, labels, bottom + STRIP + 1)
    picture.height = bottom + STRIP + TEXT_HEIGHT + 6
    return picture


def _note(levels: Sequence[RunSteps], high_ms: float, left: int) -> str:
    """What the picture leaves out. left: number of ranks that are not drawn."""
    note = f"Each level is the mean of up to {max(row.count for row in levels)} steps in a row, of any arm."
    cut = [mean for mean in map(_mean_ms, levels) if mean > high_ms]
    if cut:
        note += f" {len(cut)} of {len(levels)} levels are cut at the top; the highest is {ms(1e6 * max(cut))}."
    return note + (f" Not drawn: {left} ranks." if left else "")


def whole_run(findings: Findings) -> tuple[Shown, ...]:
    """The mean step of each rank over the steps of the whole run; () if the detailed record holds all steps."""
    known = {one.rank: [row for row in one.run_steps if row.count] for one in findings.trace.ranks}
    rows = {rank: own for rank, own in known.items() if own}
    if not rows:
        return ()
    chosen = _chosen(rows)
    levels = {rank: _levels(rows[rank]) for rank in chosen}
    drawn = [row for own in levels.values() for row in own]
    means_ms = [_mean_ms(row) for row in drawn]
    high_ms = min(1.05 * max(means_ms), ROOM * float(np.percentile(means_ms, 95)))
    wholes = [together(rows[rank]) for rank in chosen]
    key = [
        (kind, f"{said}: {ms(1e6 * _mean_ms(whole))} on average, at most {ms(whole.longest_ns)}")
        for kind, said, whole in zip(RANK_KINDS, chosen.values(), wholes, strict=False)
    ]
    return (
        Shown(
            f"The whole run: mean step of each rank ({findings.label})",
            (_draw(findings, levels, Scale(0.0, high_ms)),),
            (*key, ("detailed", "steps recorded in detail")),
            _note(drawn, high_ms, len(rows) - len(chosen)),
        ),
    )
