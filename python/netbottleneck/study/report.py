"""What a study found, as values, as a table and as study.json: run folders in, words out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from netbottleneck.analysis import verdict as rules
from netbottleneck.analysis.stats import Paired
from netbottleneck.report import Run
from netbottleneck.study import work
from netbottleneck.study.asked import FAILED, FINE, INCONCLUSIVE, Asked
from netbottleneck.study.cells import FACTS, Done, put
from netbottleneck.study.evidence import Evidence, values
from netbottleneck.study.tables import INFLATION, REPLAY
from netbottleneck.study.task import ACCURACY
from netbottleneck.study.tell import Teller
from netbottleneck.trace.model import PSEUDO
from netbottleneck.units import gbit, ms, percent

VERSION = 2
BASE = "stock"
LEGEND = (
    "bare: DDP untouched; single: one rank alone. step: median; moved at: in transfer, one way; achievable: by a probe "
    "of the same hosts (streams). All measured."
)


@dataclass
class Found:
    """One cell, its run, and where it was made the run over stock with four interfaces."""

    done: Done
    run: Run
    tuned: Run | None = None

    @property
    def name(self) -> str:
        """The network and the ranks, in words."""
        return f"{self.done.cell.network}, {self.done.cell.ranks} ranks"

    def pair(self, transport: str) -> Paired | None:
        """Return the comparison of a transport with stock."""
        return next((p for p in self.run.findings.comparisons if p.other == transport and p.base == BASE), None)

    @property
    def nothing_to_do(self) -> bool:
        """Whether other transports were tried in pairs enough, and none gains as much as would count."""
        tried = [pair for pair in self.run.findings.comparisons if pair.enough and pair.base == BASE]
        return bool(tried) and all(pair.gain.value < rules.GAIN_MIN for pair in tried)


@dataclass
class Study:
    """All that a study has come to so far."""

    asked: Asked
    started_wall_ns: int = field(default_factory=time.time_ns)
    networks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by text: how, link_bps, flow_bps, verified
    found: list[Found] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # by key of the cell: why
    failure: str | None = None

    def add(self, done: Done, run: Run) -> Found:
        """Take what came of a cell."""
        found = Found(done, run, Run(done.tuned) if done.tuned else None)
        self.found.append(found)
        return found

    def recall(self) -> None:
        """Take what came of the cells that were done before, in the order of the study."""
        folder, known = self.asked.folder, {found.done.cell.key: found for found in self.found}
        for cell in self.asked.spec.cells:
            if cell.key not in known and folder.done(cell.key):
                run = Run(folder.of(cell.key) / work.RUN)
                known[cell.key] = self.add(folder.told(cell.key), run)
                network = run.trace.network
                if network is not None:
                    told = {"how": network.how, "link_bps": network.link_bps, "flow_bps": list(network.flow_bps)}
                    self.networks.setdefault(cell.network, told | {"verified": dict(network.verified)})
        self.found = [known[cell.key] for cell in self.asked.spec.cells if cell.key in known]

    def write(self) -> None:
        """Write study.json."""
        value = {
            "version": VERSION,
            "title": self.asked.spec.title,
            "command": list(self.asked.words),
            "started_wall_ns": self.started_wall_ns,
            "failure": self.failure or next(iter(self.failed.values()), None),
            "cells": [cell.key for cell in self.asked.spec.cells],
            "failed": self.failed,
            "networks": self.networks,
            "jobs": [self._job(found) for found in self.found],
        }
        put(self.asked.folder.path / "study.json", json.dumps(value, indent=1) + "\n")

    def _job(self, found: Found) -> dict[str, Any]:
        done, summary = found.done, found.run.summary
        tuned = None if found.tuned is None else found.tuned.summary["steps"].get(BASE)
        kept = ["model", "steps", "hosts"]
        if done.cell.job != INFLATION:
            kept += ["sentence", "verdict", "comparisons", "handicap", "gain_withheld", "scaling", "bandwidth", "probe"]
        return {
            "key": done.cell.key,
            "network": done.cell.network,
            "ranks": done.cell.ranks,
            "job": done.cell.job,
            "folder": str(found.run.path.relative_to(self.asked.folder.path)),
            "seconds": done.seconds,
            "outcome": done.outcome.as_dict(),
            "weights_equal_to_stock_alone": done.same_as_stock,
            "stock_four_interfaces": tuned,
            "nothing_to_do": done.cell.job != INFLATION and found.nothing_to_do,
            **{key: summary[key] for key in kept},
        }

    @property
    def code(self) -> int:
        """The exit code: weights that differ are a failure, as is a cell that failed."""
        outcomes = [found.done for found in self.found]
        if self.failed or any(not done.outcome.equal or done.same_as_stock is False for done in outcomes):
            return FAILED
        judged = [found for found in self.found if found.done.cell.job != INFLATION]
        unsure = any(found.run.verdict.code == "INCONCLUSIVE" for found in judged)
        return INCONCLUSIVE if self.asked.strict and unsure else FINE


def measured_line(network: str, seen: dict[str, Any]) -> str:
    """Say what is in force on a network, as it was measured; `seen`: what Lab.verify returned."""
    one, many = seen["one_flow"], seen["many_flows"]
    found = f"one flow {gbit(one['measured_bps'])}, {many['flows']} flows {gbit(many['measured_bps'])} of payload"
    caps = "" if seen["ok"] else " (NOT what was asked for: see study.json)"
    return f"{network}: measured in {seen['how']}: {found}{caps}."


def answer(found: Found) -> list[str]:
    """The short answer of one job on one network."""
    if found.done.cell.job == INFLATION:
        return [f"{found.done.outcome.steps} steps of forward and backward passes, {', '.join(found.done.cell.arms)}"]
    outcome, findings = found.done.outcome, found.run.findings
    lines = []
    if outcome.accuracy is not None:
        reached = "" if outcome.accuracy >= ACCURACY else f", below the {percent(ACCURACY)} asked for"
        lines.append(f"accuracy {outcome.accuracy:.3f} on the held-out fifth after {outcome.steps} steps{reached}")
    what = "sums" if found.done.cell.job == REPLAY else "weights"
    equal = f"{what} equal on all ranks, bit for bit" if outcome.equal else f"{what.upper()} DIFFER BETWEEN RANKS"
    same = {None: "", True: ", and equal to a run over stock alone", False: "; NOT EQUAL TO A RUN OVER STOCK ALONE"}
    lines.append(equal + same[found.done.same_as_stock])
    withheld = rules.handicap_sentence(findings)
    if withheld and not found.nothing_to_do:
        lines.append(withheld.rstrip("."))
    lines += [_gain(pair) for pair in findings.comparisons if not withheld or found.nothing_to_do]
    if found.nothing_to_do:
        lines.append("on this network: do nothing; stock is as good")
    return lines


def _gain(pair: Paired) -> str:
    low, high = pair.ratio.low, pair.ratio.high
    times = f"{1 / pair.ratio.value:.2f} times as fast ({1 / high:.2f} to {1 / low:.2f})"
    doubt = ""
    if not pair.enough:
        doubt = "; one pair is no claim"
    elif low <= 1 <= high:
        doubt = "; not sure, more --rounds would tell"
    return f"{pair.other}: the step is {times} as over {pair.base}, {pair.pairs} pairs of blocks (measured{doubt})"


def table(study: Study) -> Iterable[Table]:
    """Yield a table for each model: the networks, and below each its transports."""
    judged = [found for found in study.found if found.done.cell.job != INFLATION]
    for label in dict.fromkeys(found.done.cell.model.label for found in judged):
        rows = [found for found in judged if found.done.cell.model.label == label]
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=rows[0].run.trace.model, title_justify="left")
        made.add_column("", no_wrap=True)
        for column in ("step", "against stock (95 %)", "moved at", "achievable"):
            made.add_column(column, justify="right", overflow="fold")
        for found in rows:
            made.add_row(Text(found.name, style="bold"))
            for line in _rows(found):
                made.add_row(*line)
        yield made


def _rows(found: Found) -> Iterable[tuple[str, ...]]:
    findings = found.run.findings
    can = findings.achievable
    for name, taken in findings.times.items():
        did = findings.achieved.get(name)
        moved = gbit(did.active_bps) if did else ""
        reach = f"{gbit(can.best[1])} ({can.best[0]})" if can and did else ""
        yield f"  {name}", ms(taken.median_ns), _difference(found, name), moved, reach
        tuned = found.tuned.findings if found.tuned is not None and name == BASE else None
        if tuned is not None and BASE in tuned.times:
            moved = gbit(tuned.achieved[BASE].active_bps) if BASE in tuned.achieved else ""
            yield "  stock x4", ms(tuned.times[BASE].median_ns), "own run, not paired", moved, reach


def _difference(found: Found, transport: str) -> str:
    if transport in PSEUDO:
        return ""
    pair = found.pair(transport)
    if pair is None:
        return ""
    if found.run.findings.handicapped:
        return "withheld"
    ns = pair.difference_ns
    return f"{ns.value / 1e6:+.0f} ms ({ns.low / 1e6:+.0f} to {ns.high / 1e6:+.0f})"


def show(study: Study, console: Console) -> None:
    """Print the answer of the whole study."""
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


def finish(study: Study, teller: Teller) -> int:
    """Tell what a study found, write it down, and return the exit code."""
    study.recall()
    study.write()
    if study.found:
        show(study, teller.console)
        conclude(study).show(teller.console)
    for key, why in study.failed.items():
        sys.stderr.write(f"netbottleneck study: {key} failed: {why.splitlines()[0]}\n")
    folder = study.asked.folder.path
    teller.say(f"Written: {folder / 'report.html'}, figures/, evidence.json, study.json; a report in each cell's run/.")
    return study.code


def conclude(study: Study) -> Evidence:
    """Write what the cells bear out, by their facts alone: evidence.json, figures, report.html."""
    spec, folder = study.asked.spec, study.asked.folder
    facts = [values.read(folder.of(cell.key) / FACTS) for cell in spec.cells if folder.done(cell.key)]
    models = dict.fromkeys(cell.model for cell in spec.cells if (cell.model.scale, cell.model.stretch) != (1, 1))
    less = [f"{model.label}: {model.scale:g} x its bytes, {model.stretch:g} x its times" for model in models]
    left = [f"{cell.key}: not done" for cell in spec.cells if not folder.done(cell.key)]
    found = Evidence(facts, spec.title, (*study.asked.notes, *dict.fromkeys(less), *left))
    found.write(folder.path)
    return found
