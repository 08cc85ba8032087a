"""Plots of a run, of what-if answers and of a benchmark, for notebooks; they need matplotlib (netbottleneck[plot])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from netbottleneck.report import html
from netbottleneck.report.html import KINDS, lengths
from netbottleneck.report.text import link_text, no_split
from netbottleneck.trace.transports import TRANSPORT_COLOURS
from netbottleneck.units import gbit, ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from netbottleneck.report import Run
    from netbottleneck.whatif.questions import Answer

__all__ = ["answers", "bandwidth", "bench_curve", "layers", "split", "transports"]

# Distinct in print and for colour-blind readers; a colour has the same meaning in every plot.
COLOURS: Mapping[str, str] = {
    "compute": "#4c9f70",
    "hidden": "#2f7f9e",
    "exposed": "#cc4b37",
    "wait": "#d9a441",
    "other": "#9a9a9a",
}
RATES = "Achieved against achievable"


class Bench(Protocol):
    """The part of netbottleneck.bench's result that is drawn."""

    rows: Sequence[Mapping[str, Any]]

    @property
    def probe(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """By transport: (streams, bits a second one way)."""


def _axes(width: float, height: float) -> Axes:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'netbottleneck[plot]'") from error
    axes: Axes = plt.subplots(figsize=(width, height), layout="constrained")[1]
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _without(title: str, missing: str) -> Axes:
    """Axes that have the reason why there is nothing to draw."""
    axes = _axes(8, 1.2)
    axes.set_axis_off()
    axes.set_title(title, loc="left")
    axes.text(0, 0.5, missing, transform=axes.transAxes, verticalalignment="center", wrap=True)
    return axes


def _colour(transport: str) -> str:
    return TRANSPORT_COLOURS.get(transport, "#7b6fa6")


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], labels: Sequence[str]) -> None:
    """Horizontal bars, the first on top, each labelled with its value."""
    bars = axes.barh(names, values, color=[_colour(name) for name in names], height=0.6)
    axes.bar_label(bars, labels=list(labels), padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values, default=0) * 1.2 or 1)


def _levels(axes: Axes, achieved: Mapping[str, float], what: str) -> None:
    """A dashed line for each transport's achieved bandwidth."""
    for name, rate in achieved.items():
        axes.axhline(rate / 1e9, color=_colour(name), linestyle="--", label=f"{name} achieved {gbit(rate)} {what}")


def _curve(axes: Axes, name: str, points: Sequence[tuple[int, float]]) -> None:
    """Achievable bandwidth by number of network streams."""
    counts = [count for count, _ in points]
    axes.plot(counts, [rate / 1e9 for _, rate in points], "o-", color=_colour(name), label=f"{name}, probe")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("network streams")


def _finish_levels(axes: Axes, title: str) -> Axes:
    axes.set_ylim(0, axes.get_ylim()[1] * 1.04)
    axes.set_ylabel("Gbit/s, one way")
    axes.xaxis.set_visible(bool(axes.get_xlabel()))  # without a probe, nothing depends on the number of streams
    axes.set_title(title, loc="left")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes


def bench_curve(results: Bench) -> Axes:
    """Draw each transport's best busbw at the largest size and its probe's rate by number of streams."""
    if not results.rows and not results.probe:
        return _without(RATES, "No all-reduce was timed, so no rate is known.")
    axes = _axes(8, 3.6)
    largest = max((row["bytes"] for row in results.rows), default=0)
    for name, points in results.probe.items():
        _curve(axes, name, points)
    achieved: dict[str, float] = {}  # of several numbers of streams, the best
    for row in results.rows:
        if row["bytes"] == largest:
            name = str(row["transport"])
            achieved[name] = max(achieved.get(name, 0.0), 8 * row["busbw_bytes_per_s"])
    _levels(axes, achieved, f"at {largest / 1e6:g} MB")
    return _finish_levels(axes, f"{RATES} (measured)")


def split(run: Run) -> Axes:
    """Draw the parts of a step: one bar for each transport with known parts."""
    parts, title = run.findings.parts, "Parts of a step"
    if not parts:
        return _without(title, html.split(run.findings).missing)
    axes = _axes(8, 1.2 + 0.55 * len(parts))
    for kind, what in KINDS:
        left = [sum(_before(lengths(p), kind)) / 1e6 for p in parts.values()]
        axes.barh(
            list(parts), [lengths(p)[kind] / 1e6 for p in parts.values()], left=left, color=COLOURS[kind], label=what
        )
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"{title} ({run.findings.label})", loc="left")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes


def _before(values: Mapping[str, float], kind: str) -> list[float]:
    names = [name for name, _ in KINDS]
    return [values[name] for name in names[: names.index(kind)]]


def layers(run: Run, most: int = 12) -> Axes:
    """Draw the layers that cost the most exposed communication, with their backward times."""
    findings = run.findings
    if findings.base is None:
        return _without("Layers", no_split(findings))
    title = f"Layers under {findings.base}"
    if not findings.layers:
        return _without(title, html.layers(findings).missing)
    found = sorted(findings.layers, key=lambda layer: -layer.exposed_ns)[:most]
    names = [layer.name for layer in found]
    axes = _axes(8, 1.2 + 0.34 * len(found))
    places = range(len(found))
    axes.barh(
        [place - 0.2 for place in places],
        [layer.exposed_ns / 1e6 for layer in found],
        0.4,
        color=COLOURS["exposed"],
        label="exposed, attributed by bytes",
    )
    axes.barh(
        [place + 0.2 for place in places],
        [layer.backward_ns / 1e6 for layer in found],
        0.4,
        color=COLOURS["compute"],
        label="backward",
    )
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.set_title(f"{title} ({findings.label})", loc="left")
    axes.legend(frameon=False)
    return axes


def transports(run: Run) -> Axes:
    """Draw the median step of each transport, or its mean step as the report does."""
    times, title = run.findings.times, "Mean step" if run.findings.mixed else "Step, median"
    if not times:
        return _without(title, html.distribution(run.findings).missing)
    axes = _axes(7, 1.0 + 0.45 * len(times))
    steps = [run.findings.typical_ns(time) for time in times.values()]
    _bars(axes, list(times), [ns / 1e6 for ns in steps], [ms(ns) for ns in steps])
    axes.set_xlabel("ms")
    axes.set_title(f"{title} ({run.findings.label})", loc="left")
    return axes


def bandwidth(run: Run) -> Axes:
    """Draw each transport's achieved bandwidth in transfer, the probe of the same hosts, and the link."""
    findings = run.findings
    if not findings.achieved and not findings.achievable:
        return _without(RATES, html.bandwidth(findings).missing)
    axes = _axes(8, 3.6)
    if findings.achievable:
        _curve(axes, findings.achievable.transport, findings.achievable.points)
    _levels(axes, {name: achieved.active_bps for name, achieved in findings.achieved.items()}, "in transfer")
    full = findings.full_link_bps
    if full:
        axes.axhline(full / 1e9, color="#9a9a9a", linewidth=1, label=link_text(findings))
    return _finish_levels(axes, f"{RATES} ({findings.label})")


def answers(found: Sequence[Answer]) -> Axes:
    """Draw the step of each what-if answer, with its interval; refused questions are left out."""
    from netbottleneck.report.what_if import least_certain  # needs the C module

    title = "Step, with the interval of the fit"
    known = [one for one in found if one.step_s is not None]
    if not known:
        return _without(title, f"Refused: {found[0].refused}." if found else "No question was asked.")
    axes = _axes(8, 1.0 + 0.45 * len(known))
    steps = [one.step_s for one in known if one.step_s is not None]
    below, above = ([1e3 * (s.value - s.low) for s in steps], [1e3 * (s.high - s.value) for s in steps])
    lengths_ms = [1e3 * step.value for step in steps]
    names = [one.setting.title for one in known]
    bars = axes.barh(names, lengths_ms, color=COLOURS["hidden"], height=0.6, xerr=[below, above], capsize=3)
    axes.bar_label(bars, labels=[ms(1e9 * step.value) for step in steps], padding=6)
    axes.invert_yaxis()
    axes.set_xlim(0, max(lengths_ms, default=0) * 1.2 or 1)
    axes.set_xlabel("ms a step")
    axes.set_title(f"{title} ({least_certain(known)})", loc="left")
    return axes
