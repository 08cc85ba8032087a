"""Report of a study: the tasks of a cell, its facts, and the study's result as values, as a table and as study.json."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from netbottleneck.analysis import rule_facts
from netbottleneck.analysis.bandwidth import Achievable
from netbottleneck.analysis.comparisons import Paired
from netbottleneck.analysis.findings import stock_is_as_good
from netbottleneck.analysis.thresholds import GAIN_MIN, PAIRS_MIN
from netbottleneck.report import Run
from netbottleneck.report.compare import FACTS
from netbottleneck.study.cells import (
    FAILED,
    FINE,
    FORECAST,
    INCONCLUSIVE,
    CellResult,
    StudyFolder,
    StudyRequest,
    write_atomically,
)
from netbottleneck.study.evidence import Evidence, facts, incomplete, values
from netbottleneck.study.ranks import Reporter
from netbottleneck.study.replaying import load_trace
from netbottleneck.study.spec import DIGITS, INFLATION, REPLAY, Cell, Model, StudySpec
from netbottleneck.study.task import ACCURACY, PLAY, SAME_STEPS, Task
from netbottleneck.trace.model import decode, encode
from netbottleneck.trace.transports import PSEUDO, STOCK, Arm
from netbottleneck.units import gbit, ms, percent
from netbottleneck.whatif import forecast
from netbottleneck.whatif.plan import Plan, ReplaySchedule, replay_schedule

# Tasks of a cell before its run, and its facts after the run.

RUN, ALONE, TUNED = "run", "stock-alone", "stock-x4"
TUNED_STEPS = 10


def load_schedule(model: Model) -> ReplaySchedule:
    """Return the schedule of a model's replay. Raises OSError, and ValueError for an unusable input."""
    trace = load_trace(model.file, None) if model.file else load_trace(model.name, model.compute_ms)
    return replay_schedule(trace, Plan.ddp(), scale=model.scale, stretch=model.stretch)


def check_replay_files(spec: StudySpec) -> None:
    """Raise ValueError, naming the file, if a file to be replayed is unusable."""
    for model in dict.fromkeys(cell.model for cell in spec.cells if cell.model.file):
        load_schedule(model)


def title(model: Model) -> str:
    """Return a short description of what runs."""
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
    """Return a cell's task. The schedule of a replay is a file in the cell's folder, see `load_schedule`."""
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
        schedule=str(folder / "schedule.json") if cell.job == REPLAY else "",
        notes=notes,
    )


def over_stock_alone(made: Task) -> Task:
    """Return the same training with stock alone, over as many steps as the first run took."""
    return replace(made, arms=(STOCK,), folder=str(Path(made.folder).with_name(ALONE)), alone=0, exact_steps=SAME_STEPS)


def tuned(made: Task) -> Task:
    """Return a task for stock tuned with more connections; it is not paired with the other arms."""
    folder = str(Path(made.folder).with_name(TUNED))
    return replace(made, arms=(STOCK,), folder=folder, alone=0, exact_steps=TUNED_STEPS)


class CellRecorder:
    """Forecasts before a cell's run and facts after it."""

    def __init__(self, folder: StudyFolder, fit_key: str) -> None:
        self._folder = folder
        self._fit_key = fit_key
        self._fitted: Run | None = None

    def write_forecast(self, cell: Cell, what: ReplaySchedule, network: Mapping[str, Any] | None) -> str:
        """Write a cell's forecast before its run; returns the reason if there is none, else ""."""
        if cell.key == self._fit_key:
            return ""
        if cell.ranks_per_host > 1:
            return "no forecast: the cost of communication inside a host is not known"
        if not self._folder.done(self._fit_key):
            return f"no forecast: the cell to fit to ({self._fit_key or 'none'}) is not complete"
        try:
            if self._fitted is None:
                self._fitted = Run(self._folder.read_result(self._fit_key).outcome.folder)
            wire = forecast.Wire.of_network(network or {})
            fitted = replace(self._fitted.trace, id=self._fit_key)
            made = forecast.make(fitted, what, cell.ranks, wire, cell.arms, cell=cell.key)
        except (ValueError, OSError) as error:
            return f"no forecast: {error}"
        document = {"written_wall_ns": time.time_ns(), **json.loads(encode(made))}
        write_atomically(self._folder.cell_folder(cell.key) / FORECAST, json.dumps(document, indent=1) + "\n")
        return ""

    def write_facts(self, done: CellResult) -> Run:
        """Write a run's report and then, as the last file, the cell's facts."""
        cell, folder = done.cell, self._folder.cell_folder(done.cell.key)
        run = Run(done.outcome.folder)
        if cell.job != INFLATION:  # a report needs steps that train
            run.write_all()
        self._folder.write_result(done)
        about = facts.CellDescription(cell.key, cell.model.label, cell.job, cell.network)
        found = facts.cell_facts(
            run, about, outcome=done.outcome, stock_alone=done.stock_alone, forecast=self._read_forecast(folder)
        )
        values.write(folder / FACTS, found)
        return run

    def _read_forecast(self, folder: Path) -> forecast.Forecast | None:
        path = folder / FORECAST
        if not path.exists():
            return None
        made: forecast.Forecast = decode(forecast.Forecast, json.loads(path.read_text(encoding="utf-8")))
        return made


# Result of a study: reads run folders, writes text.

VERSION = 2
WRITTEN = ("report.html", "figures/", "evidence.json", "study.json")  # in the study's folder; without facts the last
BASE = STOCK
LEGEND = (
    "bare: untouched DDP; single: one rank alone. step: median; in transfer: achieved rate, one way; achievable: by a "
    "probe of the same hosts (streams), or by a faster arm (its name). All measured."
)


@dataclass
class CellReport:
    """One cell with its run, and the run of stock over four interfaces if there is one."""

    done: CellResult
    run: Run
    tuned: Run | None = None

    @property
    def name(self) -> str:
        """The network and the number of ranks."""
        return f"{self.done.cell.network}, {self.done.cell.ranks} ranks"

    def pair(self, transport: str) -> Paired | None:
        """Return the comparison of a transport with stock."""
        return next((p for p in self.run.findings.comparisons if p.other == transport and p.base == BASE), None)

    @property
    def nothing_to_do(self) -> bool:
        """True if other transports were compared with stock, and surely none has a relevant gain."""
        return self.run.findings.base == BASE and stock_is_as_good(self.run.findings)


@dataclass
class Study:
    """The results of a study so far."""

    request: StudyRequest
    started_wall_ns: int = field(default_factory=time.time_ns)
    networks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by text: how, link_bps, flow_bps, verified
    found: list[CellReport] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # cell key to reason
    failure: str | None = None

    def add(self, done: CellResult, run: Run) -> CellReport:
        """Add the results of a cell."""
        found = CellReport(done, run, Run(done.tuned) if done.tuned else None)
        self.found.append(found)
        return found

    def load_complete(self) -> None:
        """Load the results of cells completed earlier; sort all cells in the order of the study.

        A cell whose record cannot be read counts as failed.
        """
        folder, known = self.request.folder, {found.done.cell.key: found for found in self.found}
        for cell in self.request.spec.cells:
            if cell.key not in known and folder.done(cell.key):
                try:
                    known[cell.key] = self._load(cell)
                except (OSError, ValueError) as error:
                    self.failed[cell.key] = str(error)
        self.found = [known[cell.key] for cell in self.request.spec.cells if cell.key in known]

    def _load(self, cell: Cell) -> CellReport:
        done = self.request.folder.read_result(cell.key)
        run = Run(done.outcome.folder)
        network = run.trace.network
        if network is not None and cell.uses_links:
            document = {"how": network.how, "link_bps": network.link_bps, "flow_bps": list(network.flow_bps)}
            self.networks.setdefault(cell.network, document | {"verified": dict(network.verified)})
        return self.add(done, run)

    def write(self) -> None:
        """Write study.json."""
        value = {
            "version": VERSION,
            "title": self.request.spec.title,
            "command": list(self.request.command),
            "started_wall_ns": self.started_wall_ns,
            "failure": self.failure or next(iter(self.failed.values()), None),
            "cells": [cell.key for cell in self.request.spec.cells],
            "failed": self.failed,
            "networks": self.networks,
            "jobs": [self._job(found) for found in self.found],
        }
        write_atomically(self.request.folder.path / "study.json", json.dumps(value, indent=1) + "\n")

    def _job(self, cell: CellReport) -> dict[str, Any]:
        done, summary = cell.done, cell.run.summary
        tuned = None if cell.tuned is None else cell.tuned.summary["steps"].get(BASE)
        keys = ["model", "steps", "hosts"]
        if done.cell.job != INFLATION:
            keys += ["sentence", "verdict", "comparisons", "handicap", "gain_withheld", "scaling", "bandwidth", "probe"]
        return {
            "key": done.cell.key,
            "network": done.cell.network,
            "ranks": done.cell.ranks,
            "job": done.cell.job,
            "folder": str(cell.run.path.relative_to(self.request.folder.path)),
            "seconds": done.seconds,
            "outcome": done.outcome.as_dict(),
            "weights_equal_to_stock_alone": done.same_as_stock,
            "stock_four_interfaces": tuned,
            "nothing_to_do": done.cell.job != INFLATION and cell.nothing_to_do,
            **{key: summary[key] for key in keys},
        }

    @property
    def code(self) -> int:
        """The exit code. Differing weights and failed cells are failures."""
        outcomes = [found.done for found in self.found]
        if self.failed or any(done.outcome.equal is False or done.same_as_stock is False for done in outcomes):
            return FAILED
        judged = [found for found in self.found if found.done.cell.job != INFLATION]
        unsure = any(found.run.verdict.code == "INCONCLUSIVE" for found in judged)
        return INCONCLUSIVE if self.request.strict and unsure else FINE


def measured_line(network: str, seen: dict[str, Any]) -> str:
    """Return a sentence on a network's measured rates; `seen`: the result of Lab.verify."""
    one, many = seen["one_flow"], seen["many_flows"]
    found = f"one flow {gbit(one['measured_bps'])}, {many['flows']} flows {gbit(many['measured_bps'])} of payload"
    caps = "" if seen["ok"] else " (NOT the requested rates: see study.json)"
    return f"{network}: measured in {seen['how']}: {found}{caps}."


def result_lines(cell: CellReport) -> list[str]:
    """Return the short result of one job on one network."""
    if cell.done.cell.job == INFLATION:
        return [f"{cell.done.outcome.steps} steps of forward and backward passes, {', '.join(cell.done.cell.arms)}"]
    outcome, findings = cell.done.outcome, cell.run.findings
    lines = []
    if outcome.accuracy is not None:
        reached = "" if outcome.accuracy >= ACCURACY else f", below the target of {percent(ACCURACY)}"
        lines.append(f"accuracy {outcome.accuracy:.3f} on held-out data after {outcome.steps} steps{reached}")
    what = "sums" if cell.done.cell.job == REPLAY else "weights"
    equal = {
        None: f"{what} not compared: no arm reduces them",
        True: f"{what} equal on all ranks, bit for bit",
        False: f"{what.upper()} DIFFER BETWEEN RANKS",
    }[outcome.equal]
    same = {None: "", True: ", and equal to a run over stock alone", False: "; NOT EQUAL TO A RUN OVER STOCK ALONE"}
    lines.append(equal + same[cell.done.same_as_stock])
    withheld = rule_facts.handicap_sentence(findings)
    lines += [withheld.rstrip(".")] if withheld else [_speedup(pair) for pair in findings.comparisons]
    if cell.nothing_to_do:
        lines.append("on this network: do nothing; stock is as good")
    return lines


def _speedup(pair: Paired) -> str:
    low, high = pair.ratio.low, pair.ratio.high
    times = f"{1 / pair.ratio.value:.2f} times as fast"
    doubt = ""
    if not pair.enough:
        doubt = f"; a claim needs {PAIRS_MIN} pairs"
    elif low <= 1 <= high and pair.gain.high >= GAIN_MIN:
        doubt = "; inconclusive, run more --rounds"
    if pair.enough:
        times += f" ({1 / high:.2f} to {1 / low:.2f})"
    return f"{pair.other}: the step is {times} as over {pair.base}, {pair.pairs} pairs of blocks (measured{doubt})"


def table(study: Study) -> Iterable[Table]:
    """Yield one table per model: the networks, and the transports of each."""
    judged = [found for found in study.found if found.done.cell.job != INFLATION]
    for label in dict.fromkeys(found.done.cell.model.label for found in judged):
        rows = [found for found in judged if found.done.cell.model.label == label]
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=rows[0].run.trace.model, title_justify="left")
        made.add_column("", no_wrap=True)
        for column in ("step", "difference to stock (95 %)", "in transfer", "achievable"):
            made.add_column(column, justify="right", overflow="fold")
        for found in rows:
            made.add_row(Text(found.name, style="bold"))
            for line in _rows(found):
                made.add_row(*line)
        yield made


def _rows(cell: CellReport) -> Iterable[tuple[str, ...]]:
    findings = cell.run.findings
    achievable = findings.achievable
    for name, taken in findings.times.items():
        achieved = findings.achieved.get(name)
        moved = gbit(achieved.active_bps) if achieved else ""
        reach = _reach(achievable) if achievable and achieved else ""
        yield f"  {name}", ms(taken.median_ns), _difference(cell, name), moved, reach
        tuned = cell.tuned.findings if cell.tuned is not None and name == BASE else None
        if tuned is not None and BASE in tuned.times:
            moved = gbit(tuned.achieved[BASE].active_bps) if BASE in tuned.achieved else ""
            yield "  stock x4", ms(tuned.times[BASE].median_ns), "separate run, not paired", moved, reach


def _reach(achievable: Achievable) -> str:
    """The achievable rate with the probe's streams, or with the arm that was faster."""
    return f"{gbit(achievable.bps)} ({achievable.faster[0] if achievable.faster else achievable.best[0]})"


def _difference(cell: CellReport, transport: Arm) -> str:
    if transport in PSEUDO:
        return ""
    pair = cell.pair(transport)
    if pair is None:
        return ""
    if cell.run.findings.handicapped:
        return "withheld"
    ns = pair.difference_ns
    between = f" ({ns.low / 1e6:+.0f} to {ns.high / 1e6:+.0f})" if pair.enough else ""
    return f"{ns.value / 1e6:+.0f} ms{between}"


def show(study: Study, console: Console) -> None:
    """Print the result of the whole study."""
    for made in table(study):
        console.print(made)
    if any(found.tuned is not None for found in study.found):
        console.print("stock x4: GLOO_SOCKET_IFNAME with the interface four times.", highlight=False)
    console.print(LEGEND, highlight=False)
    console.print()
    for found in study.found:
        if found.done.cell.job == INFLATION:
            continue
        verdict = found.run.verdict
        keep = " On this network: do nothing." if found.nothing_to_do else ""
        head = f"{found.done.cell.key}: {verdict.code}.{keep}"
        console.print(head, style="bold", highlight=False, markup=False)
        console.print(f"  {verdict.why}\n  Next: {verdict.next}", highlight=False, markup=False)


def finish(study: Study, reporter: Reporter) -> int:
    """Print and write what a study found; returns the exit code."""
    study.load_complete()
    study.write()
    if study.found:
        show(study, reporter.console)
        write_evidence(study).show(reporter.console)
    for key, why in study.failed.items():
        sys.stderr.write(f"netbottleneck study: {key} failed: {why.splitlines()[0]}\n")
    folder = study.request.folder.path
    first, *others = [name for name in WRITTEN if (folder / name).exists()]
    reports = "; a report in each cell's run/" if any(one.done.cell.job != INFLATION for one in study.found) else ""
    reporter.message(f"Written: {', '.join([str(folder / first), *others])}{reports}.")
    return study.code


def write_evidence(study: Study) -> Evidence:
    """Write the evidence, from the cells' facts alone: evidence.json, figures, report.html."""
    spec, folder = study.request.spec, study.request.folder
    facts = [values.read(folder.cell_folder(cell.key) / FACTS) for cell in spec.cells if folder.done(cell.key)]
    models = dict.fromkeys(cell.model for cell in spec.cells if (cell.model.scale, cell.model.stretch) != (1, 1))
    less = [f"{model.label}: {model.scale:g} x its bytes, {model.stretch:g} x its times" for model in models]
    whys = ((network["how"], network["verified"].get("why")) for network in study.networks.values())
    unlike = dict.fromkeys(f"{how}: {why}" for how, why in whys if why)
    left = [incomplete(cell.key) for cell in spec.cells if not folder.done(cell.key)]
    found = Evidence(facts, spec.title, (*study.request.notes, *unlike, *dict.fromkeys(less), *left))
    found.write(folder.path)
    return found
