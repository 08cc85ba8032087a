"""What a study found, as values, as a table and as study.json: run folders in, words out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from netbottleneck import verdict as rules
from netbottleneck.report import Run
from netbottleneck.stats import Paired
from netbottleneck.study_task import ACCURACY, Outcome
from netbottleneck.trace import PSEUDO
from netbottleneck.units import gbit, ms, percent, streams

VERSION = 1
BASE = "stock"


@dataclass
class Found:
    """One job on one network. tuned: the same over stock with four interfaces; again: digits over stock alone."""

    network: str
    job: str
    run: Run
    outcome: Outcome
    tuned: Run | None = None
    again: Outcome | None = None

    @property
    def same_as_stock(self) -> bool | None:
        """Whether the weights are those of the run over stock alone, bit for bit; None where there was none."""
        return None if self.again is None else self.again.digests == self.outcome.digests

    def pair(self, transport: str) -> Paired | None:
        """Return the comparison of a transport with stock."""
        return next((p for p in self.run.findings.comparisons if p.other == transport and p.base == BASE), None)

    @property
    def nothing_to_do(self) -> bool:
        """Whether no transport that was tried gains anything that may be claimed."""
        return rules.stock_is_as_good(self.run.findings)


@dataclass
class Study:
    """All that a study has come to so far."""

    folder: Path
    started_wall_ns: int
    command: Sequence[str]
    networks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by text: how, link_bps, flow_bps, verified
    found: list[Found] = field(default_factory=list)
    failure: str | None = None

    def write(self) -> Path:
        """Write study.json, and return where."""
        value = {
            "version": VERSION,
            "command": list(self.command),
            "started_wall_ns": self.started_wall_ns,
            "failure": self.failure,
            "networks": self.networks,
            "jobs": [self._job(found) for found in self.found],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "study.json"
        path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        return path

    def _job(self, found: Found) -> dict[str, Any]:
        summary = found.run.summary
        tuned = None if found.tuned is None else found.tuned.summary["steps"].get(BASE)
        kept = ("model", "sentence", "verdict", "steps", "comparisons", "handicap", "gain_withheld", "scaling")
        return {
            "network": found.network,
            "job": found.job,
            "folder": str(found.run.path.relative_to(self.folder)),
            "outcome": found.outcome.as_dict(),
            "weights_equal_to_stock_alone": found.same_as_stock,
            "stock_four_interfaces": tuned,
            "nothing_to_do": found.nothing_to_do,
            **{key: summary[key] for key in (*kept, "bandwidth", "probe")},
        }


def measured_line(network: str, seen: dict[str, Any]) -> str:
    """Say what is in force on a network, as it was measured; `seen`: what Lab.verify returned."""
    one, many = seen["one_flow"], seen["many_flows"]
    found = f"one flow {gbit(one['measured_bps'])}, {many['flows']} flows {gbit(many['measured_bps'])} of payload"
    caps = "" if seen["ok"] else " (NOT what was asked for: see study.json)"
    return f"{network}: measured in {seen['how']}: {found}{caps}."


def answer(found: Found) -> list[str]:
    """The short answer of one job on one network."""
    findings = found.run.findings
    lines = []
    if found.outcome.accuracy is not None:
        reached = "" if found.outcome.accuracy >= ACCURACY else f", below the {percent(ACCURACY)} asked for"
        lines.append(f"accuracy {found.outcome.accuracy:.3f} on the held-out fifth after {_steps(found)}{reached}")
    equal = "weights equal on all ranks, bit for bit" if found.outcome.equal else "WEIGHTS DIFFER BETWEEN RANKS"
    same = {None: "", True: ", and equal to a run over stock alone", False: "; NOT EQUAL TO A RUN OVER STOCK ALONE"}
    lines.append(equal + same[found.same_as_stock])
    withheld = rules.handicap_sentence(findings)
    if withheld:
        lines.append(withheld)
    lines += [_gain(pair) for pair in findings.comparisons if not withheld]
    if found.nothing_to_do:
        lines.append("on this network: do nothing; stock is as good")
    return lines


def _steps(found: Found) -> str:
    return f"{found.outcome.steps} steps"


def _gain(pair: Paired) -> str:
    low, high = pair.ratio.low, pair.ratio.high
    times = f"{1 / pair.ratio.value:.2f} times as fast ({1 / high:.2f} to {1 / low:.2f})"
    sure = "" if pair.enough else "; one pair is no claim"
    return f"{pair.other}: the step is {times} as over {pair.base}, {pair.pairs} pairs of blocks (measured{sure})"


def table(study: Study) -> Iterable[Table]:
    """Yield a table for each job: the networks and their transports."""
    for job in dict.fromkeys(found.job for found in study.found):
        rows = [found for found in study.found if found.job == job]
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=rows[0].run.trace.model, title_justify="left")
        made.add_column("network", overflow="fold")
        made.add_column("transport")
        for column in ("step", "against stock (95 %)", "moved at", "achievable"):
            made.add_column(column, justify="right", overflow="fold")
        for found in rows:
            for line in _rows(found):
                made.add_row(*line)
            made.add_section()
        yield made


def _rows(found: Found) -> Iterable[tuple[str, ...]]:
    findings = found.run.findings
    can = findings.achievable
    network = found.network
    for name, time in findings.times.items():
        did = findings.achieved.get(name)
        reach = f"{gbit(can.best[1])}, {streams(can.best[0])}" if can and did and name == can.transport else ""
        moved = gbit(did.active_bps) if did else ""
        yield network, name, ms(time.median_ns), _difference(found, name), moved, reach
        network = ""
        tuned = found.tuned.findings if found.tuned is not None and name == BASE else None
        if tuned is not None and BASE in tuned.times:
            moved = gbit(tuned.achieved[BASE].active_bps) if BASE in tuned.achieved else ""
            yield "", "stock x4", ms(tuned.times[BASE].median_ns), "own run, not paired", moved, ""


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
    console.print("bare: DDP untouched; single: one rank alone; a step is a median, all times are measured.")
    console.print()
    for found in study.found:
        verdict = found.run.verdict
        keep = " On this network: do nothing." if found.nothing_to_do else ""
        head = f"{found.network}, {found.job}: {verdict.code}.{keep}"
        console.print(head, style="bold", highlight=False, markup=False)
        console.print(f"  {verdict.why}\n  Next: {verdict.next}", highlight=False, markup=False)
