"""Figures 1 to 8 of Zhang et al., from a study's cells and as published: values, CSV and SVG.

Each has two panels: this study, and what the paper published, as far as that is known. Drawing needs matplotlib:
`pip install 'netbottleneck[plot]'`.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from netbottleneck.analysis.comparisons import Estimate
from netbottleneck.study.evidence import values
from netbottleneck.study.evidence.chain import bound, link_bps
from netbottleneck.study.evidence.values import INFLATION, ArmFacts, CellFacts, Curve, with_distinct_models
from netbottleneck.trace.transports import TRANSPORT_COLOURS
from netbottleneck.units import gbit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


# The numbers of Zhang et al. (Is Network the Bottleneck of Distributed Training?, NetAI 2020), by figure. Pure.
#
# Values are read from the paper's figures, each with its reading error, or are the exact output of its simulator. A
# server has 8 GPUs. Links are caps of a 100 Gbit/s interface.

MODELS = ("ResNet50", "ResNet101", "VGG16")
GPUS = (8.0, 16.0, 32.0, 64.0)
LINKS = (1.0, 10.0, 25.0, 40.0, 100.0)
RATIOS = (1.0, 2.0, 5.0, 10.0, 50.0, 100.0)
EXACT = "exact output of its simulator"
PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class Point:
    """One value and its interval. label: measured, predicted, estimated or published; source: the cell or figure."""

    x: float | str
    value: float
    low: float
    high: float
    label: str
    source: str


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line or set of bars. arm: the arm whose colour they have, "" for none."""

    name: str
    arm: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Paper:
    """A figure of the paper. note: a remark, or why there are no values."""

    x: str
    unit: str
    series: tuple[Series, ...]
    note: str = ""


def _read(
    figure: str, name: str, xs: Sequence[float | str], values: Sequence[float | None], off: float | Sequence[float]
) -> Series:
    """Return a series read from a figure; None in `values`: hidden under another marker."""
    offs = off if isinstance(off, Sequence) else [off] * len(xs)
    points = [
        Point(x, value, value - error, value + error, PUBLISHED, f"read from figure {figure}, ± {error:g}")
        for x, value, error in zip(xs, values, offs, strict=True)
        if value is not None
    ]
    return Series(name, "", tuple(points))


def _exact(name: str, xs: Sequence[float], values: Sequence[float]) -> Series:
    return Series(name, "", tuple(Point(x, v, v, v, PUBLISHED, EXACT) for x, v in zip(xs, values, strict=True)))


_FACTORS = ((85.56, 75.07, 74.25, 71.62), (82.74, 68.93, 66.3, 67.02), (88.74, 55.98, 63.04, 59.94))
_PASSES = ((97.54, 109.61, 110.02, 110.18), (159.24, 184.17, 184.17, 185.4), (161.02, 171.33, 175.8, 173.56))
_BY_LINK = MappingProxyType(
    {
        "ResNet50, 2 servers": ((13.2, 68.4, 74.6, 75.0, 75.07), (0.5, 0.5, 0.8, 0.8, 0.2)),
        "ResNet50, 4 servers": ((7.7, 49.8, 73.5, 74.1, 74.25), (1.2, 0.5, 0.5, 0.5, 0.2)),
        "ResNet50, 8 servers": ((7.3, 47.1, 69.0, 71.0, 71.62), (0.5, 0.5, 0.5, 0.5, 0.2)),
    }
)
_RECEIVED = (
    (95.64, 65.71, 33.4, 21.51, 8.78),
    (97.14, 78.38, 50.21, 33.42, 12.35),
    (99.49, 92.56, 81.47, 67.71, 31.69),
)
_SIMULATED_BY_LINK = ((6.60, 49.98, 88.97, 99.68, 99.69), (2.21, 20.13, 43.87, 62.21, 99.35))
_SIMULATED_BY_GPUS = ((99.87, 99.75, 99.46), (99.92, 99.84, 99.69), (99.85, 99.69, 99.35))
_COMPRESSED: Mapping[str, Sequence[float | None]] = MappingProxyType(
    {
        "ResNet50, 10 Gbit/s": (53.9, 81.6, None, None, None, None),
        "ResNet101, 10 Gbit/s": (49.7, 78.4, 98.9, None, None, None),
        "VGG16, 10 Gbit/s": (20.2, 36.6, 72.1, 98.7, 98.7, 98.7),
    }
)
_FACTOR = "scaling factor, %"


def _figure6() -> Paper:
    simulated = [f"{name}, 64 GPUs, simulated" for name in MODELS]
    series = (
        _read("6a", "ResNet50, 64 GPUs, measured", LINKS, (7.3, 47.1, 69.0, 71.1, 71.6), (0.8, 0.5, 0.5, 0.5, 0.5)),
        _read("6a", simulated[0], LINKS, (7.8, 53.9, 90.3, 98.9, 99.0), (0.8, 0.5, 0.8, 0.8, 0.8)),
        *(_exact(name, LINKS, values) for name, values in zip(simulated[1:], _SIMULATED_BY_LINK, strict=True)),
    )
    return Paper("Gbit/s", _FACTOR, series, "The measured values of ResNet101 and VGG16 are not known.")


def _figure8() -> Paper:
    rows = [_read("8a", f"{name}, 64 GPUs", RATIOS, values, 0.6) for name, values in _COMPRESSED.items()]
    rows.append(_read("8b", "all three, 100 Gbit/s, 64 GPUs", RATIOS, (98.7,) * len(RATIOS), 0.8))
    return Paper("compression ratio", _FACTOR, tuple(rows), "Points hidden by markers are left out.")


def paper(number: int) -> Paper:
    """Return a figure by its number, 1 to 8. Raises KeyError for any other number."""
    named = list(zip(MODELS, range(len(MODELS)), strict=True))
    arms = ("1 GPU", "16 GPUs", "32 GPUs", "64 GPUs")
    return {
        1: Paper("GPUs", _FACTOR, tuple(_read("1", name, GPUS, _FACTORS[at], 0.2) for name, at in named)),
        2: Paper("GPUs", "ms", tuple(_read("2", name, arms, _PASSES[at], 0.8) for name, at in named)),
        3: Paper("Gbit/s", _FACTOR, tuple(_read("3", name, LINKS, *row) for name, row in _BY_LINK.items())),
        4: Paper(
            "Gbit/s",
            "% of the link",
            tuple(_read("4a", f"{name}, average, receiving", LINKS, _RECEIVED[at], 0.3) for name, at in named),
            "Averages over whole steps.",
        ),
        5: Paper("", "% of all cores", (), "The text reports low CPU utilisation; no value is known."),
        6: _figure6(),
        7: Paper(
            "GPUs",
            _FACTOR,
            tuple(_exact(f"{name}, 100 Gbit/s, simulated", GPUS[1:], _SIMULATED_BY_GPUS[at]) for name, at in named),
            "The measured values are not known; these are simulated.",
        ),
        8: _figure8(),
    }[number]


# The figures.

COLUMNS = ("figure", "panel", "series", "x", "unit", "value", "low", "high", "label", "source")
OWN, PAPER = "this study", "the paper"
PREDICTED = "predicted"
AVERAGE, ACTIVE = "average", "active"  # rates of an interface: over the steps, and while an operation is in flight
FULL_USE = "full use"  # replaces an arm's name where the link is fully used


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. log: x is logarithmic; bars: bars, not lines; note: a remark, or why there are no values."""

    name: str
    x: str
    unit: str
    series: tuple[Series, ...]
    log: bool = False
    bars: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, with the paper's number."""

    number: int
    title: str
    panels: tuple[Panel, Panel]


def _scaled(one: Estimate, factor: float) -> tuple[float, float, float]:
    return factor * one.value, factor * one.low, factor * one.high


def _percent(x: float | str, one: Estimate, label: str, source: str) -> Point:
    return Point(x, *_scaled(one, 100), label, source)


def _series(rows: Iterable[tuple[str, str, Point]], *, sort: bool = True) -> tuple[Series, ...]:
    """Group points by (name, arm); sort: each group in order of x."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for name, arm, point in rows:
        found[name, arm].append(point)
    return tuple(
        Series(name, arm, tuple(sorted(points, key=_x_position) if sort else points))
        for (name, arm), points in found.items()
    )


def _x_position(point: Point) -> float:
    return point.x if isinstance(point.x, float) else 0.0


Name = Callable[[CellFacts, str], str]


def _links(cells: Sequence[CellFacts]) -> Name:
    """Return the naming of series by link speed.

    A name includes the flow cap where one link was run with several flow caps."""
    caps: dict[tuple[str, int], dict[float | None, set[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(set))
    for cell in cells:
        caps[cell.model, cell.ranks][link_bps(cell)].add(cell.flow_bps)

    def name(cell: CellFacts, what: str) -> str:
        several = any(len(ways) > 1 for ways in caps[cell.model, cell.ranks].values())
        flow = f", {gbit(min(cell.flow_bps))} a flow" if several and cell.flow_bps else ""
        return f"{cell.model}, {cell.ranks} ranks{flow}: {what}"

    return name


def _of_ranks(cell: CellFacts, what: str) -> str:
    """Name a series by number of ranks."""
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
                yield name(cell, arm.name), arm.name, _percent(at, arm.scaling, values.label(cell), cell.key)


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
    """Yield forward and backward by arm, of models with real compute."""
    for cell in cells:
        if cell.compute != "real":
            continue
        for arm in cell.arms.values():
            if arm.forward_backward_ns is not None:
                point = Point(arm.name, *_scaled(arm.forward_backward_ns, 1e-6), "measured", cell.key)
                yield f"{cell.model} ({cell.job}), {cell.ranks} ranks, {cell.network}", "", point


def _interfaces(cells: Sequence[CellFacts], name: Name) -> Iterator[tuple[str, str, Point]]:
    """Yield the sending rate as a part of the link: average, and while an operation is in flight."""
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
    """Yield predictions for the slowest and the fastest link of each model, at its largest number of ranks.

    Both links are fully used; the slowest also as it was used."""
    by_model: dict[str, list[CellFacts]] = defaultdict(list)
    for cell in cells:
        if cell.outlook is not None:
            by_model[cell.model].append(cell)
    for own in by_model.values():
        most = max(cell.ranks for cell in own)
        rows = sorted((cell for cell in own if cell.ranks == most), key=lambda cell: link_bps(cell) or 0.0)
        for number, cell in enumerate(rows[:1] + rows[1:][-1:]):
            yield from _curves(cell, used=number == 0)


def _curves(cell: CellFacts, *, used: bool) -> Iterator[tuple[str, str, Point]]:
    assert cell.outlook is not None
    curves: list[tuple[str, str, Curve | None]] = [("fully used", FULL_USE, cell.outlook.at_full_use)]
    if used:
        curves.append((f"at {cell.outlook.transport}'s achieved rate", cell.outlook.transport, cell.outlook.as_used))
    for what, arm, curve in curves:
        for ratio, factor in () if curve is None else curve.points:
            yield (
                f"{cell.model}, {cell.ranks} ranks, {cell.network}: {what}",
                arm,
                _percent(ratio, factor, PREDICTED, cell.key),
            )


def by_ranks(cells: Sequence[CellFacts]) -> list[CellFacts]:
    """Return, for each model, the cells of the network that it ran on with the most numbers of ranks.

    Of several such networks, the one with the fastest link counts."""
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
    """Return all eight figures, including those without measurements."""
    cells = with_distinct_models(cells)
    trained = [cell for cell in cells if cell.job != INFLATION]
    ranked, named = by_ranks(trained), _links(trained)
    factor = "scaling factor, %"
    made = (
        ("Scaling factor by number of ranks", "ranks", factor, _factors(ranked, _ranks, _of_ranks)),
        ("Forward and backward pass", "arm", "ms", _passes(cells)),
        ("Scaling factor by link speed", "Gbit/s", factor, _factors(trained, _gbit, named)),
        ("Link utilisation, sending, by link speed", "Gbit/s", "% of the link", _interfaces(trained, named)),
        ("CPU utilisation", "cell", "% of all cores", _processors(trained)),
        (
            "Scaling factor measured and at full use of the link, by link speed",
            "Gbit/s",
            factor,
            (*_factors(trained, _gbit, named), *_bounds(trained, _gbit, named)),
        ),
        (
            "Scaling factor measured and at full use of the link, by number of ranks",
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
        published_values = paper(number)
        published = Panel(
            PAPER,
            published_values.x,
            published_values.unit,
            published_values.series,
            log=number in LOGS,
            bars=bars,
            note=published_values.note,
        )
        found.append(Figure(number, title, (own, published)))
    return tuple(found)


BARS = (2, 5)
LOGS = (1, 3, 4, 6, 7, 8)


def to_csv(figure: Figure) -> str:
    """Return one figure's points as CSV, one row per point."""
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


# Figures as SVG, the same bytes for the same values.

MARKERS = "osD^vP*X"
# Colours of series that are not arms: distinct in print and for colour-blind readers.
OTHERS = ("#2f6f5e", "#b5651d", "#5a5f9e", "#8c8c8c", "#a03a6a", "#3f8fb0")
FULL_USE_COLOUR, UNKNOWN_ARM = "#333333", "#7b6fa6"
SETTINGS = {
    "svg.hashsalt": "netbottleneck",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
WIDTH, HEIGHT, LEGEND_LINE, ROTATED = 10.5, 3.6, 0.19, 0.9  # inches
LETTERS_MAX = 60  # of the names of bars, beyond which they are turned


def _matplotlib() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'netbottleneck[plot]'") from error
    return mpl


def figure(one: Figure) -> Canvas:
    """Draw both panels of a figure. Raises ImportError without matplotlib."""
    mpl = _matplotlib()
    from matplotlib.figure import Figure as Canvas

    turned = ROTATED * any(_rotated(panel) for panel in one.panels)
    heights = HEIGHT + turned, LEGEND_LINE * max(1, *(len(panel.series) for panel in one.panels))
    with mpl.rc_context(SETTINGS):
        canvas = Canvas(figsize=(WIDTH, sum(heights)), layout="constrained")
        canvas.suptitle(f"{one.number}. {one.title}", x=0.01, ha="left", weight="bold")
        above, below = canvas.subplots(2, 2, height_ratios=heights)
        for axes, key, panel in zip(above, below, one.panels, strict=True):
            _panel(axes, panel)
            key.set_axis_off()
            key.legend(*axes.get_legend_handles_labels(), loc="upper left", frameon=False, fontsize=8, borderpad=0)
    return canvas


def svg(one: Figure) -> str:
    """A figure as SVG text; its description holds the values."""
    mpl = _matplotlib()
    out = io.StringIO()
    with mpl.rc_context(SETTINGS):
        metadata = {"Date": None, "Creator": None, "Title": one.title, "Description": to_csv(one)}
        figure(one).savefig(out, format="svg", metadata=metadata)
    text = out.getvalue()
    return "\n".join(line.rstrip() for line in text[text.index("<svg") :].splitlines()) + "\n"


def _panel(axes: Axes, panel: Panel) -> None:
    if not panel.series:
        axes.set_title(panel.name, loc="left", fontsize=9)
        axes.text(0.5, 0.5, panel.note or "not measured", ha="center", va="center", wrap=True, transform=axes.transAxes)
        axes.set_axis_off()
        return
    axes.set_title(f"{panel.name}. {panel.note}" if panel.note else panel.name, loc="left", fontsize=9)
    draw = _bars if panel.bars else _lines
    draw(axes, panel)
    axes.set_ylim(0, 1.06 * max(point.high for one in panel.series for point in one.points))
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.unit)


def _bar_names(panel: Panel) -> list[str]:
    """Names of the bars, in order."""
    return list(dict.fromkeys(str(point.x) for one in panel.series for point in one.points))


def _rotated(panel: Panel) -> bool:
    return panel.bars and sum(map(len, _bar_names(panel))) > LETTERS_MAX


def _styles(series: Sequence[Series]) -> list[tuple[str, str]]:
    """(colour, marker) of each series: its arm's colour, and a marker for the part of its name before the colon."""
    groups: dict[str, str] = {}
    markers, others = cycle(MARKERS), cycle(OTHERS)
    found = []
    for one in series:
        colour = TRANSPORT_COLOURS.get(one.arm, UNKNOWN_ARM) if one.arm else next(others)
        group = one.name.partition(":")[0]
        if group not in groups:
            groups[group] = next(markers)
        found.append((FULL_USE_COLOUR if one.arm == FULL_USE else colour, groups[group]))
    return found


def _bars_of_error(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [max(0.0, p.value - p.low) for p in points], [max(0.0, p.high - p.value) for p in points]


def _line(one: Series) -> str:
    if any(point.label == PREDICTED for point in one.points) or one.name.endswith("simulated"):
        return "--"
    return ":" if one.name.endswith(AVERAGE) else "-"


def _lines(axes: Axes, panel: Panel) -> None:
    for one, (colour, marker) in zip(panel.series, _styles(panel.series), strict=True):
        axes.errorbar(
            [float(point.x) for point in one.points],
            [point.value for point in one.points],
            yerr=_bars_of_error(one.points),
            color=colour,
            marker=marker,
            markersize=4.5,
            linewidth=1.3,
            capsize=2,
            linestyle=_line(one),
            label=_named(one),
        )
    places = sorted({float(point.x) for one in panel.series for point in one.points})
    if panel.log:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(places, [f"{x:.3g}" for x in places])


def _named(one: Series) -> str:
    """Name of a series with the label of its numbers; for published ones, how they were read."""
    labels = list(dict.fromkeys(point.label for point in one.points))
    if labels != [PUBLISHED]:
        return f"{one.name} ({', '.join(labels)})"
    if one.points[0].source == EXACT:
        return f"{one.name} ({EXACT})"
    errors = sorted({round(point.high - point.value, 3) for point in one.points})
    figure = one.points[0].source.partition(",")[0]
    return f"{one.name} ({figure}, ± {' to '.join(f'{error:g}' for error in dict.fromkeys((errors[0], errors[-1])))})"


def _bars(axes: Axes, panel: Panel) -> None:
    places = _bar_names(panel)
    width = 0.8 / len(panel.series)
    for number, (one, (colour, _)) in enumerate(zip(panel.series, _styles(panel.series), strict=True)):
        axes.bar(
            [places.index(str(point.x)) + (number + 0.5) * width - 0.4 for point in one.points],
            [point.value for point in one.points],
            width,
            yerr=_bars_of_error(one.points),
            color=colour,
            ecolor="#333333",
            capsize=2,
            label=_named(one),
        )
    turned = _rotated(panel)
    axes.set_xticks(range(len(places)), places, rotation=30 if turned else 0, ha="right" if turned else "center")
