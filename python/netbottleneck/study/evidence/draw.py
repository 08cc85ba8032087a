"""Figures as SVG, the same bytes for the same values. Needs matplotlib: `pip install 'netbottleneck[plot]'`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from netbottleneck.report.plots import TRANSPORT_COLOURS
from netbottleneck.study.evidence.figures import AVERAGE, FULL_USE, PREDICTED, Figure, Panel, to_csv
from netbottleneck.study.evidence.published import EXACT, PUBLISHED, Point, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

MARKERS = "osD^vP*X"
# Of series that are no arm: distinct in print and for colour-blind readers.
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
        told = {"Date": None, "Creator": None, "Title": one.title, "Description": to_csv(one)}
        figure(one).savefig(out, format="svg", metadata=told)
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


def _places(panel: Panel) -> list[str]:
    """Where bars stand, by name."""
    return list(dict.fromkeys(str(point.x) for one in panel.series for point in one.points))


def _rotated(panel: Panel) -> bool:
    return panel.bars and sum(map(len, _places(panel))) > LETTERS_MAX


def _styles(series: Sequence[Series]) -> list[tuple[str, str]]:
    """(colour, marker) of each: an arm's own colour, and a marker for what stands before the colon."""
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


def _spread(points: Sequence[Point]) -> tuple[list[float], list[float]]:
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
            yerr=_spread(one.points),
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
    """A series with what its numbers are; of published ones, how they were read."""
    labels = list(dict.fromkeys(point.label for point in one.points))
    if labels != [PUBLISHED]:
        return f"{one.name} ({', '.join(labels)})"
    if one.points[0].source == EXACT:
        return f"{one.name} ({EXACT})"
    errors = sorted({round(point.high - point.value, 3) for point in one.points})
    figure = one.points[0].source.partition(",")[0]
    return f"{one.name} ({figure}, ± {' to '.join(f'{error:g}' for error in dict.fromkeys((errors[0], errors[-1])))})"


def _bars(axes: Axes, panel: Panel) -> None:
    places = _places(panel)
    width = 0.8 / len(panel.series)
    for number, (one, (colour, _)) in enumerate(zip(panel.series, _styles(panel.series), strict=True)):
        axes.bar(
            [places.index(str(point.x)) + (number + 0.5) * width - 0.4 for point in one.points],
            [point.value for point in one.points],
            width,
            yerr=_spread(one.points),
            color=colour,
            ecolor="#333333",
            capsize=2,
            label=_named(one),
        )
    turned = _rotated(panel)
    axes.set_xticks(range(len(places)), places, rotation=30 if turned else 0, ha="right" if turned else "center")
