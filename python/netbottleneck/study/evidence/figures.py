"""The paper's figures 1 to 8, remade from a study's cells: values, and their CSV. Pure.

Each has two panels: this study, and what the paper published, as far as that is known.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from netbottleneck.analysis.stats import Estimate
from netbottleneck.study.evidence import words
from netbottleneck.study.evidence.bounds import bound
from netbottleneck.study.evidence.published import Point, Series, paper
from netbottleneck.study.evidence.speed import link_bps
from netbottleneck.study.evidence.values import INFLATION, ArmFacts, CellFacts, Curve, apart
from netbottleneck.units import gbit

COLUMNS = ("figure", "panel", "series", "x", "unit", "value", "low", "high", "label", "source")
OWN, PAPER = "this study", "the paper"
PREDICTED = "predicted"
AVERAGE, ACTIVE = "average", "active"  # of an interface: over the steps, and while something moves
FULL_USE = "full use"  # what is drawn in the place of an arm where the link is fully used


@dataclass(frozen=True, slots=True)
class Panel:
    """One system of axes. log: of x; bars: in place of lines; note: what to know, or why there is nothing."""

    name: str
    x: str
    unit: str
    series: tuple[Series, ...]
    log: bool = False
    bars: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, by the paper's number."""

    number: int
    title: str
    panels: tuple[Panel, Panel]


def _scaled(one: Estimate, factor: float) -> tuple[float, float, float]:
    return factor * one.value, factor * one.low, factor * one.high


def _percent(x: float | str, one: Estimate, label: str, source: str) -> Point:
    return Point(x, *_scaled(one, 100), label, source)


def _series(rows: Iterable[tuple[str, str, Point]], *, sort: bool = True) -> tuple[Series, ...]:
    """Points by (name, arm), those of each in order of x."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for name, arm, point in rows:
        found[name, arm].append(point)
    return tuple(
        Series(name, arm, tuple(sorted(points, key=_place) if sort else points))
        for (name, arm), points in found.items()
    )


def _place(point: Point) -> float:
    return point.x if isinstance(point.x, float) else 0.0


Name = Callable[[CellFacts, str], str]


def _links(cells: Sequence[CellFacts]) -> Name:
    """How series by link speed are named: a flow's cap stands in the name where one link was capped in several ways."""
    caps: dict[tuple[str, int], dict[float | None, set[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(set))
    for cell in cells:
        caps[cell.model, cell.ranks][link_bps(cell)].add(cell.flow_bps)

    def name(cell: CellFacts, what: str) -> str:
        several = any(len(ways) > 1 for ways in caps[cell.model, cell.ranks].values())
        flow = f", {gbit(min(cell.flow_bps))} a flow" if several and cell.flow_bps else ""
        return f"{cell.model}, {cell.ranks} ranks{flow}: {what}"

    return name


def _of_ranks(cell: CellFacts, what: str) -> str:
    """A series by number of ranks."""
    return f"{cell.model}, {cell.network}: {what}"


def _gbit(cell: CellFacts) -> float | None:
    bps = link_bps(cell)
    return None if bps is None else bps / 1e9


def _factors(
    cells: Sequence[CellFacts], x: Callable[[CellFacts], float | None], name: Name
) -> Iterator[tuple[str, str, Point]]:
    for cell in cells:
        at = x(cell)
        for arm in cell.transports:
            if at is not None and arm.scaling is not None:
                yield name(cell, arm.name), arm.name, _percent(at, arm.scaling, words.label(cell), cell.key)


def _bounds(
    cells: Sequence[CellFacts], x: Callable[[CellFacts], float | None], name: Name
) -> Iterator[tuple[str, str, Point]]:
    for cell in cells:
        at, found = x(cell), bound(cell)
        if at is not None and found is not None:
            yield name(cell, FULL_USE), FULL_USE, _percent(at, found[0], PREDICTED, cell.key)


def _ranks(cell: CellFacts) -> float | None:
    return float(cell.ranks)


def _passes(cells: Sequence[CellFacts]) -> Iterator[tuple[str, str, Point]]:
    """Forward and backward of models that really compute, by arm."""
    for cell in cells:
        if cell.compute != "real":
            continue
        for arm in cell.arms.values():
            if arm.forward_backward_ns is not None:
                point = Point(arm.name, *_scaled(arm.forward_backward_ns, 1e-6), "measured", cell.key)
                yield f"{cell.model} ({cell.job}), {cell.ranks} ranks, {cell.network}", "", point


def _interfaces(cells: Sequence[CellFacts], name: Name) -> Iterator[tuple[str, str, Point]]:
    """What is sent, in parts of the link: average, and while something moves."""
    for cell in cells:
        for arm in cell.transports:
            for what, bps in _rates(arm):
                if bps is not None and cell.link_bps:
                    used = 100 * bps / cell.link_bps
                    point = Point(cell.link_bps / 1e9, used, used, used, "measured", cell.key)
                    yield name(cell, f"{arm.name}, {what}"), arm.name, point


def _rates(arm: ArmFacts) -> tuple[tuple[str, float | None], ...]:
    nic = arm.nic
    return () if nic is None else ((AVERAGE, nic.average_tx_bps), (ACTIVE, nic.active_tx_bps))


def _processors(cells: Sequence[CellFacts]) -> Iterator[tuple[str, str, Point]]:
    for cell in cells:
        for arm in cell.arms.values():
            if arm.cpu is not None:
                busy = 100 * arm.cpu.busy
                yield arm.name, arm.name, Point(cell.key, busy, busy, busy, "measured", cell.key)


def _compressed(cells: Sequence[CellFacts]) -> Iterator[tuple[str, str, Point]]:
    """The slowest and the fastest link of each model's most ranks, fully used; and as the slowest was used."""
    by_model: dict[str, list[CellFacts]] = defaultdict(list)
    for cell in cells:
        if cell.outlook is not None:
            by_model[cell.model].append(cell)
    for own in by_model.values():
        most = max(cell.ranks for cell in own)
        rows = sorted((cell for cell in own if cell.ranks == most), key=lambda cell: link_bps(cell) or 0.0)
        for place, cell in enumerate(rows[:1] + rows[1:][-1:]):
            yield from _curves(cell, used=place == 0)


def _curves(cell: CellFacts, *, used: bool) -> Iterator[tuple[str, str, Point]]:
    assert cell.outlook is not None
    told: list[tuple[str, str, Curve | None]] = [("fully used", FULL_USE, cell.outlook.at_full_use)]
    if used:
        told.append((f"as {cell.outlook.transport} used it", cell.outlook.transport, cell.outlook.as_used))
    for what, arm, curve in told:
        for ratio, factor in () if curve is None else curve.points:
            yield (
                f"{cell.model}, {cell.ranks} ranks, {cell.network}: {what}",
                arm,
                _percent(ratio, factor, PREDICTED, cell.key),
            )


def by_ranks(cells: Sequence[CellFacts]) -> list[CellFacts]:
    """Of each model, the cells of the network that it ran on with most numbers of ranks; of those, the fastest."""
    networks: dict[str, dict[str, list[CellFacts]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell.transports:
            networks[cell.model][cell.network].append(cell)
    found: list[CellFacts] = []
    for own in networks.values():
        widest = max(own.values(), key=_spread)
        found += widest
    return found


def _spread(rows: Sequence[CellFacts]) -> tuple[int, float]:
    return len({cell.ranks for cell in rows}), link_bps(rows[0]) or 0.0


def figures(cells: Sequence[CellFacts]) -> tuple[Figure, ...]:
    """All eight, also those of which nothing was measured."""
    cells = apart(cells)
    trained = [cell for cell in cells if cell.job != INFLATION]
    ranked, named = by_ranks(trained), _links(trained)
    factor = "scaling factor, %"
    made = (
        ("Scaling factor by number of ranks", "ranks", factor, _factors(ranked, _ranks, _of_ranks)),
        ("Forward and backward pass", "arm", "ms", _passes(cells)),
        ("Scaling factor by link speed", "Gbit/s", factor, _factors(trained, _gbit, named)),
        ("Use of the interface, sending, by link speed", "Gbit/s", "% of the link", _interfaces(trained, named)),
        ("Use of the processors", "cell", "% of all cores", _processors(trained)),
        (
            "Measured, and at full use of the link, by link speed",
            "Gbit/s",
            factor,
            (*_factors(trained, _gbit, named), *_bounds(trained, _gbit, named)),
        ),
        (
            "Measured, and at full use of the link, by number of ranks",
            "ranks",
            factor,
            (*_factors(ranked, _ranks, _of_ranks), *_bounds(ranked, _ranks, _of_ranks)),
        ),
        ("Predicted scaling factor by compression", "compression ratio", factor, _compressed(trained)),
    )
    found = []
    for number, (title, x, unit, rows) in enumerate(made, 1):
        bars = number in BARS
        own = Panel(OWN, x, unit, _series(rows, sort=not bars), log=number in LOGS, bars=bars)
        theirs = paper(number)
        published = Panel(PAPER, theirs.x, theirs.unit, theirs.series, log=number in LOGS, bars=bars, note=theirs.note)
        found.append(Figure(number, title, (own, published)))
    return tuple(found)


BARS = (2, 5)
LOGS = (1, 3, 4, 6, 7, 8)


def to_csv(figure: Figure) -> str:
    """One figure's points, a row each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for panel in figure.panels:
        for series in panel.series:
            for point in series.points:
                x = f"{point.x:g}" if isinstance(point.x, float) else point.x
                numbers = [f"{value:.6g}" for value in (point.value, point.low, point.high)]
                writer.writerow(
                    [figure.number, panel.name, series.name, x, panel.unit, *numbers, point.label, point.source]
                )
    return out.getvalue()
