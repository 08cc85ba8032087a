"""Reports of a study: report.html (one file, no script, no link), a short form for notebooks, a form for terminals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
from rich.console import Console
from rich.text import Text

from netbottleneck.report.drawing import Piece, Row, Shown, bars
from netbottleneck.report.html import colour
from netbottleneck.report.text import plain, screen
from netbottleneck.study.evidence import chain, values
from netbottleneck.study.evidence.facts import Budget, ForecastRecord
from netbottleneck.study.evidence.values import INFLATION, ArmFacts, CellFacts
from netbottleneck.units import ms, percent

if TYPE_CHECKING:
    from netbottleneck.study.evidence import Evidence


# Tables of a study's numbers as rows of text, for the page and the terminal. Pure.

CELLS = ("cell", "arm", "step", "scaling factor", "full use", "reached")
CELL_KEY = (
    "Step and scaling factor: measured{but}, 95 % by blocks. Full use: the scaling factor with the link fully used "
    "(predicted). Reached: the step at full use over the measured step"
)
PREDICTIONS = ("cell", "arm", "predicted", "measured", "error")
BUDGETS = ("cell", "arm", "loss", "host-internal", "inflation", "exposed network", "other", "waiting")

Words = tuple[str, ...]


def cells(facts: Sequence[CellFacts]) -> list[Words]:
    """Return one row per arm: its step and scaling factor, and the bound at full use of the link."""
    return [_arm(cell, arm) for cell in facts if cell.job != INFLATION for arm in cell.arms.values()]


def cell_key(facts: Sequence[CellFacts]) -> str:
    """Return the key of the table of cells. It names the cells whose scaling factors are estimates."""
    scaled = [cell for cell in facts if any(arm.scaling for arm in cell.transports)]
    found = [cell.key for cell in scaled if values.label(cell) == "estimated"]
    return CELL_KEY.format(but=f" (the factor is estimated in {values.join_names(found)})" if found else "")


def _arm(cell: CellFacts, arm: ArmFacts) -> Words:
    full, reached = chain.bound(cell), chain.parts_of_bound(cell)
    return (
        cell.key,
        arm.name,
        values.time(arm.step_ns),
        "" if arm.scaling is None else values.factor(arm.scaling),
        "" if full is None or arm.name not in reached else f"{full[0].value:.3f}",
        percent(reached[arm.name]) if arm.name in reached else "",
    )


def predictions(forecast_record: ForecastRecord) -> list[Words]:
    """Return one row per forecast."""
    return [
        (
            one.key,
            one.arm,
            values.time(one.predicted_ns),
            ms(one.measured_ns.value),
            percent(one.error, digits=1, signed=True),
        )
        for one in forecast_record.forecast_errors
    ]


def budgets(rows: Sequence[Budget]) -> list[Words]:
    """Return one row per arm; numbers are parts of the step."""
    return [
        (
            one.key,
            one.arm,
            *(
                f"{part:.3f}"
                for part in (one.loss, one.host_internal, one.inflation, one.exposed, one.other, one.waiting)
            ),
        )
        for one in rows
    ]


# The picture that opens the page.

BOUND = "other"  # class of the colour of the step at full use of the link


def opening(facts: Sequence[CellFacts]) -> Shown:
    """Each cell's steps over its transports, the longest first, and its step at full use of the link.

    The cells that are farthest from full use come first; those whose bound is not known come last.
    """
    title = "Step of each cell, by transport (95 % intervals)"
    drawn = [cell for cell in facts if cell.job != INFLATION and cell.transports]
    if not drawn:
        return Shown(title, missing="No cell has steps over a transport.")
    drawn.sort(key=lambda cell: min(chain.parts_of_bound(cell).values(), default=math.inf))
    rows = [row for cell in drawn for row in _steps(cell)]
    arms = dict.fromkeys(arm.name for cell in drawn for arm in cell.transports)
    key = [(colour(name), f"{name} (measured)") for name in arms]
    note = "Each cell has a scale of its own; shorter is better."
    if any(chain.step_at_full_use(cell) is not None for cell in drawn):
        key.append((BOUND, "link fully used (predicted)"))
        note += " The cell that is farthest from full use of its link is at the top."
    return Shown(title, (bars("step of each cell by transport", rows, longest=1.0),), tuple(key), note)


def _steps(cell: CellFacts) -> list[Row]:
    """Return the heading of a cell and its bars, whose lengths are parts of the cell's longest interval."""
    arms = sorted(cell.transports, key=lambda arm: -arm.step_ns.value)
    steps = [(arm.name, colour(arm.name), arm.step_ns) for arm in arms]
    full = chain.step_at_full_use(cell)
    if full is not None:
        steps.append(("full use (predicted)", BOUND, full))
    longest = max(step.high for _, _, step in steps)
    rows = [Row(cell.key, "", ())]
    for name, kind, step in steps:
        bar = (Piece(kind, step.value / longest, f"{name}: {ms(step.value)}"),)
        rows.append(Row(name, values.time(step), (bar,), (step.low / longest, step.high / longest)))
    return rows


# The HTML page.

# The package of each template that is not in this one.
TEMPLATE_PACKAGES = dict.fromkeys(("style.css", "shown.html.j2"), "netbottleneck.report")
THIS_PACKAGE = "netbottleneck.study.evidence"
BAR_WIDTH, BAR_HEIGHT, LABEL_WIDTH = 560, 18, 300
# Parts of a budget: field, CSS class (the colours of a run's report), and name.
PARTS = (
    ("exposed", "exposed", "exposed network communication"),
    ("host_internal", "hidden", "inside hosts"),
    ("inflation", "wait", "inflation"),
    ("other", "other", "other"),
)


def _load(name: str) -> str:
    return resources.files(TEMPLATE_PACKAGES.get(name, THIS_PACKAGE)).joinpath(name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _bar(one: Budget) -> dict[str, Any]:
    """Return a budget as a bar whose full width is one step; negative parts appear only in the table."""
    x, segments = float(LABEL_WIDTH), []
    for name, kind, what in PARTS:
        part = getattr(one, name)
        width = BAR_WIDTH * max(0.0, part)
        segments.append({"kind": kind, "x": round(x, 1), "width": round(width, 1), "what": f"{what}: {percent(part)}"})
        x += width
    return {"name": f"{one.key}, {one.arm}", "segments": segments, "loss": percent(one.loss)}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"columns": columns, "rows": rows}


def _context(evidence: Evidence) -> dict[str, Any]:
    bars = [_bar(one) for one in evidence.budgets]
    return {
        "title": evidence.title or "Network study",
        "opening": opening(evidence.cells),
        "claims": evidence.claims,
        "notes": evidence.notes,
        "tables": {
            "scaling": _table(CELLS, cells(evidence.cells)),
            "prediction": _table(PREDICTIONS, predictions(evidence.predictions)),
            "budget": _table(BUDGETS, budgets(evidence.budgets)),
        },
        "cell_key": cell_key(evidence.cells),
        "cell_count": len(evidence.cells),
        "bars": bars,
        "bar_height": BAR_HEIGHT,
        "bar_width": BAR_WIDTH,
        "label_width": LABEL_WIDTH,
        "row_height": BAR_HEIGHT + 6,
        "width": LABEL_WIDTH + BAR_WIDTH + 60,
        "kinds": [(kind, what) for _, kind, what in PARTS],
    }


def page(evidence: Evidence) -> str:
    """Return the complete page."""
    drawn = [(figure, evidence.pictures.get(figure.number, "")) for figure in evidence.figures]
    return _environment().get_template("page.html.j2").render(_context(evidence), figures=drawn)


def fragment(evidence: Evidence) -> str:
    """Return the chain of claims as HTML."""
    return _environment().get_template("claims.html.j2").render(_context(evidence))


# The terminal's form: one sentence for each claim, then the result of each cell.

WIDTHS = (9, 26, 26, 10, 8)  # columns of a cell's rows
MISSING_MAX = 3  # missing measurements listed per claim


def render(evidence: Evidence, console: Console) -> None:
    """Print the study to a console."""
    if evidence.title:
        console.print(Text(evidence.title, style="bold"))
        console.print()
    for number, claim in enumerate(evidence.claims, 1):
        console.print(Text(f"{number}. {claim.title}: ", style="bold").append(claim.verdict, style="not bold"))
        for missing in _missing(claim.missing):
            console.print(Text(f"   Not measured: {missing}.", style="yellow"))
    rows = cells(evidence.cells)
    if rows:
        console.print()
        console.print(Text(_columns(CELLS[1:]), style="bold"))
        for row, before in zip(rows, [("",), *rows], strict=False):
            if row[0] != before[0]:
                console.print(Text(row[0], style="bold"))
            console.print(Text(_columns(row[1:])))
        console.print(Text(f"{cell_key(evidence.cells)}."))
    for note in evidence.notes:
        console.print(Text(note))


def _columns(row: Sequence[str]) -> str:
    return f"  {row[0]:<{WIDTHS[0] - 2}}" + "".join(
        f"{word:>{width}}" for word, width in zip(row[1:], WIDTHS[1:], strict=True)
    )


def _missing(missing: Sequence[str]) -> list[str]:
    left = len(missing) - MISSING_MAX
    return [*missing[:MISSING_MAX], *([f"and {left} more"] if left > 0 else [])]


def text(evidence: Evidence) -> str:
    """Return the terminal's form as plain text without trailing blanks."""
    return plain(lambda console: render(evidence, console))


def show(evidence: Evidence, console: Console | None = None) -> None:
    """Print to the terminal, at most WIDTH columns."""
    render(evidence, screen(console))
