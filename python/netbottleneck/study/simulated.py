"""Ranks of a study on hosts and links that are made here: in a lab."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from netbottleneck.lab import Lab
from netbottleneck.study import runner
from netbottleneck.study.asked import OWN, Asked
from netbottleneck.study.ranks import Follow, run_in_lab
from netbottleneck.study.spec import Cell
from netbottleneck.study.task import Outcome, Task

MADE = "The links of this study are made here, on this machine, and capped as named."


def run(asked: Asked) -> int:
    """Run a study in labs; returns the exit code."""
    return runner.run(asked, _opened, f"{MADE} {OWN}", asked.spec.cells)


@contextmanager
def _opened(cell: Cell) -> Generator[_InLab]:
    with Lab(cell.ranks // cell.ranks_per_host, cell.link, cell.ranks_per_host) as lab:
        yield _InLab(lab)


class _InLab:
    """The ranks of one lab: processes of their own for each task."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.how, self.why, self.interface = lab.how, lab.why, lab.interface

    def verify(self, seconds: float) -> dict[str, Any]:
        """As Lab.verify."""
        return self._lab.verify(seconds)

    def run(self, tasks: Sequence[Task], follow: Follow, extra: Mapping[str, str]) -> list[Outcome]:
        """Start the ranks, and follow them to their end."""
        # A replay's meeting place is a folder: a launcher's variables would lead to torch's store.
        meet = {"NETBOTTLENECK_RENDEZVOUS": f"{tasks[0].folder}.meeting"} if tasks[0].score else {}
        return run_in_lab(self._lab, tasks, follow, env={**meet, **extra})
