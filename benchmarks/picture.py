"""Plots of the JSON files of transport.py and `netbottleneck bench --json`. Needs matplotlib.

python benchmarks/picture.py RESULTS.json PICTURE.svg: gates against their bars, or bandwidth by size.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from table import path_name

from netbottleneck.trace.transports import TRANSPORT_COLOURS

VERDICTS = {"pass": "#4c9f70", "fail": "#cc4b37", "undecided": "#d9a441", "not run": "#9a9a9a"}
OURS = {"tcp": 3.0, "ofi": 3.0, "tcp-heap": 2.0, "ofi-heap": 2.0}
LIMITS = ("memcpy", "add", "pair")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw a document of transport.py or of the benchmark to a file; its suffix selects the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "netbottleneck"
    import matplotlib.pyplot as plt

    figure = _gates(plt, found["gates"]) if "gates" in found else _bandwidth(plt, found["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _gates(plt: Any, gates: Mapping[str, list[Mapping[str, Any]]]) -> Any:
    """Draw each figure over its bar, with its interval; the bar is the line at 1."""
    rows = [(name, each) for name, figures in gates.items() for each in figures]
    figure, axes = plt.subplots(figsize=(11, 1.5 + 0.28 * max(len(rows), 1)), layout="constrained")
    for index, (_, each) in enumerate(rows):
        colour = VERDICTS[each["verdict"]]
        if each["value"] is None:
            axes.text(1.0, index, " not run", va="center", color=colour)
            continue
        low, high = each["interval_95"]
        bar = each["bar"]
        axes.plot([low / bar, high / bar], [index, index], color=colour, linewidth=2.5)
        axes.plot(each["value"] / bar, index, "o", color=colour)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{name}  {each['name']}" for name, each in rows], fontsize=7)
    axes.set_xscale("log")
    ticks = (0.25, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0, 8.0)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("value / bar, 95 % interval")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _bandwidth(plt: Any, rows: list[Mapping[str, Any]]) -> Any:
    """Draw bus bandwidth by size, one line per path; limits are dotted; of iperf3, only the best."""
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        name, size = path_name(row), int(row["bytes"])
        name = "iperf3, best" if name.startswith("iperf3") else name
        if size and name not in LIMITS:
            lines[name][size] = max(lines[name].get(size, 0.0), 8e-9 * row["busbw_bytes_per_s"])
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for name, points in lines.items():
        sizes = sorted(points)
        style = ":" if name.startswith("iperf3") else "-"
        colour = TRANSPORT_COLOURS.get(name)
        values = [points[size] for size in sizes]
        axes.plot(sizes, values, f"o{style}", color=colour, linewidth=OURS.get(name, 1.2), label=name)
    axes.set_xscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth, Gbit/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> int:
    if len(sys.argv) != 3:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
