"""Checks a study's forecasts: prints every cell predicted and measured, then each bar: pass or FAIL.

python benchmarks/prediction.py DIR

DIR: folder of a study, made by `netbottleneck study benchmarks/studies/prediction.toml --directory DIR`. Exit code 0
only if all bars hold: at least 24 forecast steps, 6 of them at 8 ranks; a median error of at most 5 %, the worst 12 %;
at least a fifth of the step exposed in half of them; bytes counted by the interfaces within 1 % of the model's; at most
40 minutes; and each forecast written before its run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from netbottleneck.study.evidence import facts, values
from netbottleneck.study.evidence.facts import EXPOSED_MIN, FAIR, GOOD, ForecastRecord
from netbottleneck.study.evidence.values import CellFacts

HEAD = (
    *("model", "ranks", "network", "arm", "measured, ms", "95 %"),
    *("predicted, ms", "interval", "error", "exposed", "bytes", "streams"),
)
CELLS, MANY_RANKS, AT_MANY, BYTES_OFF, LONGEST_S = 24, 8, 6, 0.01, 2400.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: the result as text, and whether the bar holds."""

    text: str
    holds: bool


def read(folder: Path) -> list[CellFacts]:
    """Return the facts of all complete cells. Raises ValueError for a damaged one."""
    return [values.read(path) for path in sorted(folder.glob("cells/*/facts.json"))]


def line(cells: Sequence[CellFacts], miss: facts.ForecastError) -> str:
    """Return a table row with the prediction and the measurement of one arm of one cell."""
    cell = next(cell for cell in cells if cell.key == miss.key)
    arm = cell.arms[miss.arm]
    low, value, high = (ns / 1e6 for ns in (miss.predicted_ns.low, miss.predicted_ns.value, miss.predicted_ns.high))
    shown = [
        f"{cell.model:<9} | {cell.ranks} | {cell.network:<15} | {miss.arm:<5} | {miss.measured_ns.value / 1e6:8.1f}",
        f"{miss.measured_ns.low / 1e6:.1f} to {miss.measured_ns.high / 1e6:.1f}",
        f"{value:8.1f} | {low:.1f} to {high:.1f} | {100 * miss.error:+.2f} %",
        "–" if miss.exposed is None else f"{100 * miss.exposed:.0f} %",
        "–" if arm.sent_over_model is None else f"{arm.sent_over_model:.4f}",
        f"{arm.streams or 1}, {', '.join(arm.algorithms)}",
    ]
    return f"| {' | '.join(shown)} |"


def spent_s(folder: Path) -> float:
    """Return the total time of all cells in seconds."""
    return sum(
        float(json.loads(path.read_text(encoding="utf-8"))["seconds"]) for path in folder.glob("cells/*/cell.json")
    )


def before(folder: Path) -> bool:
    """True if each forecast was written before its run began, by the wall clock of one machine."""
    for path in folder.glob("cells/*/forecast.json"):
        forecast = json.loads(path.read_text(encoding="utf-8"))
        run = json.loads((path.parent / "run" / "run.json").read_text(encoding="utf-8"))
        if forecast["written_wall_ns"] >= run["started_wall_ns"]:
            return False
    return True


def bars(folder: Path, cells: Sequence[CellFacts], found: ForecastRecord) -> list[Bar]:
    """Return each bar of this study."""
    ranks = {cell.key: cell.ranks for cell in cells}
    many = sum(ranks[miss.key] == MANY_RANKS for miss in found.forecast_errors)
    ratios = [arm.sent_over_model for cell in cells for arm in cell.transports]
    known = [ratio for ratio in ratios if ratio is not None]
    off = max((abs(ratio - 1) for ratio in known), default=1.0)
    seconds, count, worst = spent_s(folder), len(found.forecast_errors), found.worst
    counted = f"{len(known)} of {len(ratios)} counted"
    return [
        Bar(f"{count} steps forecast (at least {CELLS}), {len(found.refused)} refused", count >= CELLS),
        Bar(f"{many} of them at {MANY_RANKS} ranks (at least {AT_MANY})", many >= AT_MANY),
        Bar(f"median error {100 * found.median:.2f} % (at most {100 * GOOD:g} %)", found.median <= GOOD),
        Bar(
            f"worst error {100 * worst.error:+.2f} %, {worst.key} {worst.arm} (at most {100 * FAIR:g} %)",
            abs(worst.error) <= FAIR,
        ),
        Bar(
            f"{found.exposed} of {count} with {100 * EXPOSED_MIN:g} % of the step exposed (at least half)",
            2 * found.exposed >= count,
        ),
        Bar(
            f"bytes counted by interfaces off by {100 * off:.2f} % at most, {counted} (1 %)",
            off <= BYTES_OFF and len(known) == len(ratios),
        ),
        Bar("each forecast was written before its run began", before(folder)),
        Bar(f"all cells together took {seconds / 60:.1f} minutes (at most {LONGEST_S / 60:g})", seconds <= LONGEST_S),
    ]


def main() -> int:
    """Print all cells and bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    cells = read(folder)
    found = facts.forecast_record(cells)
    if not found.forecast_errors:
        print(f"{folder}: no cell was forecast")
        return 1
    print(f"| {' | '.join(HEAD)} |")
    print(f"|{' --- |' * len(HEAD)}")
    for miss in found.forecast_errors:
        print(line(cells, miss))
    for key, arm, why in found.refused:
        print(f"refused: {key}, {arm}: {why}")
    inside = [
        miss
        for miss in found.forecast_errors
        if miss.predicted_ns.low <= miss.measured_ns.value <= miss.predicted_ns.high
    ]
    print(f"within the fit's interval: {len(inside)} of {len(found.forecast_errors)}")
    judged = bars(folder, cells, found)
    for bar in judged:
        print(f"{'pass' if bar.holds else 'FAIL'}  {bar.text}")
    return 0 if all(bar.holds for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
