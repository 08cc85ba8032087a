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
from rich.text import Text

from netbottleneck import verdict as rules
from netbottleneck.report import Run
from netbottleneck.stats import Paired
from netbottleneck.study.task import ACCURACY, Outcome
from netbottleneck.trace import PSEUDO
from netbottleneck.units import gbit, ms, percent

VERSION = 1
BASE = "stock"
LEGEND = (
    "bare: DDP untouched; single: one rank alone. step: median; moved at: in transfer, one way; achievable: by a probe "
    "of the same hosts (streams). All measured."
)


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
        """Whether other transports were tried in pairs enough, and none gains as much as would count."""
        tried = [pair for pair in self.run.findings.comparisons if pair.enough and pair.base == BASE]
        return bool(tried) and all(pair.gain.value < rules.GAIN_MIN for pair in tried)


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
            **{key: summary[key] for key in (*kept, "bandwidth", "probe", "hosts")},
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
        lines.append(
            f"accuracy {found.outcome.accuracy:.3f} on the held-out fifth after {found.outcome.steps} steps{reached}"
        )
    equal = "weights equal on all ranks, bit for bit" if found.outcome.equal else "WEIGHTS DIFFER BETWEEN RANKS"
    same = {None: "", True: ", and equal to a run over stock alone", False: "; NOT EQUAL TO A RUN OVER STOCK ALONE"}
    lines.append(equal + same[found.same_as_stock])
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
    """Yield a table for each job: the networks, and below each its transports."""
    for job in dict.fromkeys(found.job for found in study.found):
        rows = [found for found in study.found if found.job == job]
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=rows[0].run.trace.model, title_justify="left")
        made.add_column("", no_wrap=True)
        for column in ("step", "against stock (95 %)", "moved at", "achievable"):
            made.add_column(column, justify="right", overflow="fold")
        for found in rows:
            made.add_row(Text(found.network, style="bold"))
            for line in _rows(found):
                made.add_row(*line)
        yield made


def _rows(found: Found) -> Iterable[tuple[str, ...]]:
    findings = found.run.findings
    can = findings.achievable
    for name, time in findings.times.items():
        did = findings.achieved.get(name)
        moved = gbit(did.active_bps) if did else ""
        reach = f"{gbit(can.best[1])} ({can.best[0]})" if can and did else ""
        yield f"  {name}", ms(time.median_ns), _difference(found, name), moved, reach
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
        verdict = found.run.verdict
        keep = " On this network: do nothing." if found.nothing_to_do else ""
        head = f"{found.network}, {found.job}: {verdict.code}.{keep}"
        console.print(head, style="bold", highlight=False, markup=False)
        console.print(f"  {verdict.why}\n  Next: {verdict.next}", highlight=False, markup=False)
