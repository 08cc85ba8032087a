"""Steps of the chain that are about the model: how much longer it computes, and whether it learns the same."""

from __future__ import annotations

from collections.abc import Sequence

from netbottleneck.analysis.stats import Paired
from netbottleneck.study.evidence import words
from netbottleneck.study.evidence.values import CellFacts

Said = tuple[str, Sequence[str], Sequence[str]]  # verdict, lines, missing
Row = tuple[CellFacts, Paired]


def _line(cell: CellFacts, what: str, pair: Paired) -> str:
    return f"{cell.key}: {what}: {words.percents(words.over_one(pair.ratio))}, {pair.pairs} pairs of blocks (measured)"


def _most(rows: Sequence[Row], what: str) -> str:
    """The largest of some changes, and whether it is one."""
    change = words.over_one(max((pair.ratio for _, pair in rows), key=lambda one: one.value))
    doubt = ", which may be none" if change.low <= 0 <= change.high else ""
    return f"{what} {words.percents(change)}{doubt}"


def _unknown(hooks: Sequence[Row], beside: Sequence[Row], timed: str) -> list[str]:
    found = [] if hooks else ["the cost of hooks: a cell of the job inflation"]
    if not beside:
        found.append("the cost of traffic to compute: arms null and another, with compute that is real")
    return [*found, *([f"compute is timed, and cannot be slowed, in {timed}"] if timed else [])]


def inflation(cells: Sequence[CellFacts]) -> Said:
    """What hooks cost, and what traffic costs the compute beside it, apart."""
    hooks = [(cell, cell.hooks) for cell in cells if cell.hooks is not None]
    beside = [(cell, pair) for cell in cells if cell.compute == "real" for pair in cell.contention]
    lines = [_line(cell, "hooks alone, null against bare", pair) for cell, pair in hooks]
    lines += [_line(cell, f"traffic of {pair.other}, against null", pair) for cell, pair in beside]
    missing = _unknown(hooks, beside, words.listed(cell.key for cell in cells if cell.compute == "timed"))
    told = [_most(hooks, "hooks alone by")] if hooks else []
    if beside:
        told.append(_most(beside, "traffic beside them by"))
    if not told:
        return "Compute inflation was not measured.", lines, missing
    return f"Forward and backward are changed at most: {'; '.join(told)} (measured).", lines, missing


def _harm(cell: CellFacts) -> str:
    what = "weights" if cell.compute == "real" else "sums"
    told = [f"{what} equal on all ranks, bit for bit" if cell.equal_weights else f"{what.upper()} DIFFER BETWEEN RANKS"]
    if cell.same_as_stock is not None:
        told.append("equal to stock alone" if cell.same_as_stock else "NOT EQUAL TO STOCK ALONE")
    if cell.accuracy is not None:
        alone = cell.accuracy_stock_alone
        told.append(f"accuracy {cell.accuracy:.3f}" + (f", stock alone {alone:.3f}" if alone is not None else ""))
    return f"{cell.key}: {', '.join(told)} (measured)"


def harm(cells: Sequence[CellFacts]) -> Said:
    """Whether all ranks hold the same weights, those of stock alone, and what was learned."""
    known = [cell for cell in cells if cell.equal_weights is not None]
    if not known:
        return "Whether the model is unharmed was not measured.", (), ("no cell tells its weights",)
    lines = [_harm(cell) for cell in known]
    compared = [cell for cell in known if cell.same_as_stock is not None]
    missing = [] if compared else ["a run over stock alone to compare with"]
    bad = words.listed(cell.key for cell in known if not cell.equal_weights or cell.same_as_stock is False)
    if bad:
        return f"The model is harmed: results differ in {bad} (measured).", lines, missing
    verdict = f"No harm: all ranks hold the same, bit for bit, in {len(known)} of {len(known)} cells"
    if compared:
        verdict += f", and what stock alone gives in {len(compared)} of {len(compared)} that were compared"
    return f"{verdict} (measured).", lines, missing
