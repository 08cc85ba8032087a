"""Predicted cells in a terminal: scaling factors by link, or everything where there is one link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from netbottleneck.report.terminal import WIDTH, make_table, put_row
from netbottleneck.units import gbit, ms
from netbottleneck.whatif.compat2020 import Prediction

LINKS_MAX = 5


def _percent(part: float) -> str:
    """0.99465: "99.5 %": cells are compared with each other."""
    return f"{100 * part:.1f} %"


def _matrix(rows: Sequence[Prediction], links: Sequence[float]) -> Table:
    table = make_table("workers", "ratio", *(f"{bps / 1e9:g} Gbit/s" for bps in links))
    cells = {(row.workers, row.compression, row.link_bps): _percent(row.scaling_factor) for row in rows}
    for workers, ratio in dict.fromkeys((row.workers, row.compression) for row in rows):
        put_row(table, f"{workers}", f"{ratio:g}x", *(cells.get((workers, ratio, bps), "") for bps in links))
    return table


def _list(rows: Sequence[Prediction]) -> Table:
    table = make_table("workers", "compression", "overhead", "step", "scaling factor", "buckets")
    for row in rows:
        overhead, step = ms(row.overhead_s * 1e9), ms(row.step_s * 1e9)
        cells = (
            f"{row.workers}",
            f"{row.compression:g}x",
            overhead,
            step,
            _percent(row.scaling_factor),
            f"{row.buckets}",
        )
        put_row(table, *cells)
    return table


def tables(rows: Sequence[Prediction]) -> Iterator[tuple[str, Table]]:
    """Each with its title; as many as the links need."""
    links = sorted({row.link_bps for row in rows})
    if len(links) == 1:
        yield f"{rows[0].model} at {gbit(links[0])}", _list(rows)
        return
    for at in range(0, len(links), LINKS_MAX):
        yield (
            f"{rows[0].model}: scaling factor by workers, compression ratio and link",
            _matrix(rows, links[at : at + LINKS_MAX]),
        )


def show(rows: Sequence[Prediction], how: str, console: Console | None = None) -> None:
    """Print rows of one model to the terminal; how: by whose rules."""
    screen = console or Console(force_jupyter=False)
    screen.width = min(screen.width, WIDTH) if screen.is_terminal else WIDTH
    for title, table in tables(rows):
        screen.print(f"{title} (predicted: {how})", style="bold", highlight=False, markup=False)
        screen.print(table)
