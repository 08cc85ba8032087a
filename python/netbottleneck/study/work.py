"""What a cell of a study asks its ranks to do, and what is made of it: tasks before a run, facts after it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from netbottleneck.bench.replay import Score, score
from netbottleneck.report import Run
from netbottleneck.study.cells import FACTS, FORECAST, Done, Folder, put
from netbottleneck.study.evidence import facts, values
from netbottleneck.study.replaying import source
from netbottleneck.study.spec import Cell, Model, StudySpec
from netbottleneck.study.tables import DIGITS, INFLATION, REPLAY
from netbottleneck.study.task import AS_BEFORE, PLAY, Task
from netbottleneck.trace import json_codec
from netbottleneck.whatif import forecast
from netbottleneck.whatif.plan import Plan

RUN, ALONE, TUNED = "run", "stock-alone", "stock-x4"
TUNED_STEPS = 10


def played(model: Model) -> Score:
    """Return what a model's replay plays. Raises ValueError for what cannot be played, OSError."""
    trace = source(model.file, None) if model.file else source(model.name, model.compute_ms)
    return score(trace, Plan.ddp(), scale=model.scale, stretch=model.stretch)


def readable(spec: StudySpec) -> None:
    """Raise ValueError, naming file and line, where a file that is to be played cannot be."""
    for model in dict.fromkeys(cell.model for cell in spec.cells if cell.model.file):
        played(model)


def title(model: Model) -> str:
    """Say what runs, in a few words."""
    if model.job == INFLATION:
        return f"{model.name}, forward and backward"
    if model.job == DIGITS:
        return "thin ResNet on digits"
    less = [
        f"{factor:g} x its {what}" for factor, what in ((model.scale, "bytes"), (model.stretch, "times")) if factor != 1
    ]
    return ", ".join([f"{model.label}, replayed", *less])


def task(
    cell: Cell, folder: Path, network: Mapping[str, Any] | None, provider: str | None, notes: tuple[str, ...]
) -> Task:
    """Return a cell's job. A replay's score lies beside its run, see `played`."""
    model = cell.model
    return Task(
        PLAY if cell.job == REPLAY else cell.job,
        cell.arms,
        str(folder / RUN),
        block_steps=cell.block_steps,
        rounds=cell.rounds,
        alone=cell.alone,
        compute=model.compute,
        model=title(model) if cell.job == REPLAY else model.name,
        provider=provider,
        network=None if network is None else dict(network),
        score=str(folder / "score.json") if cell.job == REPLAY else "",
        notes=notes,
    )


def over_stock_alone(made: Task) -> Task:
    """The same training over stock, for as many steps as it took before."""
    return replace(
        made, arms=("stock",), folder=str(Path(made.folder).with_name(ALONE)), alone=0, exact_steps=AS_BEFORE
    )


def tuned(made: Task) -> Task:
    """Stock as a user may tune it, over more connections; not paired with the rest."""
    folder = str(Path(made.folder).with_name(TUNED))
    return replace(made, arms=("stock",), folder=folder, alone=0, exact_steps=TUNED_STEPS)


class Beside:
    """What is said of a study's cells beside their runs: before them, and after."""

    def __init__(self, folder: Folder, fit_key: str) -> None:
        self._folder = folder
        self._fit_key = fit_key
        self._fitted: Run | None = None

    def foretell(self, cell: Cell, what: Score, network: Mapping[str, Any] | None) -> str:
        """Write down what a cell will take, before it runs; returns why not, "" where it was done."""
        if cell.key == self._fit_key:
            return ""
        if cell.ranks_per_host > 1:
            return "no forecast: what ranks of one host cost each other is not known"
        if not self._folder.done(self._fit_key):
            return f"no forecast: {self._fit_key or 'a cell'} to be fitted to is not there"
        try:
            if self._fitted is None:
                self._fitted = Run(self._folder.of(self._fit_key) / RUN)
            wire = forecast.Wire.of_network(network or {})
            fitted = replace(self._fitted.trace, id=self._fit_key)
            made = forecast.make(fitted, what, cell.ranks, wire, cell.arms, cell=cell.key)
        except (ValueError, OSError) as error:
            return f"no forecast: {error}"
        told = {"written_wall_ns": time.time_ns(), **json.loads(json_codec.dump(made))}
        put(self._folder.of(cell.key) / FORECAST, json.dumps(told, indent=1) + "\n")
        return ""

    def conclude(self, done: Done) -> Run:
        """Write a run's report and, last of all, a cell's facts."""
        cell, place = done.cell, self._folder.of(done.cell.key)
        run = Run(done.outcome.folder)
        if cell.job != INFLATION:  # a report is of steps that learn
            run.write_all()
        self._folder.tell(done)
        about = facts.About(cell.key, cell.model.label, cell.job, cell.network)
        found = facts.of(run, about, outcome=done.outcome, stock_alone=done.again, forecast=self._foretold(place))
        values.write(place / FACTS, found)
        return run

    def _foretold(self, place: Path) -> forecast.Forecast | None:
        path = place / FORECAST
        if not path.exists():
            return None
        made: forecast.Forecast = json_codec.build(forecast.Forecast, json.loads(path.read_text(encoding="utf-8")))
        return made
