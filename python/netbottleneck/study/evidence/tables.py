"""A study's numbers cell by cell, as rows of words: for the page and the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from netbottleneck.study.evidence import bounds, words
from netbottleneck.study.evidence.budget import Budget
from netbottleneck.study.evidence.prediction import Record
from netbottleneck.study.evidence.values import INFLATION, ArmFacts, CellFacts
from netbottleneck.units import ms, percent

CELLS = ("cell", "arm", "step", "scaling factor", "full use", "of it")
CELL_KEY = (
    "Step and scaling factor: measured, 95 % by blocks. Full use: the scaling factor with the link fully used, "
    "predicted; of it: the part that was reached"
)
PREDICTIONS = ("cell", "arm", "predicted", "measured", "error")
BUDGETS = ("cell", "arm", "loss", "host-internal", "inflation", "exposed network", "other", "of it waiting")

Row = tuple[str, ...]


def cells(found: Sequence[CellFacts]) -> list[Row]:
    """A row an arm: its step and scaling factor, beside full use of the link."""
    return [_arm(cell, arm) for cell in found if cell.job != INFLATION for arm in cell.arms.values()]


def _arm(cell: CellFacts, arm: ArmFacts) -> Row:
    full, reached = bounds.bound(cell), bounds.shares(cell)
    return (
        cell.key,
        arm.name,
        words.time(arm.step_ns),
        "" if arm.scaling is None else words.factor(arm.scaling),
        "" if full is None or arm.name not in reached else f"{full[0].value:.3f}",
        percent(reached[arm.name]) if arm.name in reached else "",
    )


def predictions(held: Record) -> list[Row]:
    """A row a forecast."""
    return [
        (one.key, one.arm, words.time(one.predicted_ns), ms(one.measured_ns.value), f"{100 * one.error:+.1f} %")
        for one in held.misses
    ]


def budgets(found: Sequence[Budget]) -> list[Row]:
    """A row an arm; parts of the step."""
    return [
        (
            one.key,
            one.arm,
            *(
                f"{part:.3f}"
                for part in (one.loss, one.host_internal, one.inflation, one.exposed, one.other, one.waiting)
            ),
        )
        for one in found
    ]
