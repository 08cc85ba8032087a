"""The chain of claims in a terminal: a sentence a step, then what each cell came to."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from netbottleneck.report.terminal import WIDTH
from netbottleneck.study.evidence import tables

if TYPE_CHECKING:
    from netbottleneck.study.evidence import Evidence

WIDTHS = (9, 26, 26, 10, 8)  # of the columns of a cell's rows
MISSING_MAX = 3  # of what was not measured, named at one step


def render(found: Evidence, console: Console) -> None:
    """Print it."""
    if found.title:
        console.print(Text(found.title, style="bold"))
        console.print()
    for number, step in enumerate(found.steps, 1):
        console.print(Text(f"{number}. {step.title} ", style="bold").append(step.verdict, style="not bold"))
        for words in _missing(step.missing):
            console.print(Text(f"   Not measured: {words}.", style="yellow"))
    rows = tables.cells(found.cells)
    if rows:
        console.print()
        console.print(Text(_columns(tables.CELLS[1:]), style="bold"))
        for row, before in zip(rows, [("",), *rows], strict=False):
            if row[0] != before[0]:
                console.print(Text(row[0], style="bold"))
            console.print(Text(_columns(row[1:])))
        console.print(Text(f"{tables.CELL_KEY}."))
    for note in found.notes:
        console.print(Text(note))


def _columns(row: Sequence[str]) -> str:
    return f"  {row[0]:<{WIDTHS[0] - 2}}" + "".join(
        f"{word:>{width}}" for word, width in zip(row[1:], WIDTHS[1:], strict=True)
    )


def _missing(words: Sequence[str]) -> list[str]:
    left = len(words) - MISSING_MAX
    return [*words[:MISSING_MAX], *([f"and {left} more"] if left > 0 else [])]


def text(found: Evidence) -> str:
    """Return it plain, no trailing blanks."""
    buffer = io.StringIO()
    plain = {"color_system": None, "force_terminal": False, "force_jupyter": False, "legacy_windows": False}
    render(found, Console(file=buffer, width=WIDTH, **plain))  # type: ignore[arg-type]
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def show(found: Evidence, console: Console | None = None) -> None:
    """Print to the terminal, at most WIDTH columns."""
    screen = console or Console(force_jupyter=False)
    screen.width = min(screen.width, WIDTH) if screen.is_terminal else WIDTH
    render(found, screen)
