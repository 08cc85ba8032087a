"""Runner of a study's cells, one after another: skips completed cells, reports progress and failures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from typing import Any, Protocol

from netbottleneck.lab import Lab, LabError, LinkSpec
from netbottleneck.study import report, spec, task
from netbottleneck.study.cells import OWN_NETWORK, CellResult, StudyFolder, StudyRequest
from netbottleneck.study.ranks import JobError, Reporter, TaskProgress, described_network, run_in_lab
from netbottleneck.study.report import Study
from netbottleneck.study.spec import REPLAY, Cell
from netbottleneck.study.task import Outcome, Task

# Runner of cells.

VERIFY_S = 0.5


class RankGroup(Protocol):
    """Ranks on a network, shared by the cells of one lab."""

    how: str  # the kind of network
    why: str  # the reasons why it is not a better kind, "" for none
    caps: Sequence[LinkSpec]  # that exist, by link of a host
    interface: str  # of each host; "": stock cannot name it several times

    def verify(self, seconds: float) -> dict[str, Any] | None:
        """Measure the actual rates, as Lab.verify; None if there are no caps and the measurement failed."""

    def run(self, tasks: Sequence[Task], on_progress: TaskProgress, extra: Mapping[str, str]) -> list[Outcome]:
        """Run tasks one after another on all ranks. Raises JobError."""


OpenRanks = Callable[[Cell], AbstractContextManager[RankGroup]]


def run(request: StudyRequest, open_ranks: OpenRanks, introduction: str, cells: Sequence[Cell]) -> int:
    """Run the incomplete cells, report the results, and return the exit code.

    open_ranks: opens the ranks for all cells of one lab (see spec.lab_key). introduction: describes the network.
    KeyboardInterrupt is re-raised. Raises BusyError if another process runs the study in its folder.
    """
    with request.folder.held():
        return _run(request, open_ranks, introduction, cells)


def _run(request: StudyRequest, open_ranks: OpenRanks, introduction: str, cells: Sequence[Cell]) -> int:
    reporter = Reporter()
    study = Study(request)
    try:
        request.folder.create(request.text)
        study.load_complete()  # study.json has the earlier cells even if this start is interrupted
        reporter.message(introduction)
        _CellRunner(study, reporter, open_ranks, cells).run()
    except KeyboardInterrupt:
        reporter.done()
        study.failure = "interrupted"
        study.write()
        reporter.message(f"interrupted; resume with: netbottleneck study --directory {request.folder.path}")
        if study.found:
            report.write_evidence(study)
        raise
    return report.finish(study, reporter)


class _CellRunner:
    """A run over the cells of one study."""

    def __init__(self, study: Study, reporter: Reporter, open_ranks: OpenRanks, cells: Sequence[Cell]) -> None:
        self._study = study
        self._request = study.request
        self._reporter = reporter
        self._open_ranks = open_ranks
        self._recorder = report.CellRecorder(study.request.folder, study.request.spec.fit_key)
        self._progress = Progress(cells, study.request.folder, reporter)

    def run(self) -> None:
        """Run all incomplete cells, lab by lab; a failed cell is reported, and the others still run."""
        left = self._progress.begin()
        for (ranks, together, network), cells in groupby(left, key=spec.lab_key):
            waiting = list(cells)
            name = f"{network}, {ranks} ranks" + (f", {together} per host" if together > 1 else "")
            try:
                with self._open_ranks(waiting[0]) as group:
                    self._run_group(group, name, waiting)
            except LabError as error:
                for cell in waiting:
                    self._report_failure(cell, str(error) or type(error).__name__)
                if not waiting:  # all its cells have run
                    self._reporter.message(f"{name}: {error}.")

    def _run_group(self, group: RankGroup, name: str, waiting: list[Cell]) -> None:
        with self._reporter.progress(f"{name}: measuring the actual rates"):
            seen = group.verify(VERIFY_S)
        if seen is not None:
            self._reporter.message(report.measured_line(name, seen))
        if group.why:
            self._reporter.message(f"{group.how}: {group.why}.")
        network = described_network(group.how, group.caps, seen)
        notes = (*self._request.notes, *([f"{group.how}: {group.why}"] if group.why else []))
        if waiting[0].uses_links:
            self._study.networks[waiting[0].network] = network
        while waiting:
            cell = waiting.pop(0)
            self._progress.next(cell)
            began = time.monotonic()
            try:
                self._cell(group, cell, network, notes)
            except (JobError, ValueError, OSError) as error:
                self._report_failure(cell, str(error) or type(error).__name__)
            except Exception as error:  # of this cell alone: the others run
                self._report_failure(cell, f"{type(error).__name__}: {error}")
            else:
                self._progress.finished(cell, time.monotonic() - began)

    def _cell(self, group: RankGroup, cell: Cell, network: Mapping[str, Any], notes: tuple[str, ...]) -> None:
        began = time.monotonic()
        folder = self._request.folder.new_cell_folder(cell.key)
        first = report.task(cell, folder, network, self._request.spec.provider, notes)
        if cell.job == REPLAY:
            what = report.load_schedule(cell.model)
            task.write_schedule(folder / "schedule.json", what)
            if why := self._recorder.write_forecast(cell, what, network):
                self._reporter.message(f"{cell.key}: {why}")
        outcomes = self._run_tasks(group, [first, *([report.over_stock_alone(first)] if cell.same else [])])
        more = self._tuned(group, cell, first)
        stock_alone = outcomes[1] if cell.same else None
        done = CellResult(cell, outcomes[0], stock_alone, more, time.monotonic() - began)
        run = self._recorder.write_facts(done)
        for line in report.result_lines(self._study.add(done, run)):
            self._reporter.message(f"{cell.key}: {line}.")
        self._study.write()

    def _tuned(self, group: RankGroup, cell: Cell, first: Task) -> str:
        """Run stock with the interface named four times, if flows are capped; returns its folder, "" if not run."""
        if not cell.tuned or not group.interface:
            return ""
        names = {"GLOO_SOCKET_IFNAME": ",".join([group.interface] * 4)}
        (outcome,) = self._run_tasks(group, [report.tuned(first)], names)
        return outcome.folder

    def _run_tasks(
        self, group: RankGroup, tasks: Sequence[Task], extra: Mapping[str, str] | None = None
    ) -> list[Outcome]:
        with self._reporter.progress("starting the ranks") as on_progress:
            return group.run(tasks, on_progress, extra or {})

    def _report_failure(self, cell: Cell, why: str) -> None:
        self._reporter.done()
        self._study.failed[cell.key] = why
        self._study.write()
        sys.stderr.write(f"netbottleneck study: {cell.key}: {why}\n")
        sys.stderr.flush()


# Simulated hosts and links of a study.

SIMULATED_LINKS = "This study simulates its links on this machine, with the caps that the cells name."


def run_simulated(request: StudyRequest) -> int:
    """Run a study in labs; returns the exit code."""
    return run(request, _open_ranks, f"{SIMULATED_LINKS} {OWN_NETWORK}", request.spec.cells)


@contextmanager
def _open_ranks(cell: Cell) -> Generator[_LabRanks]:
    with Lab(cell.ranks // cell.ranks_per_host, cell.link, cell.ranks_per_host) as lab:
        yield _LabRanks(lab)


class _LabRanks:
    """The ranks of one lab; each call of run starts one process per rank."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.how, self.why, self.interface = lab.how, lab.why, lab.interface
        self.caps: Sequence[LinkSpec] = lab.caps

    def verify(self, seconds: float) -> dict[str, Any]:
        """Measure the lab, as Lab.verify."""
        return self._lab.verify(seconds)

    def run(self, tasks: Sequence[Task], on_progress: TaskProgress, extra: Mapping[str, str]) -> list[Outcome]:
        """Start the ranks and follow them until they end."""
        # A replay meets in a folder: a launcher's variables would select torch's store.
        meet = {"NETBOTTLENECK_RENDEZVOUS": f"{tasks[0].folder}.meeting"} if tasks[0].schedule else {}
        return run_in_lab(self._lab, tasks, on_progress, env={**meet, **extra})


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
