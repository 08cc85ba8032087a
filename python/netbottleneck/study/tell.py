"""What a study says while it runs: a moving line on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from netbottleneck.study.task import Task

Follow = Callable[[Task, int, int, str], None]
PARTS = 4  # of a job, told of where there is no terminal


class Teller:
    """Says lines, and how far what is under way has come."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console.width = 80
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def done(self) -> None:
        """Take the moving line away, if there is one."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    @contextmanager
    def working(self, what: str) -> Generator[Follow]:
        """Show that something is under way; gives what is to be called with (task, step, steps, arm)."""
        if not self.console.is_terminal:
            yield self._plain(what)
            return
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[arm]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
        shown = self._progress.add_task(what, total=None, arm="")
        progress = self._progress

        def follow(task: Task, step: int, steps: int, arm: str) -> None:
            progress.update(
                shown, description=task.title, completed=step, total=steps, arm=f"step {step} of {steps}, {arm}"
            )

        progress.start()
        try:
            yield follow
        finally:
            self.done()

    def _plain(self, what: str) -> Follow:
        self.say(f"{what} ...")
        told: dict[str, int] = {}

        def follow(task: Task, step: int, steps: int, arm: str) -> None:
            part = PARTS * step // max(steps, 1)
            if part > told.get(task.folder, -1):
                told[task.folder] = part
                self.say(f"{task.title} over {', '.join(task.arms)}: step {step} of {steps}")

        return follow
