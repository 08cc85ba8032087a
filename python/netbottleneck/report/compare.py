"""Comparison of two runs, or of the cells of the same study run twice: steps by arm, and the parts of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from netbottleneck.analysis.comparisons import PAIRS_MIN, Estimate, middle, ratio_of_runs, step_times
from netbottleneck.analysis.findings import Findings
from netbottleneck.report import Run
from netbottleneck.report.text import WIDTH, make_table, put_row
from netbottleneck.trace.transports import Arm
from netbottleneck.units import ms, percent

PARTS = {
    "compute": "compute_ns",
    "exposed communication": "exposed_ns",
    "waiting for negotiation": "wait_ns",
    "other": "other_ns",
    "step": "step_ns",
}


@dataclass(frozen=True, slots=True)
class Row:
    """An arm of a run in both: median steps in ns, and B's over A's. cell: "" for a single run."""

    cell: str
    arm: Arm
    before_ns: float
    after_ns: float
    ratio: Estimate

    @property
    def name(self) -> str:
        """The cell, if any, and the arm."""
        return f"{self.cell}: {self.arm}" if self.cell else str(self.arm)


@dataclass(frozen=True, slots=True)
class Comparison:
    """rows: by cell and arm. overall: by arm, paired by cell, where enough cells are in both.

    parts holds (part, ns before, ns after) of single runs with the same base. missing: cells or arms that only one has.
    """

    rows: tuple[Row, ...]
    overall: Mapping[Arm, Estimate]
    parts: tuple[tuple[str, float, float], ...] = ()
    missing: tuple[str, ...] = ()

    def regressions(self, limit: float) -> tuple[Row, ...]:
        """The arms whose step is more than `limit` longer, as a part, and surely longer."""
        return tuple(row for row in self.rows if row.arm.real and row.ratio.value > 1 + limit and row.ratio.low > 1)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values; null: this end of an interval is not known."""
        return {
            "rows": [
                {
                    "cell": row.cell,
                    "transport": row.arm,
                    "before_s": row.before_ns / 1e9,
                    "after_s": row.after_ns / 1e9,
                    "ratio": _interval(row.ratio),
                }
                for row in self.rows
            ],
            "overall": {arm: _interval(ratio) for arm, ratio in self.overall.items()},
            "parts": [{"part": name, "before_s": a / 1e9, "after_s": b / 1e9} for name, a, b in self.parts],
            "missing": list(self.missing),
        }


def _interval(one: Estimate) -> dict[str, float | None]:
    ends = {"value": one.value, "low": one.low, "high": one.high}
    return {name: value if math.isfinite(value) else None for name, value in ends.items()}


def _runs(path: Path) -> dict[str, Run]:
    """The runs of a path by cell: one named "" for a run, each complete cell of a study."""
    if not (path / "cells").is_dir():
        return {"": Run(path)}
    folders = sorted(path.glob("cells/**/run/run.json"))
    if not folders:
        raise ValueError(f"{path}: no cell of this study has a run: run the study first")
    return {str(found.parent.parent.relative_to(path / "cells")): Run(found.parent) for found in folders}


def _rows(cell: str, before: Findings, after: Findings) -> Iterator[Row]:
    for arm in before.times:
        if arm in after.times:
            ratio = ratio_of_runs(step_times(before.trace, arm), step_times(after.trace, arm))
            if ratio is not None:
                yield Row(cell, arm, before.times[arm].median_ns, after.times[arm].median_ns, ratio)


def _parts(before: Findings, after: Findings) -> tuple[tuple[str, float, float], ...]:
    if before.base is None or before.base != after.base:
        return ()
    one, other = before.parts[before.base], after.parts[before.base]
    return tuple((name, getattr(one, value), getattr(other, value)) for name, value in PARTS.items())


def _overall(rows: tuple[Row, ...]) -> dict[Arm, Estimate]:
    """By arm: the middle of the cells' ratios, for arms that are in PAIRS_MIN cells or more."""
    found = {}
    for arm in dict.fromkeys(row.arm for row in rows):
        logs = [math.log(row.after_ns / row.before_ns) for row in rows if row.arm == arm]
        if len(logs) >= PAIRS_MIN:
            one = middle(logs)
            found[arm] = Estimate(math.exp(one.value), math.exp(one.low), math.exp(one.high))
    return found


def compare(before: Path | str, after: Path | str) -> Comparison:
    """Compare B with A. Two runs are compared by the distributions of their blocks; cells of a study are paired.

    Raises FileNotFoundError for a missing path, and ValueError if the two have no cell or no arm in common.
    """
    old, new = _runs(Path(before)), _runs(Path(after))
    both = [cell for cell in old if cell in new]
    rows = tuple(row for cell in both for row in _rows(cell, old[cell].findings, new[cell].findings))
    if not rows:
        raise ValueError(f"{before} and {after} have no arm in common: nothing to compare")
    missing = [f"{cell}: only in {before if cell in old else after}" for cell in sorted(set(old) ^ set(new))]
    for cell in both:
        times = [set(run[cell].findings.times) for run in (old, new)]
        missing += [f"{arm}: only in {before if arm in times[0] else after}" for arm in sorted(times[0] ^ times[1])]
    parts = _parts(old[""].findings, new[""].findings) if both == [""] else ()
    return Comparison(rows, _overall(rows), parts, tuple(missing))


def _change(ratio: Estimate) -> str:
    """A ratio as a change, with its interval where it has one."""
    value = percent(ratio.value - 1, signed=True)
    if not math.isfinite(ratio.high):
        return f"{value} (no interval)"
    return f"{value} ({percent(ratio.low - 1, signed=True)} to {percent(ratio.high - 1, signed=True)})"


def show(found: Comparison, console: Console | None = None) -> None:
    """Print a comparison, at most WIDTH columns."""
    screen = console or Console(force_jupyter=False)
    screen.width = min(screen.width, WIDTH) if screen.is_terminal else WIDTH
    for text in found.missing:
        screen.print(f"! {text}", style="yellow", highlight=False, markup=False)
    steps = make_table("step", "A", "B", "change, 95 %")
    for row in found.rows:
        put_row(steps, row.name, ms(row.before_ns), ms(row.after_ns), _change(row.ratio))
    for arm, ratio in found.overall.items():
        put_row(steps, f"{arm}, all cells", "", "", _change(ratio))
    screen.print("Steps: medians; B over A, by blocks of steps (measured)", style="bold", highlight=False)
    screen.print(steps)
    if found.parts:
        parts = make_table("part of a step", "A", "B", "difference")
        for name, before, after in found.parts:
            put_row(parts, name, ms(before), ms(after), ms(after - before))
        screen.print("Parts of the base's step: means of the middle half (measured)", style="bold", highlight=False)
        screen.print(parts)
