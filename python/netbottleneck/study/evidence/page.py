"""report.html of a study, one file without a script or a link, and the small form for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from netbottleneck.study.evidence import tables
from netbottleneck.study.evidence.budget import Budget
from netbottleneck.units import percent

if TYPE_CHECKING:
    from netbottleneck.study.evidence import Evidence

ROOMS = {"style.css": "netbottleneck.report"}  # where a template lies that is not our own
HERE = "netbottleneck.study.evidence"
BAR_WIDTH, BAR_HEIGHT, LABEL_WIDTH = 560, 18, 300
# Names of parts, and the colours that they share with a run's report.
PARTS = (
    ("exposed", "exposed", "exposed network communication"),
    ("host_internal", "hidden", "inside hosts"),
    ("inflation", "wait", "inflation"),
    ("other", "other", "other"),
)


def _load(name: str) -> str:
    return resources.files(ROOMS.get(name, HERE)).joinpath(name).read_text(encoding="utf-8")


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_load),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _bar(one: Budget) -> dict[str, Any]:
    """A budget as a bar whose whole width is a step; what is below 0 is not drawn, and stands in the table."""
    x, segments = float(LABEL_WIDTH), []
    for name, kind, what in PARTS:
        part = getattr(one, name)
        width = BAR_WIDTH * max(0.0, part)
        segments.append({"kind": kind, "x": round(x, 1), "width": round(width, 1), "what": f"{what}: {percent(part)}"})
        x += width
    return {"name": f"{one.key}, {one.arm}", "segments": segments, "loss": percent(one.loss)}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"columns": columns, "rows": rows}


def _context(found: Evidence) -> dict[str, Any]:
    bars = [_bar(one) for one in found.budgets]
    return {
        "title": found.title or "A study of the network",
        "steps": found.steps,
        "notes": found.notes,
        "tables": {
            "scaling": _table(tables.CELLS, tables.cells(found.cells)),
            "prediction": _table(tables.PREDICTIONS, tables.predictions(found.predictions)),
            "budget": _table(tables.BUDGETS, tables.budgets(found.budgets)),
        },
        "cell_key": tables.CELL_KEY,
        "cell_count": len(found.cells),
        "bars": bars,
        "bar_height": BAR_HEIGHT,
        "bar_width": BAR_WIDTH,
        "label_width": LABEL_WIDTH,
        "row_height": BAR_HEIGHT + 6,
        "width": LABEL_WIDTH + BAR_WIDTH + 60,
        "kinds": [(kind, what) for _, kind, what in PARTS],
    }


def page(found: Evidence) -> str:
    """The whole page."""
    drawn = [(figure, found.pictures.get(figure.number, "")) for figure in found.figures]
    return _environment().get_template("page.html.j2").render(_context(found), figures=drawn)


def fragment(found: Evidence) -> str:
    """The chain of claims."""
    return _environment().get_template("steps.html.j2").render(_context(found))
