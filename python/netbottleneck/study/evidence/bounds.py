"""Steps of the chain that are predicted: the step at full use of the link, and the compression that would be needed."""

from __future__ import annotations

from collections.abc import Sequence

from netbottleneck.analysis.stats import Estimate
from netbottleneck.study.evidence import words
from netbottleneck.study.evidence.hosts import full_use_ns
from netbottleneck.study.evidence.values import STOCK, CellFacts, Outlook
from netbottleneck.units import gbit, nbytes, percent

Said = tuple[str, Sequence[str], Sequence[str]]  # verdict, lines, missing
FULL_USE = "full_use"
SHORTER = "the measured step is shorter than its bound"


def bound(cell: CellFacts) -> tuple[Estimate, str] | None:
    """The scaling factor at full use of a cell's link, and where it comes from; None where nothing tells."""
    told = cell.forecast.get(FULL_USE)
    if told is not None and told.scaling is not None:
        return told.scaling, "predicted before the run"
    own = cell.outlook.full_use if cell.outlook is not None else None
    return None if own is None else (own, "predicted from the run itself")


def shares(cell: CellFacts) -> dict[str, float]:
    """By arm: the part of the bound that was reached, as steps: at full use over measured."""
    full = full_use_ns(cell)
    return {} if full is None else {arm.name: full / arm.step_ns.value for arm in cell.transports}


def full_use(cells: Sequence[CellFacts]) -> Said:
    """The bound at full use beside what each arm reached."""
    lines, missing, best = [], [], []
    for cell in cells:
        found = bound(cell)
        if found is None:
            if cell.transports:
                missing.append(f"{cell.key}: the link's speed is not known, or no cost could be fitted")
            continue
        reached = shares(cell)
        told = [
            f"{arm.name} {words.factor(arm.scaling)}, {percent(reached[arm.name])} of it (measured)"
            for arm in cell.transports
            if arm.scaling is not None and arm.name in reached
        ]
        lines.append(f"{cell.key}: at full use {words.factor(found[0])} ({found[1]}); {'; '.join(told)}")
        best += [(reached[arm.name], cell, arm.name) for arm in cell.transports if arm.name in reached]
    if not best:
        return "What full use of the links would give is not known.", lines, missing or ("links with a known speed",)
    above = [f"{cell.key}, {arm}: {SHORTER}{_why_shorter(cell)}" for part, cell, arm in best if part > 1]
    return _reached(best), [*lines, *above], missing


def _reached(parts: Sequence[tuple[float, CellFacts, str]]) -> str:
    """The least and the most of the bound that arms reached, stock's least where there is stock."""
    of_stock = [row for row in parts if row[2] == STOCK]
    least, most = min(of_stock or parts, key=lambda row: row[0]), max(parts, key=lambda row: row[0])
    why = _why_shorter(most[1]) if most[0] > 1 else ""
    said = (
        f"{least[2]} reaches as little as {percent(least[0])} of what full use of the link would give "
        f"({least[1].key}); {most[2]} reaches {percent(most[0])} of it ({most[1].key}; measured over predicted)."
    )
    return f"{said} There {SHORTER}{why}." if why else said


def _why_shorter(cell: CellFacts) -> str:
    """A run over stock, which the bound is fitted to, has one ring of all ranks; a link's rate knows no pauses."""
    if cell.ranks_per_host > 1:
        return ", which is of one ring of all ranks: two levels send less from host to host"
    if cell.link_burst_bytes is None:
        return ""
    burst, whole = nbytes(cell.link_burst_bytes), nbytes(cell.tensor_bytes)
    return f", which is of the link's rate alone: its cap lets {burst} through at once after a pause, of {whole} a step"


def _needed(one: Outlook, ratio: Estimate | None, why: str, how: str) -> str:
    if ratio is None:
        return f"no compression is enough {how}: {why}"
    if ratio.high <= 1:
        return f"none is needed {how}"
    return f"{ratio.value:.1f}x ({ratio.low:.1f} to {ratio.high:.1f}) is needed {how}"


def compression(cells: Sequence[CellFacts]) -> Said:
    """The least compression for a scaling factor of 0.9, and the link beyond which a faster one buys nothing."""
    rows = [(cell, cell.outlook) for cell in cells if cell.outlook is not None]
    if not rows:
        return "The compression that is needed is not known.", (), ("a run that a cost can be fitted to",)
    lines = []
    for cell, one in rows:
        told = [_needed(one, one.ratio, one.ratio_why, f"as {one.transport} used the link")]
        if one.at_full_use is not None:
            told.append(_needed(one, one.full_use_ratio, one.full_use_ratio_why, "over the link fully used"))
        if one.enough_bps is not None:
            told.append(f"a link faster than {gbit(one.enough_bps.value)}, fully used, buys nothing")
        lines.append(f"{cell.key}, for {one.target:g}: {'; '.join(told)} (predicted, codec at no cost)")
    known = [(one.full_use_ratio.value, cell) for cell, one in rows if one.full_use_ratio is not None]
    used = [(one.ratio.value, cell) for cell, one in rows if one.ratio is not None]
    target = f"a scaling factor of {rows[0][1].target:g}"
    if known:
        most = max(known, key=lambda row: row[0])
        verdict = f"With the link fully used, at most {most[0]:.1f}x compression is needed for {target} ({most[1].key})"
        if used:
            worst = max(used, key=lambda row: row[0])
            verdict += f"; as it was used, up to {worst[0]:.1f}x ({worst[1].key})"
        return f"{verdict}; predicted.", lines, ()
    if used:
        worst = max(used, key=lambda row: row[0])
        return f"As the links were used, {target} needs up to {worst[0]:.1f}x ({worst[1].key}; predicted).", lines, ()
    return f"No compression gives {target} (predicted).", lines, ()
