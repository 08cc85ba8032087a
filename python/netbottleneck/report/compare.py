"""Comparison of two runs, or of the cells of the same study run twice: steps by arm, and the parts of a step.

It is printed to a terminal, or drawn on a page of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from netbottleneck.analysis.comparisons import (
    Estimate,
    changed_at,
    middle,
    ratio_of_means,
    ratio_of_runs,
    step_times,
    typical_step,
)
from netbottleneck.analysis.findings import Findings
from netbottleneck.analysis.intervals import host_count, missing_ranks
from netbottleneck.analysis.thresholds import GAIN_MIN, PAIRS_MIN
from netbottleneck.report import Run, html
from netbottleneck.report.drawing import GAP, TEXT_HEIGHT, Picture, Piece, Scale, Shown, bars, short_name
from netbottleneck.report.drawing import Row as Bar
from netbottleneck.report.text import make_table, put_row, screen
from netbottleneck.trace.files import printable
from netbottleneck.trace.model import Trace
from netbottleneck.trace.transports import Arm
from netbottleneck.units import listed, ms, percent

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
    """An arm of a run in both: A's and B's step in ns by typical_step, and B's over A's. cell: "" for a single run.

    steps: ns of the counted steps of A and of B. comparable: false if the two runs measured different things, or one is
    in progress. means: B's mean step over A's, if it differs from `ratio` by more than GAIN_MIN; else None. longer:
    true if single steps of B are the cause, not equally long ones of both beside a shorter typical step of B. mixed:
    the arm sends in some steps only, in A or B, so that all is by mean steps.
    """

    cell: str
    arm: Arm
    before_ns: float
    after_ns: float
    ratio: Estimate
    steps: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    comparable: bool = True
    means: Estimate | None = None
    longer: bool = False
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class StepChange:
    """B's step over A's, of an arm of a cell, or of an arm over all cells. comparable, means, longer: see Row."""

    name: str
    arm: Arm
    ratio: Estimate
    comparable: bool = True
    means: Estimate | None = None
    longer: bool = False

    @property
    def judged(self) -> bool:
        """True if a gate judges it: a transport that both runs have, in runs that are comparable."""
        return self.comparable and self.arm.real

    def regressed(self, limit: float) -> bool:
        """True if the median or the mean step is more than `limit` longer, as a part, and surely longer."""
        ratios = [self.ratio] if self.means is None else [self.ratio, self.means]
        return any(one.value > 1 + limit and one.low > 1 for one in ratios)

    def doubtful(self, limit: float) -> bool:
        """True if only the mean step is more than `limit` longer, and not surely longer."""
        above = self.means is not None and self.means.value > max(1 + limit, self.ratio.value)
        return above and not self.regressed(limit)

    @property
    def by_means(self) -> str:
        """How the mean step changed, if the median does not tell; "" if it does."""
        if self.means is None:
            return ""
        more = ": single steps are much longer in B" if self.longer else f", by medians {_change(self.ratio)}"
        return f"{self.name}: by mean steps {_change(self.means)}{more}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """rows: by cell and arm. overall: by arm, paired by cell, where enough cells are comparable.

    parts holds (part, ns before, ns after) of single runs with the same base; averaged: the steps that they are means
    of. missing: cells or arms that only one has,
    what makes cells no comparison, ranks that failed or have no record, runs whose step time changed, and arms whose
    mean step changed otherwise. label: of the
    numbers, "measured" or "predicted". unjudged: the arms of A that move gradients, the cells of A, and the runs that
    no gate can judge, each with the reason.
    """

    rows: tuple[Row, ...]
    overall: Mapping[Arm, Estimate]
    parts: tuple[tuple[str, float, float], ...] = ()
    missing: tuple[str, ...] = ()
    label: str = "measured"
    unjudged: tuple[str, ...] = ()
    averaged: str = "the middle half"

    @property
    def changes(self) -> tuple[StepChange, ...]:
        """The change of each row, then of each arm over all cells."""
        each = [
            StepChange(_name(row.cell, row.arm), row.arm, row.ratio, row.comparable, row.means, row.longer)
            for row in self.rows
        ]
        return (*each, *(StepChange(f"{arm}, all cells", arm, ratio) for arm, ratio in self.overall.items()))

    def regressions(self, limit: float) -> tuple[StepChange, ...]:
        """The changes of transports whose step is more than `limit` longer, as a part, and surely longer."""
        return tuple(one for one in self.changes if one.judged and one.regressed(limit))

    def not_judged(self, limit: float) -> tuple[str, ...]:
        """What a gate of this limit cannot judge, each with the reason: `unjudged`, and doubtful mean steps."""
        return (*self.unjudged, *(one.by_means for one in self.changes if one.judged and one.doubtful(limit)))

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values; null: the interval is not known."""
        return {
            "rows": [
                {
                    "cell": row.cell,
                    "transport": row.arm,
                    "before_s": row.before_ns / 1e9,
                    "after_s": row.after_ns / 1e9,
                    "ratio": row.ratio.as_dict(),
                    "mean_ratio": None if row.means is None else row.means.as_dict(),
                    "comparable": row.comparable,
                }
                for row in self.rows
            ],
            "overall": {arm: ratio.as_dict() for arm, ratio in self.overall.items()},
            "parts": [{"part": name, "before_s": a / 1e9, "after_s": b / 1e9} for name, a, b in self.parts],
            "missing": list(self.missing),
            "unjudged": list(self.unjudged),
            "label": self.label,
        }


def _name(cell: str, what: str) -> str:
    """A thing of a cell, or of a single run."""
    return f"{cell}: {what}" if cell else str(what)


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


def _gradient_bytes(trace: Trace) -> str:
    total = sum(parameter.bytes for parameter in trace.parameters)
    return f"{total} bytes" if total else ""


def _link(trace: Trace) -> str:
    if trace.network is None:
        return ""
    rate = "no known rate" if trace.network.link_bps is None else f"{trace.network.link_bps / 1e9:g} Gbit/s"
    flows = "".join(f", a flow {bps / 1e9:g} Gbit/s" for bps in trace.network.flow_bps)
    return f"{rate}{flows} ({trace.network.how})"


# What two runs must have in common, as text; "": not known.
SAME: Mapping[str, Callable[[Trace], str]] = {
    "recorder": lambda trace: trace.recorder or "netbottleneck",
    "origin": lambda trace: trace.origin,
    "ranks": lambda trace: str(trace.size),
    "hosts": lambda trace: str(host_count(trace) or ""),
    "model": lambda trace: trace.model,
    "gradients": _gradient_bytes,
    "link": _link,
}


def _unlike(cell: str, before: Trace, after: Trace) -> Iterator[str]:
    """What makes the steps of two runs no comparison, as far as the runs know it."""
    for trace, where in ((before, "A"), (after, "B")):
        if trace.in_progress:
            yield _name(cell, f"not comparable: in progress in {where}")
    for what, value in SAME.items():
        old, new = value(before), value(after)
        if old and new and old != new:
            yield _name(cell, f"not comparable: {what}: {old} in A, {new} in B")


def _ratio(arm: Arm, before: Findings, after: Findings) -> Estimate | None:
    """B's step over A's: the typical one, or the mean one if the arm is mixed in either; None without steps."""
    both = (step_times(one.trace, arm) for one in (before, after))
    return (ratio_of_means if arm in before.mixed | after.mixed else ratio_of_runs)(*both)


def _rows(cell: str, before: Findings, after: Findings) -> Iterator[Row]:
    comparable = not list(_unlike(cell, before.trace, after.trace))
    for arm in before.times:
        if arm in after.times:
            both = [step_times(one.trace, arm) for one in (before, after)]
            ratio, means, mixed = _ratio(arm, before, after), ratio_of_means(*both), arm in before.mixed | after.mixed
            if ratio is not None and means is not None:
                old, new = (tuple(float(ns) for block in blocks.values() for ns in block) for blocks in both)
                before_ns, after_ns = map(fmean, (old, new)) if mixed else map(typical_step, both)
                apart = means if abs(means.value - ratio.value) > GAIN_MIN else None
                above = [fmean(max(0.0, ns - max(before_ns, after_ns)) for ns in steps) for steps in (old, new)]
                longer = apart is not None and apart.value > ratio.value and above[1] > above[0]
                yield Row(cell, arm, before_ns, after_ns, ratio, (old, new), comparable, apart, longer, mixed)


def _lacking(cell: str, sides: Sequence[tuple[Findings, str]]) -> Iterator[str]:
    """The arms that only one side has, or that have no counted step. sides: A and B, each with its name."""
    for arm in sorted({arm for found, _ in sides for arm in found.trace.arms}):
        there = [name for found, name in sides if arm in found.trace.arms]
        without = [name for found, name in sides if arm in found.trace.arms and arm not in found.times]
        if len(there) < len(sides):
            yield _name(cell, f"{arm}: only in {there[0]}")
        elif without:
            yield _name(cell, f"{arm}: no counted step in {' and '.join(without)}")


def _failed(cell: str, *sides: tuple[Trace, str]) -> Iterator[str]:
    """A line for each cause for which the record of a run is not whole. sides: traces, each with its name."""
    for trace, where in sides:
        missing = missing_ranks(trace)
        errors = [rank.rank for rank in trace.ranks if rank.error]
        ended = [rank.rank for rank in trace.ranks if rank.finished or rank.error]
        over = trace.origin == "measured" and not trace.in_progress
        open_ = [rank.rank for rank in trace.ranks if over and rank.rank not in ended]
        for ranks, what in ((errors, "failed"), (open_, "did not finish cleanly")):
            if ranks:
                yield _name(cell, f"rank {listed(ranks)} {what} in {where}")
        if missing:
            yield _name(cell, f"no record of rank {listed(missing)} in {where}")


def _changed(cell: str, *sides: tuple[Trace, str]) -> Iterator[str]:
    """A line for each run whose step time changed. sides: traces, each with its name."""
    for trace, where in sides:
        changed = changed_at(trace)
        if changed is not None:
            yield _name(cell, f"in {where} {changed.words}: its steps are of both states")


def _incomplete(*sides: tuple[list[str], str]) -> list[str]:
    """A line for each cell that is not complete in a study. sides: cells, and the name of their study."""
    return [f"{cell}: not complete in {name}" for cells, name in sides for cell in cells]


def _unjudged(cell: str, before: Findings, after: Findings) -> Iterator[str]:
    """Ranks that failed, what makes two runs no comparison, else the arms of A whose change in B has no interval."""
    unlike = list(_unlike(cell, before.trace, after.trace))
    yield from _failed(cell, (before.trace, "A"), (after.trace, "B"))
    yield from unlike
    for arm in [] if unlike else [arm for arm in before.trace.arms if arm.real]:
        name = _name(cell, arm)
        ratio = _ratio(arm, before, after)
        if arm not in after.trace.arms:
            yield f"{name}: not in B"
        elif ratio is None:
            yield f"{name}: no counted step in {'A' if arm not in before.times else 'B'}"
        elif not ratio.known:
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


def _averaged(before: Findings, after: Findings) -> str:
    """The steps that the parts of the base in A and B are means of."""
    one, other = ("all steps" if found.base in found.mixed else "the middle half" for found in (before, after))
    return one if one == other else f"{one} in A, {other} in B"


def _overall(rows: tuple[Row, ...]) -> dict[Arm, Estimate]:
    """By arm: the middle of the cells' ratios, for arms that are in PAIRS_MIN comparable cells or more."""
    found = {}
    for arm in dict.fromkeys(row.arm for row in rows):
        logs = [math.log(row.ratio.value) for row in rows if row.arm == arm and row.comparable]
        if len(logs) >= PAIRS_MIN:
            one = middle(logs)
            found[arm] = Estimate(math.exp(one.value), math.exp(one.low), math.exp(one.high))
    return found


def _in_both(old: Mapping[str, Run], new: Mapping[str, Run], before: Path | str, after: Path | str) -> list[str]:
    """The cells that both have; [""] of two runs. Raises ValueError if nothing can be compared."""
    if ("" in old) != ("" in new):
        study, run = (after, before) if "" in old else (before, after)
        raise ValueError(f"{study} is a study and {run} a run: compare the run with {study}/cells/CELL/run or run/N")
    both = [cell for cell in old if cell in new]
    if not both:
        raise ValueError(f"{before} and {after} have no cell in common: nothing to compare")
    if all(set(old[cell].trace.arms).isdisjoint(new[cell].trace.arms) for cell in both):
        raise ValueError(f"{before} and {after} have no arm in common: nothing to compare")
    return both


def compare(before: Path | str, after: Path | str) -> Comparison:
    """Compare B with A. Two runs are compared by the distributions of their blocks; cells of a study are paired.

    Raises FileNotFoundError for a missing path, and ValueError for the dumps of a flight recorder, or if the two have
    no cell or no arm in common, or are a study and a run.
    """
    (old, partial), (new, new_partial) = _runs(Path(before)), _runs(Path(after))
    names = printable(before), printable(after)
    both = _in_both(old, new, before, after)
    rows = tuple(row for cell in both for row in _rows(cell, old[cell].findings, new[cell].findings))
    missing = _incomplete((partial, names[0]), (new_partial, names[1]))
    alone = sorted((set(old) ^ set(new)) - {*partial, *new_partial})
    missing += [f"{cell}: only in {names[cell not in old]}" for cell in alone]
    for cell in both:
        missing += _unlike(cell, old[cell].trace, new[cell].trace)
        missing += _failed(cell, (old[cell].trace, names[0]), (new[cell].trace, names[1]))
        missing += _changed(cell, (old[cell].trace, names[0]), (new[cell].trace, names[1]))
        missing += _lacking(cell, ((old[cell].findings, names[0]), (new[cell].findings, names[1])))
    parts = _parts(old[""].findings, new[""].findings) if both == [""] else ()
    averaged = _averaged(old[""].findings, new[""].findings) if parts else "the middle half"
    unjudged = _incomplete((partial, "A")) + list(_unjudged_cells(old, new, new_partial))
    found = Comparison(rows, _overall(rows), parts, (), _label(old, new), tuple(unjudged), averaged)
    return replace(found, missing=(*missing, *(one.by_means for one in found.changes if one.by_means)))


def _change(ratio: Estimate) -> str:
    """A ratio as a change, with its interval where it has one."""
    value = percent(ratio.value - 1, signed=True)
    if not ratio.known:
        return f"{value} (no interval)"
    return f"{value} ({percent(ratio.low - 1, signed=True)} to {percent(ratio.high - 1, signed=True)})"


def _steps(found: Comparison) -> str:
    """What the columns A and B are; ratio_of_runs says what stands for a single block."""
    mixed = [_name(row.cell, row.arm) for row in found.rows if row.mixed]
    if mixed and len(mixed) == len(found.rows):
        return "mean of all steps"
    medians = "geometric mean of block medians"
    return f"{medians}, but the mean of all of {', '.join(mixed)}" if mixed else medians


def _table(found: Comparison) -> list[tuple[str, str, str, str]]:
    """The rows of the table of steps: name, A, B and the change; over all cells without A and B."""
    steps = [(ms(row.before_ns), ms(row.after_ns)) for row in found.rows] + [("", "")] * len(found.overall)
    return [(one.name, *both, _change(one.ratio)) for one, both in zip(found.changes, steps, strict=True)]


def show(found: Comparison, console: Console | None = None) -> None:
    """Print a comparison, at most WIDTH columns."""
    shown = screen(console)
    for text in found.missing:
        shown.print(f"! {text}", style="yellow", highlight=False, markup=False)
    if found.rows:
        steps = make_table("step", "A", "B", "change, 95 %")
        for row in _table(found):
            put_row(steps, *row)
        shown.print(f"Steps: {_steps(found)}; B over A ({found.label})", style="bold", highlight=False)
        shown.print(steps)
    if found.parts:
        parts = make_table("part of a step", "A", "B", "difference")
        for name, before, after in found.parts:
            put_row(parts, name, ms(before), ms(after), ms(after - before))
        title = f"Parts of the base's step: means of {found.averaged} ({found.label})"
        shown.print(title, style="bold", highlight=False)
        shown.print(parts)


# The page.

DISTRIBUTIONS_MOST = 8


def _sureness(change: StepChange) -> str:
    """Class of a change: surely slower, surely faster, or neither."""
    if change.regressed(0.0):
        return "exposed"
    return "compute" if change.ratio.high < 1 and not change.doubtful(0.0) else "other"


def _widest(ratios: Sequence[Estimate], limit: float | None) -> float:
    """The largest change to draw."""
    ends = [end for one in ratios for end in ((one.low, one.value, one.high) if one.known else (one.value,))]
    return 1.1 * max(0.01, limit or 0.0, *(abs(end - 1) for end in ends))


def _changes(found: Comparison, limit: float | None) -> Shown:
    """The change of each arm's step with its interval, beside no change and the limit of the gate."""
    title = f"Change of the step, B over A, with 95 % intervals ({found.label})"
    if not found.changes:
        return Shown(title, missing="No arm has a counted step in both.")
    widest = _widest([one.ratio for one in found.changes], limit)
    scale = Scale(-widest, widest)
    picture = Picture("change of each step, B over A")
    for one in found.changes:
        ratio = one.ratio
        picture.text(0, picture.height + 13, short_name(one.name))
        picture.text(1, picture.height + 13, _change(ratio), "end")
        y = picture.height + TEXT_HEIGHT + 7
        if ratio.known:
            low, high = (scale.at(end - 1) for end in (ratio.low, ratio.high))
            picture.line((low, high), (y, y), "whisker")
        picture.dot(scale.at(ratio.value - 1), y, _sureness(one) if one.comparable else "other", _change(ratio), 5)
        picture.height = y + 7 + GAP
    ticks = [(value, percent(value, signed=True)) for value in scale.ticks(5)]
    if limit is not None:
        picture.line((scale.at(limit),) * 2, (0, picture.height), "limit")
    picture.axis(scale, picture.height, ticks)
    picture.height += TEXT_HEIGHT + 5
    alike = all(one.comparable for one in found.changes)
    unsure = "no sure change" if alike else "no sure change, or not comparable"
    key = (("exposed", "surely slower"), ("compute", "surely faster"), ("other", unsure))
    note = "" if limit is None else f"The dashed line is the limit of the gate, {percent(limit, signed=True)}."
    return Shown(title, (picture,), key, note)


def _split(found: Comparison) -> Shown:
    """The parts of the base's step in A and in B."""
    title = f"Parts of the base's step (means of {found.averaged}, {found.label})"
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
    named = {
        f"{_name(row.cell, row.arm)}, {which}": steps
        for row in rows
        for which, steps in zip("AB", row.steps, strict=True)
    }
    shades = [html.colour(row.arm) for row in rows for _ in "AB"]
    left = len(found.rows) - len(rows)
    shown = html.histograms(f"Lengths of the steps ({found.label})", named, shades)
    more = f" The table has {html.count_text(left, 'more row')}." if left else ""
    return replace(shown, note=shown.note + more)


def _sure_changes(changes: Sequence[StepChange], sureness: str) -> list[tuple[str, str]]:
    """Name and text of the changes that have this _sureness."""
    chosen = [one for one in changes if _sureness(one) == sureness]
    return [
        (one.name, f"{_change(one.means)} by mean steps" if one.means is not None else _change(one.ratio))
        for one in chosen
    ]


def page(found: Comparison, names: tuple[str, str], limit: float | None = None) -> str:
    """A page with the pictures and tables of a comparison. limit: of the gate, as a part of the step."""
    changes = [one for one in found.changes if one.comparable]
    transports = [one for one in changes if one.arm.real]
    references = [one for one in changes if not one.arm.real]
    failed = found.regressions(limit) if limit is not None else ()
    return (
        html.environment()
        .get_template("compare.html.j2")
        .render(
            names=names,
            missing=found.missing,
            failed=failed,
            unjudged=found.not_judged(limit) if limit is not None else (),
            limit=limit,
            even=all(one.ratio.low <= 1 <= one.ratio.high for one in transports),
            slower=_sure_changes(transports, "exposed"),
            faster=_sure_changes(transports, "compute"),
            longer_references=_sure_changes(references, "exposed"),
            shorter_references=_sure_changes(references, "compute"),
            transports=transports,
            figures=(_changes(found, limit), _split(found), _distributions(found)),
            rows=_table(found),
            steps=_steps(found),
            parts=[(name, ms(before), ms(after), ms(after - before)) for name, before, after in found.parts],
        )
    )
