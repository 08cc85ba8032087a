"""Progress of a study: messages on a terminal or as plain lines, the number of the running cell, the time left."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from netbottleneck.study.cells import StudyFolder
from netbottleneck.study.spec import REPLAY, Cell
from netbottleneck.study.task import Task

# Progress messages: a progress bar on a terminal, plain lines elsewhere.

TaskProgress = Callable[[Task, int, int, str], None]
PARTS = 4  # progress lines per job without a terminal


class Reporter:
    """Prints messages and the progress of running work."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console.width = 80
        self._progress: Bar | None = None

    def message(self, text: str) -> None:
        """Print a paragraph."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def done(self) -> None:
        """Remove the progress bar, if there is one."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @contextmanager
    def progress(self, what: str) -> Generator[TaskProgress]:
        """Show that work is in progress; yields a callback for (task, step, steps, arm)."""
        if not self.console.is_terminal:
            yield self._plain(what)
            return
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[arm]}"))
        self._progress = Bar(*columns, TimeElapsedColumn(), console=self.console, transient=True)
        shown = self._progress.add_task(what, total=None, arm="")
        progress = self._progress

        def on_progress(task: Task, step: int, steps: int, arm: str) -> None:
            progress.update(
                shown, description=task.title, completed=step, total=steps, arm=f"step {step} of {steps}, {arm}"
            )

        progress.start()
        try:
            yield on_progress
        finally:
            self.done()

    def _plain(self, what: str) -> TaskProgress:
        self.message(f"{what} ...")
        reported: dict[str, int] = {}

        def on_progress(task: Task, step: int, steps: int, arm: str) -> None:
            part = PARTS * step // max(steps, 1)
            if part > reported.get(task.folder, -1):
                reported[task.folder] = part
                self.message(f"{task.title} over {', '.join(task.arms)}: step {step} of {steps}")

        return on_progress


# Progress: the number of the running cell, and the time left, estimated from completed cells.

START_S = 6.0  # start of a cell's ranks
COMPUTED_S = 0.03  # a step with real compute: a guess, corrected by completed cells


def guess_s(cell: Cell) -> float:
    """Return a first guess of a cell's duration in seconds."""
    model = cell.model
    step = sum(model.compute_ms) / 1e3 * model.stretch if cell.job == REPLAY and not model.file else COMPUTED_S
    return START_S + cell.steps * step * (2 if cell.same else 1)


class Progress:
    """Counts a study's cells and estimates the time left."""

    def __init__(self, cells: Sequence[Cell], folder: StudyFolder, reporter: Reporter) -> None:
        self._cells = cells
        self._left = [cell for cell in cells if not folder.done(cell.key)]
        self._reporter = reporter
        self._number = len(cells) - len(self._left)
        self._guessed_s = self._took_s = 0.0

    def begin(self) -> tuple[Cell, ...]:
        """Report the number of completed cells; returns the others."""
        if self._number:
            self._reporter.message(f"{self._number} of {len(self._cells)} cells are already complete.")
        return tuple(self._left)

    def next(self, cell: Cell) -> None:
        """Report that a cell begins."""
        self._number += 1
        about = ""
        if self._guessed_s:
            seconds = sum(map(guess_s, self._left)) * self._took_s / self._guessed_s
            about = f"; about {seconds / 60:.0f} min left" if seconds >= 90 else f"; about {seconds:.0f} s left"
        self._left.remove(cell)
        self._reporter.message(f"Cell {self._number} of {len(self._cells)}: {cell.key}{about}")

    def finished(self, cell: Cell, seconds: float) -> None:
        """Record a cell's duration."""
        self._guessed_s += guess_s(cell)
        self._took_s += seconds
