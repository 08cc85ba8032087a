"""Checks the claim that the transport, not the link, limits training: prints every cell, then each bar: pass or FAIL.

python benchmarks/claim.py DIR

DIR: folder of a study, made by `netbottleneck study benchmarks/studies/claim.toml --directory DIR`. A model's claim
cell is the one with a null arm. The bound is the what-if engine's at full use of the nominal link, from stock's fit in
the same run. Exit code 0 only if all bars hold: stock's scaling factor does not grow with the link, up to 4 times the
flow's cap or more, and is at most 0.6; the bound is at least 0.8; and ofi and tcp reach at least 0.95 of the bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from netbottleneck.study.evidence import values
from netbottleneck.study.evidence.values import CellFacts
from netbottleneck.trace.transports import NULL

MODELS, OURS = ("resnet50", "vgg16_bn"), ("ofi", "tcp")
STOCK_MOST, BOUND_LEAST, OF_BOUND, LINKS, GROWS = 0.6, 0.8, 0.95, 4.0, 0.02


def factor(cell: CellFacts, arm: str) -> float:
    """Return the measured scaling factor of an arm; 0 if there is none."""
    found = cell.arms.get(arm)
    return found.scaling.value if found is not None and found.scaling is not None else 0.0


def lines(cell: CellFacts) -> list[str]:
    """Return the measured and predicted values of a cell as table rows."""
    rows = []
    for arm in cell.transports:
        if arm.scaling is not None:
            part = "–" if arm.sent_over_model is None else f"{arm.sent_over_model:.4f}"
            step, scaling = arm.step_ns, arm.scaling
            rows.append(
                f"| {cell.model} | {cell.network} | {arm.name} | {step.value / 1e6:.1f} ({step.low / 1e6:.1f} to "
                f"{step.high / 1e6:.1f}) | {scaling.value:.3f} ({scaling.low:.3f} to {scaling.high:.3f}) | {part} |"
            )
    full = cell.outlook.full_use if cell.outlook is not None else None
    if full is not None:
        rows.append(
            f"| {cell.model} | {cell.network} | full use, predicted | – | {full.value:.3f} ({full.low:.3f} to "
            f"{full.high:.3f}) | – |"
        )
    return rows


def judged(name: str, cells: Sequence[CellFacts]) -> list[tuple[bool, str]]:
    """Return each bar of one model: whether it holds, and its text."""
    own = sorted((cell for cell in cells if cell.model == name), key=lambda cell: cell.link_bps or 0)
    claims = [cell for cell in own if NULL in cell.arms]
    if len(claims) != 1:
        return [(False, f"{name}: {len(claims)} cells with a null arm, exactly one is required")]
    claim = claims[0]
    flow = min(claim.flow_bps, default=0.0)
    grown = [(cell.link_bps or 0, factor(cell, "stock")) for cell in own if flow and cell.flow_bps == claim.flow_bps]
    spread = max(rate for _, rate in grown) - min(rate for _, rate in grown)
    reach = max(bps for bps, _ in grown) / flow if flow else 0.0
    stock, full = factor(claim, "stock"), claim.outlook.full_use if claim.outlook is not None else None
    bound = full.value if full is not None else 0.0
    bars = [
        (
            reach >= LINKS and len(grown) > 1 and spread <= GROWS,
            f"{name}: stock from {flow / 1e6:g} Mbit/s to {reach:g} times that: "
            f"{', '.join(f'{rate:.3f}' for _, rate in grown)}",
        ),
        (0 < stock <= STOCK_MOST, f"{name}: stock {stock:.3f} (at most {STOCK_MOST})"),
        (bound >= BOUND_LEAST, f"{name}: full use {bound:.3f}, predicted (at least {BOUND_LEAST})"),
    ]
    for arm in OURS:
        reached = factor(claim, arm)
        part = reached / bound if bound else 0.0
        bars.append((part >= OF_BOUND, f"{name}: {arm} {reached:.3f}, {part:.3f} of the bound (at least {OF_BOUND})"))
    return bars


def main() -> int:
    """Print all cells and bars."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    cells = [values.read(path) for path in sorted(folder.glob("cells/*/facts.json"))]
    print("| model | network | arm | step, ms (95 %) | scaling factor (95 %) | bytes over model |")
    print("| --- | --- | --- | --- | --- | --- |")
    for cell in cells:
        print("\n".join(lines(cell)))
    bars = [bar for name in MODELS for bar in judged(name, cells)]
    for holds, text in bars:
        print(f"{'pass' if holds else 'FAIL'}  {text}")
    return 0 if all(holds for holds, _ in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
