"""The chain of claims, one step after another: what this study bears out, with its numbers. Pure: facts in, words out.

Every number is labelled: measured, estimated (no step of one rank was measured), or predicted. What was not measured
is said, and nothing is put in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from netbottleneck.study.evidence import bounds, compute, hosts, prediction, speed, words
from netbottleneck.study.evidence.budget import budgets
from netbottleneck.study.evidence.values import INFLATION, CellFacts, apart
from netbottleneck.units import percent


@dataclass(frozen=True, slots=True)
class Step:
    """One claim. verdict: a sentence; lines: its numbers, cell by cell; missing: what was not measured."""

    name: str
    title: str
    verdict: str
    lines: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


Said = tuple[str, Sequence[str], Sequence[str]]  # verdict, lines, missing


def _forecasts(cells: Sequence[CellFacts]) -> Said:
    held = prediction.record(cells)
    refused = [f"{key}, {arm}: refused: {why}" for key, arm, why in held.refused]
    if not held.misses:
        return "Prediction error: nothing was forecast before it ran.", (), refused or ("no cell has a forecast",)
    count, worst = len(held.misses), held.worst
    verdict = (
        f"Of {count} steps that were predicted before they ran, the median error is {percent(held.median)}, the worst "
        f"{percent(abs(worst.error))} ({worst.key}, {worst.arm}); {held.within(prediction.GOOD)} are within "
        f"{percent(prediction.GOOD)}, {held.within(prediction.FAIR)} within {percent(prediction.FAIR)}; in "
        f"{held.exposed} at least {percent(prediction.EXPOSED_MIN)} of the step is exposed communication."
    )
    lines = [
        f"{miss.key}, {miss.arm}: predicted {words.time(miss.predicted_ns)}, measured {words.time(miss.measured_ns)}: "
        f"{100 * miss.error:+.1f} %"
        for miss in held.misses
    ]
    return verdict, lines, refused


def _losses(cells: Sequence[CellFacts]) -> Said:
    found = budgets(cells)
    if not found:
        return "The loss budget is not known: no step could be split.", (), ("no arm with parts and a scaling factor",)
    first = max((one for one in found if one.arm == "stock"), default=found[0], key=lambda one: one.loss)
    names = ("exposed", "inflation", "host_internal", "other")
    named = {"exposed": "exposed network communication", "host_internal": "inside hosts"}
    largest = max(names, key=lambda name: getattr(first, name))
    verdict = (
        f"The largest loss of {first.arm} is {percent(first.loss)} of the step ({first.key}); most of it, "
        f"{percent(getattr(first, largest))}, is {named.get(largest, largest)} (measured)."
    )
    lines = [
        f"{one.key}, {one.arm}: 1 - scaling factor {one.loss:.3f} = host-internal {one.host_internal:.3f} + inflation "
        f"{one.inflation:.3f} + exposed network {one.exposed:.3f} + other {one.other:.3f} (of it waiting "
        f"{one.waiting:.3f})"
        for one in found
    ]
    return verdict, lines, tuple(dict.fromkeys(note for one in found for note in one.notes))


CLAIMS: tuple[tuple[str, str, Callable[[Sequence[CellFacts]], Said]], ...] = (
    ("scaling", "How does it scale?", speed.scaling),
    ("compute", "Is it compute?", compute.inflation),
    ("harm", "Is the model harmed?", compute.harm),
    ("bandwidth", "Would a faster link help?", speed.bandwidth),
    ("nic", "How is the link used?", hosts.interfaces),
    ("cpu", "Is it the processors?", hosts.processors),
    ("transports", "Would another transport help?", speed.transports),
    ("full use", "What would full use of the link give?", bounds.full_use),
    ("compression", "How much compression is needed?", bounds.compression),
    ("prediction", "How good are the predictions?", _forecasts),
    ("budget", "Where does the loss go?", _losses),
)


def chain(cells: Sequence[CellFacts]) -> tuple[Step, ...]:
    """Every step, in the order of the argument, also those of which nothing was measured."""
    found = []
    cells = apart(cells)
    trained = [cell for cell in cells if cell.job != INFLATION]
    for name, title, tell in CLAIMS:
        verdict, lines, missing = tell(cells if tell == compute.inflation else trained)
        found.append(Step(name, title, verdict, tuple(lines), tuple(missing)))
    return tuple(found)
