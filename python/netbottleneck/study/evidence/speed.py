"""Steps of the chain that are about time: scaling factors, where a faster link stops helping, stock against others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from netbottleneck.study.evidence import words
from netbottleneck.study.evidence.values import STOCK, ArmFacts, CellFacts
from netbottleneck.units import gbit, percent, streams

# A factor has stopped growing at a link beyond which no faster one makes it larger by more than this.
GROWTH_MIN = 0.03
# A job scales well from here on.
WELL = 0.9

Said = tuple[str, Sequence[str], Sequence[str]]  # verdict, lines, missing
Series = tuple[tuple[float, CellFacts], ...]


def base(cell: CellFacts) -> ArmFacts | None:
    """The arm that a cell is about: stock, else the first that moves bytes."""
    return cell.arms.get(STOCK) or next(iter(cell.transports), None)


def link_bps(cell: CellFacts) -> float | None:
    """The link as it was asked for; without a cap, what many flows reached together."""
    return cell.link_bps or cell.many_flows_bps


def scaling(cells: Sequence[CellFacts]) -> Said:
    """The scaling factor of every arm."""
    rows = [(cell, arm) for cell in cells for arm in cell.transports if arm.scaling is not None]
    if not rows:
        return "Scaling factors were not measured.", (), ("no cell has an arm that moves bytes",)
    lines = [
        f"{cell.key}, {arm.name}: {words.factor(arm.scaling)}, step {words.time(arm.step_ns)} ({words.label(cell)})"
        for cell, arm in rows
        if arm.scaling is not None
    ]
    missing = [f"{key}: T_1 is an estimate, the step less what is exposed" for key in _estimated(cells)]
    return _scaling(cells) or "What stock scales like was not measured.", lines, missing


def _scaling(cells: Sequence[CellFacts]) -> str:
    """Of the arm that each cell is about, the smallest factor and the largest; "" where none is known."""
    of_base = [(one.scaling.value, cell, one.name) for cell in cells if (one := base(cell)) and one.scaling]
    if not of_base:
        return ""
    low, high = min(of_base, key=lambda row: row[0]), max(of_base, key=lambda row: row[0])
    named = words.listed(name for _, _, name in of_base)
    where = f"is {low[0]:.2f} ({low[1].key}"
    if len(of_base) > 1:
        where = f"lies between {low[0]:.2f} ({low[1].key}) and {high[0]:.2f} ({high[1].key}) ({len(of_base)} cells"
    bad = "scales badly" if low[0] < WELL else "scales well"
    label = "estimated" if "estimated" in (words.label(low[1]), words.label(high[1])) else "measured"
    return f"The job {bad}: the scaling factor of {named} {where}; {label})."


def _estimated(cells: Sequence[CellFacts]) -> Iterator[str]:
    return (cell.key for cell in cells if words.label(cell) == "estimated" and cell.transports)


def by_link(cells: Sequence[CellFacts]) -> dict[tuple[str, int, tuple[float, ...]], Series]:
    """The cells of each model, number of ranks and cap of a flow where there are several links, slow ones first."""
    found: dict[tuple[str, int, tuple[float, ...]], dict[float, CellFacts]] = defaultdict(dict)
    for cell in cells:
        bps = link_bps(cell)
        if bps is not None and cell.transports:
            found[cell.model, cell.ranks, cell.flow_bps][bps] = cell
    return {key: tuple(sorted(rows.items())) for key, rows in found.items() if len(rows) > 1}


def factors(series: Series, arm: str) -> list[tuple[float, float]]:
    """An arm's scaling factor by link."""
    return [(bps, one.scaling.value) for bps, cell in series if (one := cell.arms.get(arm)) and one.scaling]


def stops_at(found: Sequence[tuple[float, float]]) -> float | None:
    """The slowest link beyond which the factor grows by no more than GROWTH_MIN; None: it still grows."""
    for place, (bps, value) in enumerate(found[:-1]):
        if max(later for _, later in found[place + 1 :]) <= (1 + GROWTH_MIN) * value:
            return bps
    return None


def bandwidth(cells: Sequence[CellFacts]) -> Said:
    """Where stock's factor stops growing with the link."""
    series = by_link(cells)
    if not series:
        verdict = "Whether a faster link would help was not measured: each job ran on one link speed."
        return verdict, (), ("cells of one model and number of ranks on two link speeds or more",)
    lines, stopped, growing = [], [], []
    for (model, ranks, flow), rows in series.items():
        job = f"{model} on {ranks} ranks" + (f" at {gbit(min(flow))} a flow" if flow else "")
        for arm in dict.fromkeys(arm.name for _, cell in rows for arm in cell.transports):
            found = factors(rows, arm)
            end = stops_at(found)
            where = "still grows" if end is None else f"stops growing at {gbit(end)}"
            lines.append(f"{job}, {arm}: {', '.join(f'{gbit(bps)} {value:.3f}' for bps, value in found)}: {where}")
            if arm == STOCK:
                stopped += [f"at {gbit(end)} for {job}"] if end is not None else []
                growing += [job] if end is None else []
    return _growth(stopped, growing), lines, ()


def _growth(stopped: Sequence[str], growing: Sequence[str]) -> str:
    told = [f"stops growing with the link {words.listed(stopped)}"] if stopped else []
    told += [f"still grows for {words.listed(growing)}"] if growing else []
    verdict = f"Stock's scaling factor {'; it '.join(told) or 'was not measured on two links'}"
    return f"{verdict} (measured; no more than {percent(GROWTH_MIN)} counts as none)."


def transports(cells: Sequence[CellFacts]) -> Said:
    """Stock against many streams, paired by blocks."""
    pairs = [(cell, pair) for cell in cells for pair in cell.pairs if pair.base == STOCK and pair.enough]
    if not pairs:
        return "Stock was compared with no other transport.", (), ("pairs of blocks of stock and another transport",)
    lines = []
    for cell, pair in pairs:
        arm = cell.arms.get(pair.other)
        how = f" over {streams(arm.streams)}" if arm is not None and arm.streams else ""
        ratio = words.factor(pair.ratio)
        lines.append(f"{cell.key}: a step over {pair.other}{how} takes {ratio} of one over stock, {pair.pairs} pairs")
    faster = sum(pair.ratio.high < 1 for _, pair in pairs)
    best_cell, best = min(pairs, key=lambda row: row[1].ratio.value)
    fast, least, most = (1 / part for part in (best.ratio.value, best.ratio.high, best.ratio.low))
    verdict = (
        f"With another transport over the same link the step is surely shorter in {faster} of {len(pairs)} "
        f"comparisons; at best {fast:.2f} times ({least:.2f} to {most:.2f}) as fast as stock ({best.other}, "
        f"{best_cell.key}; measured)."
    )
    return verdict, lines, ()
