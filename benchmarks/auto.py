"""Does NETBOTTLENECK_TRANSPORT=auto end on the best transport? On simulated networks drawn at random, with two hosts.

python benchmarks/auto.py [--networks 20] [--seed 1] [--json FILE]

One run for each network: first auto, up to the end of its first trial; then all transports take turns in blocks of ten
steps, over the same connections, which shows the best one (from run to run the same transport may differ by 10 %). The
arm that auto kept is right if the turns show that it is surely not slower than the best one by more than 2 %, the
difference that auto takes for none, and wrong if it surely is; else it is undecided. Prints a row for each network.
Exit code 0 only if 19 of 20 are right, and in all of them trials cost at most 2 % of a run of 2000 steps, or of 30 s if
that is longer.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keep
import numpy as np

from netbottleneck.analysis.comparisons import Estimate, compare, step_times
from netbottleneck.bench import head
from netbottleneck.lab import Lab, LabError
from netbottleneck.report import Run
from netbottleneck.runtime.auto import COST_MAX, EQUAL, LEAST_RUN, LEAST_RUN_S, least_run_steps
from netbottleneck.trace.model import Trace
from netbottleneck.trace.transports import STOCK, Arm

RANK = Path(__file__).with_name("auto_rank.py")
BY_STEP = 200
LINKS_MBIT, FLOWS, WIDTHS = (500, 1000, 2000, 5000, 10000), (1, 2, 4), (128, 256, 512)
TURNS_S = 60.0  # in turns: the steps that are short are many, as they are noisy
LIMIT_S = 600.0
RIGHT = 0.95


@dataclass(frozen=True)
class Outcome:
    """Of one network. against_best: step time of the kept arm over the best one's, while they took turns.

    cost_of_run: part of the time of the shortest run that a first trial is for.
    """

    network: str
    width: int
    stock_ms: float
    best: str
    kept: str
    by_step: int
    against_best: tuple[float, float, float]
    cost_steps: float
    cost_of_run: float

    @property
    def judged(self) -> str:
        """Whether the kept arm is as fast as the best one, but for EQUAL, and was kept in time."""
        low, _, high = self.against_best
        if self.by_step > BY_STEP or low > 1 + EQUAL:
            return "wrong"
        return "right" if high <= 1 + EQUAL else "undecided"

    def row(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        low, value, high = self.against_best
        return {
            "network": self.network,
            "width": self.width,
            "stock_ms": round(self.stock_ms, 2),
            "best": self.best,
            "kept": self.kept,
            "by_step": self.by_step,
            "kept_over_best": f"{value:.3f} [{low:.3f}, {high:.3f}]",
            "cost_steps": round(self.cost_steps, 1),
            "cost_of_run_percent": round(100 * self.cost_of_run, 2),
            "judged": self.judged,
        }

    def line(self) -> str:
        """Return the row of a table."""
        low, value, high = self.against_best
        return (
            f"| {self.network:<18} | {self.width:>4} | {self.stock_ms:7.2f} | {self.best:<5} | {self.kept:<5} | "
            f"{self.by_step:>4} | {value:.3f} [{low:.3f}, {high:.3f}] | {self.cost_steps:6.1f} | "
            f"{100 * self.cost_of_run:5.2f} % | {self.judged} |"
        )


def summary(outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    """Return how many networks of each judgement there are, in words, and True if enough of them passed."""
    names = {
        what: [f"{one.network}, width {one.width}" for one in outcomes if one.judged == what]
        for what in ("right", "wrong", "undecided")
    }
    counts = [f"{len(names['right'])} of {len(outcomes)} right"]
    counts += [
        f"{len(names[what])} {what} ({'; '.join(names[what])})" for what in ("wrong", "undecided") if names[what]
    ]
    cheap = sum(one.cost_of_run <= COST_MAX for one in outcomes)
    run = f"a run of {LEAST_RUN} steps or {LEAST_RUN_S:g} s"
    counts.append(f"trials cost at most {100 * COST_MAX:.0f} % of {run} in {cheap} of {len(outcomes)}")
    return "; ".join(counts), len(names["right"]) >= RIGHT * len(outcomes) and cheap == len(outcomes)


def measured(network: str, width: int) -> tuple[Trace, dict[str, Any]]:
    """Run the loop on two simulated hosts; return the trace after the trial and rank 0's description of itself."""
    with tempfile.TemporaryDirectory(prefix="auto-") as folder, Lab(2, network) as lab:
        environ = {
            **os.environ,
            "NETBOTTLENECK_TRANSPORT": "auto",
            "NETBOTTLENECK_DIR": f"{folder}/run",
            "NETBOTTLENECK_START_STEP": str(BY_STEP),
            "NETBOTTLENECK_INSECURE": "1",  # the network is the lab's own
        }
        command = [sys.executable, "-m", "netbottleneck", "run", str(RANK), str(BY_STEP), str(TURNS_S), str(width)]
        ranks = [lab.popen(rank, command, env=environ, stdout=subprocess.DEVNULL) for rank in range(lab.size)]
        codes = [process.wait(LIMIT_S) for process in ranks]
        if any(codes):
            raise LabError(f"{network}: exit codes {codes}")
        meta = json.loads((Path(folder) / "run" / "ranks" / "0.meta.json").read_text(encoding="utf-8"))
        return Run(Path(folder) / "run").trace, meta


def outcome(network: str, width: int) -> Outcome:
    """Measure one network."""
    trace, meta = measured(network, width)
    found = meta["auto"]
    times = {arm: float(np.median(np.concatenate(list(step_times(trace, arm).values())))) for arm in trace.arms}
    best = min(times, key=lambda arm: times[arm])
    trial = found["trials"][0]
    kept = Arm.parse(trial["kept"])
    if kept == best:
        ratio = Estimate(1.0, 1.0, 1.0)
    else:
        pair = compare(trace, best, kept)
        ratio = Estimate(times[kept] / times[best], 0.0, math.inf) if pair is None else pair.ratio
    return Outcome(
        network,
        width,
        times[STOCK] / 1e6,
        str(best),
        str(kept),
        trial["end_step"],
        (ratio.low, ratio.value, ratio.high),
        trial["cost_ns"] / times[kept],
        found["cost_ns"] / (found["cost_ns"] + least_run_steps(times[kept]) * times[kept]),
    )


def write(path: Path, facts: Mapping[str, Any], title: str, spread: str, rows: list[dict[str, Any]]) -> None:
    """Write rows with their origin, for docs/_site/results.py."""
    took_s = time.time() - facts["started_wall_ns"] / 1e9
    found = {
        "title": title,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {name: facts["machine"][name] for name in ("cpu", "cores")},
        "system": keep.system(facts["machine"]["kernel"]),
        "versions": facts["versions"],
        "command": f"python {' '.join(sys.argv)}",
        "duration": f"{took_s / 60:.1f} minutes",
        "load": "nothing else",
        "spread": spread,
        "rows": rows,
    }
    path.write_text(keep.text(found) + "\n", encoding="utf-8")


def drawn(seed: int, count: int) -> list[tuple[str, int]]:
    """Draw networks, and the widths of the model."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        link, flows, width = draw.choice(LINKS_MBIT), draw.choice(FLOWS), draw.choice(WIDTHS)
        found.append((f"{link}mbit" if flows == 1 else f"{link}mbit/{link // flows}mbit", width))
    return found


def begin(about: str | None, name: str, count: int) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse the arguments, of which `name` is the number of cases, and print the machine. Returns both."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0] if about else None)
    parser.add_argument(name, dest="count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments, facts = parser.parse_args(), head(2)
    print(f"# {facts['machine']}, {facts['versions']}", flush=True)
    return arguments, facts


def main() -> int:
    """Run all networks and print the table."""
    arguments, facts = begin(__doc__, "--networks", 20)
    print("| network | width | stock, ms | best | kept | from step | kept over best [95 %] | cost, steps | of run | |")
    print("|" + " --- |" * 10, flush=True)
    outcomes = []
    for network, width in drawn(arguments.seed, arguments.count):
        outcomes.append(outcome(network, width))
        print(outcomes[-1].line(), flush=True)
    found, passed = summary(outcomes)
    print(f"{found} (measured)")
    if arguments.json:
        rows = [one.row() for one in outcomes]
        write(arguments.json, facts, "The transports that auto keeps", f"95 % intervals; {found}", rows)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
