"""Runs a study's cells one after another, wherever that is; what is done already stays, what fails is told."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, Protocol

from netbottleneck.lab import LabError
from netbottleneck.study import playing, report, spec, work
from netbottleneck.study.asked import Asked
from netbottleneck.study.cells import Done
from netbottleneck.study.progress import Progress
from netbottleneck.study.ranks import Follow, JobError
from netbottleneck.study.report import Study
from netbottleneck.study.spec import Cell
from netbottleneck.study.tables import REPLAY
from netbottleneck.study.task import Outcome, Task
from netbottleneck.study.tell import Teller

VERIFY_S = 0.5


class Ground(Protocol):
    """Ranks on a network, for the cells that share it."""

    how: str  # the network is there
    why: str  # not in a better way
    interface: str  # of each host; "": it is not to be named several times

    def verify(self, seconds: float) -> dict[str, Any] | None:
        """Measure what is in force, as Lab.verify; None where nothing is capped and nobody can tell."""

    def run(self, tasks: Sequence[Task], follow: Follow, extra: Mapping[str, str]) -> list[Outcome]:
        """Run tasks one after another on all ranks. Raises JobError."""


Opened = Callable[[Cell], AbstractContextManager[Ground]]


def run(asked: Asked, opened: Opened, words: str, cells: Sequence[Cell]) -> int:
    """Run those of the cells that are not done, tell what was found, and return the exit code.

    opened: makes the ground of a cell's ranks, for all cells that are alike in that (spec.ground). words: what is said
    of it. KeyboardInterrupt goes on to the caller.
    """
    teller = Teller()
    study = Study(asked)
    try:
        asked.folder.claim(asked.text)
        teller.say(words)
        _Cells(study, teller, opened, cells).run()
    except KeyboardInterrupt:
        teller.done()
        study.failure = "interrupted"
        study.write()
        teller.say(f"interrupted; it goes on with: netbottleneck study --directory {asked.folder.path}")
        raise
    return report.finish(study, teller)


class _Cells:
    """The cells of one study on their way."""

    def __init__(self, study: Study, teller: Teller, opened: Opened, cells: Sequence[Cell]) -> None:
        self._study = study
        self._asked = study.asked
        self._teller = teller
        self._opened = opened
        self._beside = work.Beside(study.asked.folder, study.asked.spec.fit_key)
        self._progress = Progress(cells, study.asked.folder, teller)

    def run(self) -> None:
        """Run all that are left, network by network; one that fails is told, and the others run."""
        left = self._progress.begin()
        for (ranks, together, network), cells in groupby(left, key=spec.ground):
            waiting = list(cells)
            name = f"{network}, {ranks} ranks" + (f", {together} on a host" if together > 1 else "")
            try:
                with self._opened(waiting[0]) as ground:
                    self._on(ground, name, waiting)
            except LabError as error:
                for cell in waiting:
                    self._failed(cell, str(error))

    def _on(self, ground: Ground, name: str, waiting: list[Cell]) -> None:
        with self._teller.working(f"{name}: measuring what is in force"):
            seen = ground.verify(VERIFY_S)
        if seen is not None:
            self._teller.say(report.measured_line(name, seen))
        if ground.why:
            self._teller.say(f"{ground.how}: {ground.why}.")
        link = waiting[0].link
        caps = {"link_bps": link.link_bps, "flow_bps": list(link.flow_bps)}
        network = {"how": ground.how, **caps, "verified": seen or {}}
        if waiting[0].link == spec.caps(waiting[0].network):  # else nothing leaves a host
            self._study.networks[waiting[0].network] = network
        while waiting:
            cell = waiting.pop(0)
            self._progress.next(cell)
            began = time.monotonic()
            try:
                self._cell(ground, cell, network)
            except (JobError, ValueError, OSError) as error:
                self._failed(cell, str(error))
            else:
                self._progress.finished(cell, time.monotonic() - began)

    def _cell(self, ground: Ground, cell: Cell, network: Mapping[str, Any]) -> None:
        began = time.monotonic()
        place = self._asked.folder.fresh(cell.key)
        first = work.task(cell, place, network, self._asked.spec.provider, self._asked.notes)
        if cell.job == REPLAY:
            what = work.played(cell.model)
            playing.write(place / "score.json", what)
            if why := self._beside.foretell(cell, what, network):
                self._teller.say(f"{cell.key}: {why}")
        outcomes = self._followed(ground, [first, *([work.over_stock_alone(first)] if cell.same else [])])
        more = self._tuned(ground, cell, first)
        again = outcomes[1] if cell.same else None
        done = Done(cell, outcomes[0], again, more, time.monotonic() - began)
        run = self._beside.conclude(done)
        for line in report.answer(self._study.add(done, run)):
            self._teller.say(f"{cell.key}: {line}.")
        self._study.write()

    def _tuned(self, ground: Ground, cell: Cell, first: Task) -> str:
        """Run stock with the interface named four times, where flows are capped; returns its folder."""
        if not cell.tuned or not ground.interface:
            return ""
        names = {"GLOO_SOCKET_IFNAME": ",".join([ground.interface] * 4)}
        (outcome,) = self._followed(ground, [work.tuned(first)], names)
        return outcome.folder

    def _followed(self, ground: Ground, tasks: Sequence[Task], extra: Mapping[str, str] | None = None) -> list[Outcome]:
        with self._teller.working("starting the ranks") as follow:
            return ground.run(tasks, follow, extra or {})

    def _failed(self, cell: Cell, why: str) -> None:
        self._teller.done()
        self._study.failed[cell.key] = why
        self._study.write()
        sys.stderr.write(f"netbottleneck study: {cell.key}: {why}\n")
        sys.stderr.flush()
