"""How far a study has come: which cell of how many, and how long the rest will take, by those that are done."""

from __future__ import annotations

from collections.abc import Sequence

from netbottleneck.study.cells import Folder
from netbottleneck.study.spec import Cell
from netbottleneck.study.tables import REPLAY
from netbottleneck.study.tell import Teller

START_S = 6.0  # of the ranks of a cell
COMPUTED_S = 0.03  # of a step that computes for real: a guess, put right by the cells that are done


def guess_s(cell: Cell) -> float:
    """Return a first guess of what a cell takes."""
    model = cell.model
    step = sum(model.compute_ms) / 1e3 * model.stretch if cell.job == REPLAY and not model.file else COMPUTED_S
    return START_S + cell.steps * step * (2 if cell.same else 1)


class Progress:
    """Counts a study's cells."""

    def __init__(self, cells: Sequence[Cell], folder: Folder, teller: Teller) -> None:
        self._cells = cells
        self._left = [cell for cell in cells if not folder.done(cell.key)]
        self._teller = teller
        self._number = len(cells) - len(self._left)
        self._guessed_s = self._took_s = 0.0

    def begin(self) -> tuple[Cell, ...]:
        """Say how many cells there are; returns those that are left."""
        if self._number:
            self._teller.say(f"{self._number} of {len(self._cells)} cells are done already.")
        return tuple(self._left)

    def next(self, cell: Cell) -> None:
        """Say that a cell begins."""
        self._number += 1
        about = ""
        if self._guessed_s:
            seconds = sum(map(guess_s, self._left)) * self._took_s / self._guessed_s
            about = f"; about {seconds / 60:.0f} min left" if seconds >= 90 else f"; about {seconds:.0f} s left"
        self._left.remove(cell)
        self._teller.say(f"Cell {self._number} of {len(self._cells)}: {cell.key}{about}")

    def finished(self, cell: Cell, seconds: float) -> None:
        """Take note of how long a cell took."""
        self._guessed_s += guess_s(cell)
        self._took_s += seconds
