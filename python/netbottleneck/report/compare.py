"""Comparison of two runs, or of the cells of the same study run twice: steps by arm, and the parts of a step.

It is printed to a terminal, or drawn on a page of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from netbottleneck.analysis.comparisons import Estimate, middle, ratio_of_runs, step_times
from netbottleneck.analysis.findings import Findings
from netbottleneck.analysis.thresholds import PAIRS_MIN
from netbottleneck.report import Run, html
from netbottleneck.report.drawing import GAP, TEXT_HEIGHT, Picture, Piece, Scale, bars, short_name
from netbottleneck.report.drawing import Row as Bar
from netbottleneck.report.html import Shown
from netbottleneck.report.text import make_table, put_row, screen
from netbottleneck.trace.transports import Arm
from netbottleneck.units import ms, percent

# A cell of a study with FACTS is complete. RESULT names its run folder.
FACTS, RESULT = "facts.json", "cell.json"

PARTS = {
    "compute": "compute_ns",
    "exposed communication": "exposed_ns",
    "waiting for negotiation": "wait_ns",
    "other": "other_ns",
    "step": "step_ns",
}


@dataclass(frozen=True, slots=True)
class Row:
    """An arm of a run in both: median steps in ns, and B's over A's. cell: "" for a single run.

    steps: ns of the counted steps of A and of B.
    """

    cell: str
    arm: Arm
    before_ns: float
    after_ns: float
    ratio: Estimate
    steps: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    @property
    def name(self) -> str:
        """The cell, if any, and the arm."""
        return f"{self.cell}: {self.arm}" if self.cell else str(self.arm)


@dataclass(frozen=True, slots=True)
class Comparison:
    """rows: by cell and arm. overall: by arm, paired by cell, where enough cells are in both.

    parts holds (part, ns before, ns after) of single runs with the same base. missing: cells or arms that only one has.
    label: of the numbers, "measured" or "predicted". unjudged: the arms of A that move gradients, and the cells of A,
    that no gate can judge, each with the reason.
    """

    rows: tuple[Row, ...]
    overall: Mapping[Arm, Estimate]
    parts: tuple[tuple[str, float, float], ...] = ()
    missing: tuple[str, ...] = ()
    label: str = "measured"
    unjudged: tuple[str, ...] = ()

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
            "unjudged": list(self.unjudged),
            "label": self.label,
        }


def _interval(one: Estimate) -> dict[str, float | None]:
    ends = {"value": one.value, "low": one.low, "high": one.high}
    return {name: value if math.isfinite(value) else None for name, value in ends.items()}


def present(cell: Path, recorded: str) -> Path:
    """Return where a folder of a cell is now: the study may have been moved since it was recorded."""
    parts = Path(recorded).parts
    return cell.joinpath(*parts[len(parts) - parts[::-1].index(cell.name) :])


def _run_folder(cell: Path) -> Path:
    """Return the run folder of a complete cell. Raises ValueError naming an unusable file."""
    path = cell / RESULT
    if not path.exists():
        return cell / "run"
    try:
        return present(cell, json.loads(path.read_text(encoding="utf-8"))["outcome"]["folder"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error!r}") from error


def _runs(path: Path) -> tuple[dict[str, Run], list[str]]:
    """The runs of a path by cell: one named "" for a run, each complete cell of a study. And the incomplete cells."""
    if not (path / "cells").is_dir():
        run = Run(path)
        if run.trace.groups:
            raise ValueError(f"{path}: the dumps of a flight recorder have no step: nothing to compare")
        return {"": run}, []
    begun = sorted(cell for cell in (path / "cells").iterdir() if any(cell.glob("run/**/run.json")))
    whole = {cell.name: Run(_run_folder(cell)) for cell in begun if (cell / FACTS).exists()}
    if not whole:
        raise ValueError(f"{path}: no cell of this study is complete: run the study first")
    return whole, [cell.name for cell in begun if cell.name not in whole]


def _rows(cell: str, before: Findings, after: Findings) -> Iterator[Row]:
    for arm in before.times:
        if arm in after.times:
            both = [step_times(one.trace, arm) for one in (before, after)]
            ratio = ratio_of_runs(*both)
            if ratio is not None:
                old, new = (tuple(float(ns) for block in blocks.values() for ns in block) for blocks in both)
                yield Row(cell, arm, before.times[arm].median_ns, after.times[arm].median_ns, ratio, (old, new))


def _incomplete(*sides: tuple[list[str], str]) -> list[str]:
    """A line for each cell that is not complete in a study. sides: cells, and the name of their study."""
    return [f"{cell}: not complete in {name}" for cells, name in sides for cell in cells]


def _unjudged(cell: str, before: Findings, after: Findings) -> Iterator[str]:
    """The arms of A whose change in B has no interval, with the reason."""
    for arm in [arm for arm in before.trace.arms if arm.real]:
        name = f"{cell}: {arm}" if cell else str(arm)
        ratio = ratio_of_runs(*(step_times(one.trace, arm) for one in (before, after)))
        if arm not in after.trace.arms:
            yield f"{name}: not in B"
        elif ratio is None:
            yield f"{name}: no counted step in {'A' if arm not in before.times else 'B'}"
        elif not math.isfinite(ratio.high):
            yield f"{name}: too few counted steps for an interval"


def _unjudged_cells(before: Mapping[str, Run], after: Mapping[str, Run], partial: list[str]) -> Iterator[str]:
    """The complete cells of A that B lacks, and the arms of the others that cannot be judged. partial: cells of B."""
    for cell, run in before.items():
        if cell in after:
            yield from _unjudged(cell, run.findings, after[cell].findings)
        else:
            yield f"{cell}: not {'complete ' if cell in partial else ''}in B"


def _label(before: Mapping[str, Run], after: Mapping[str, Run]) -> str:
    """Label of the numbers of both sides, or of each one if they differ."""
    one, other = (" and ".join(sorted({run.findings.label for run in runs.values()})) for runs in (before, after))
    return one if one == other else f"A {one}, B {other}"


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

    Raises FileNotFoundError for a missing path, and ValueError for a record without steps, or if the two have no
    cell or no arm in common.
    """
    (old, partial), (new, new_partial) = _runs(Path(before)), _runs(Path(after))
    both = [cell for cell in old if cell in new]
    rows = tuple(row for cell in both for row in _rows(cell, old[cell].findings, new[cell].findings))
    if not rows:
        raise ValueError(f"{before} and {after} have no arm in common: nothing to compare")
    missing = _incomplete((partial, str(before)), (new_partial, str(after)))
    alone = sorted((set(old) ^ set(new)) - {*partial, *new_partial})
    missing += [f"{cell}: only in {before if cell in old else after}" for cell in alone]
    for cell in both:
        times = [set(run[cell].findings.times) for run in (old, new)]
        missing += [f"{arm}: only in {before if arm in times[0] else after}" for arm in sorted(times[0] ^ times[1])]
    parts = _parts(old[""].findings, new[""].findings) if both == [""] else ()
    unjudged = _incomplete((partial, "A")) + list(_unjudged_cells(old, new, new_partial))
    return Comparison(rows, _overall(rows), parts, tuple(missing), _label(old, new), tuple(unjudged))


def _change(ratio: Estimate) -> str:
    """A ratio as a change, with its interval where it has one."""
    value = percent(ratio.value - 1, signed=True)
    if not math.isfinite(ratio.high):
        return f"{value} (no interval)"
    return f"{value} ({percent(ratio.low - 1, signed=True)} to {percent(ratio.high - 1, signed=True)})"


def show(found: Comparison, console: Console | None = None) -> None:
    """Print a comparison, at most WIDTH columns."""
    shown = screen(console)
    for text in found.missing:
        shown.print(f"! {text}", style="yellow", highlight=False, markup=False)
    steps = make_table("step", "A", "B", "change, 95 %")
    for row in found.rows:
        put_row(steps, row.name, ms(row.before_ns), ms(row.after_ns), _change(row.ratio))
    for arm, ratio in found.overall.items():
        put_row(steps, f"{arm}, all cells", "", "", _change(ratio))
    shown.print(f"Steps: medians; B over A, by blocks of steps ({found.label})", style="bold", highlight=False)
    shown.print(steps)
    if found.parts:
        parts = make_table("part of a step", "A", "B", "difference")
        for name, before, after in found.parts:
            put_row(parts, name, ms(before), ms(after), ms(after - before))
        title = f"Parts of the base's step: means of the middle half ({found.label})"
        shown.print(title, style="bold", highlight=False)
        shown.print(parts)


# The page.

DISTRIBUTIONS_MOST = 8


def _sureness(ratio: Estimate) -> str:
    """Class of a change: surely slower, surely faster, or neither."""
    return "exposed" if ratio.low > 1 else "compute" if ratio.high < 1 else "other"


def _changes(found: Comparison, limit: float | None) -> Shown:
    """The change of each arm's step with its interval, beside no change and the limit of the gate."""
    rows = [(row.name, row.ratio) for row in found.rows]
    rows += [(f"{arm}, all cells", ratio) for arm, ratio in found.overall.items()]
    ends = [end - 1 for _, one in rows for end in (one.low, one.value, one.high) if math.isfinite(end)]
    widest = 1.1 * max(0.01, limit or 0.0, *(abs(end) for end in ends))
    scale = Scale(-widest, widest)
    picture = Picture("change of each step, B over A")
    for name, ratio in rows:
        picture.text(0, picture.height + 13, short_name(name))
        picture.text(1, picture.height + 13, _change(ratio), "end")
        y = picture.height + TEXT_HEIGHT + 7
        low, high = (scale.at(end - 1) for end in (ratio.low, ratio.high))
        if math.isfinite(ratio.high):
            picture.line((low, high), (y, y), "whisker")
        picture.dot(scale.at(ratio.value - 1), y, _sureness(ratio), _change(ratio), 5)
        picture.height = y + 7 + GAP
    ticks = [(value, percent(value, signed=True)) for value in scale.ticks(5)]
    if limit is not None:
        picture.line((scale.at(limit),) * 2, (0, picture.height), "limit")
    picture.axis(scale, picture.height, ticks)
    picture.height += TEXT_HEIGHT + 5
    key = (("exposed", "surely slower"), ("compute", "surely faster"), ("other", "no sure change"))
    note = "" if limit is None else f"The dashed line is the limit of the gate, {percent(limit, signed=True)}."
    title = f"Change of the median step, B over A, with 95 % intervals ({found.label})"
    return Shown(title, (picture,), key, note)


def _split(found: Comparison) -> Shown:
    """The parts of the base's step in A and in B."""
    title = f"Parts of the base's step (means of the middle half, {found.label})"
    if not found.parts:
        return Shown(title, missing="The parts are compared for two single runs that have the same base.")
    kinds = [("compute", "compute"), *html.KINDS[2:]]
    drawn = []
    for name, at in (("A", 1), ("B", 2)):
        lengths = {part[0]: float(part[at]) for part in found.parts}
        pieces = tuple(Piece(kind, lengths[what], f"{what}: {ms(lengths[what])}") for kind, what in _named(kinds))
        drawn.append(Bar(name, ms(lengths["step"]), (pieces,)))
    longest = max(max(before, after) for name, before, after in found.parts if name == "step")
    return Shown(title, (bars("parts of a step in A and B", drawn, longest),), tuple(kinds))


def _named(kinds: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(class, name in PARTS) of each part but the step."""
    return zip((kind for kind, _ in kinds), (name for name in PARTS if name != "step"), strict=True)


def _distributions(found: Comparison) -> Shown:
    rows = found.rows[:DISTRIBUTIONS_MOST]
    named = {f"{row.name}, {which}": steps for row in rows for which, steps in zip("AB", row.steps, strict=True)}
    shades = [html.colour(row.arm) for row in rows for _ in "AB"]
    left = len(found.rows) - len(rows)
    shown = html.histograms(f"Lengths of the steps ({found.label})", named, shades)
    more = f" The table has {html.count_text(left, 'more row')}." if left else ""
    return replace(shown, note=shown.note + more)


def _sure_changes(rows: list[Row], sureness: str) -> list[tuple[str, str]]:
    """Name and change of the rows whose change has this _sureness."""
    return [(row.name, _change(row.ratio)) for row in rows if _sureness(row.ratio) == sureness]


def page(found: Comparison, names: tuple[str, str], limit: float | None = None) -> str:
    """A page with the pictures and tables of a comparison. limit: of the gate, as a part of the step."""
    transports = [row for row in found.rows if row.arm.real]
    references = [row for row in found.rows if not row.arm.real]
    failed = found.regressions(limit) if limit is not None else ()
    return (
        html.environment()
        .get_template("compare.html.j2")
        .render(
            names=names,
            missing=found.missing,
            failed=failed,
            unjudged=found.unjudged,
            limit=limit,
            slower=_sure_changes(transports, "exposed"),
            faster=_sure_changes(transports, "compute"),
            longer_references=_sure_changes(references, "exposed"),
            shorter_references=_sure_changes(references, "compute"),
            transports=transports,
            figures=(_changes(found, limit), _split(found), _distributions(found)),
            rows=[(row.name, ms(row.before_ns), ms(row.after_ns), _change(row.ratio)) for row in found.rows],
            parts=[(name, ms(before), ms(after), ms(after - before)) for name, before, after in found.parts],
        )
    )
