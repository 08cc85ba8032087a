"""Known answers of trainings in labs: lengths that a training is given, and those that its report shows.

The training counts the time before its forward, the moment of each rank's last gradient, and the compute that it adds
while its host sends (the option `counts` of train.py). The time on the wire follows from the bytes
of the gradients and the rate at which the lab lets a connection send.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from netbottleneck.analysis import intervals
from netbottleneck.analysis.findings import Findings
from netbottleneck.lab.network import parse_lab
from netbottleneck.report import Run
from netbottleneck.trace.model import Step
from netbottleneck.trace.transports import NULL
from scenario.known import Answer, Draw, part_ms, slowed_ms, transfers_ms
from scenario.live import train
from scenario.training import Training

Counts = Sequence[Sequence[Mapping[str, float]]]  # of each rank, by step
True_ = Callable[[Training, Counts, Step], float]


def _counted(name: str) -> True_:
    """Return what a rank counted in a step under a name, in ms."""

    def counted(_: Training, counts: Counts, step: Step) -> float:
        return counts[step.rank][step.index].get(name, 0.0)

    return counted


def _waiting(_: Training, counts: Counts, step: Step) -> float:
    """Ms from a rank's last gradient to the last one of all ranks."""
    ready = [one[step.index]["ready"] for one in counts]
    return max(ready) - ready[step.rank]


def _wire(training: Training, *_: object) -> float:
    """Ms of a step's gradients at the rate of a connection."""
    ranks, (bps,) = training.hosts, parse_lab(training.lab).links[0].flow_bps
    return 8e3 * 2 * (ranks - 1) / ranks * 1024 * sum(training.options["sizes"]) / bps


def _late(draw: Draw) -> Training:
    """A training of one bucket, over paced connections, with a slow input and one rank that sleeps in its backward."""
    ranks, kib = draw.choice((2, 2, 2, 3, 4)), draw.randrange(1024, 4096)
    mbit = round(8e-3 * 2 * (ranks - 1) / ranks * 1024 * kib / draw.uniform(30, 120))
    clock = {"clock_s": draw.randrange(60, 3600)} if draw.random() < 0.3 else {}
    return Training(
        f"none/{mbit}mbit",
        "stock",
        {
            "sizes": [kib, 1],
            "layers": 2,
            "bucket_kib": kib + 1,
            "ms": draw.uniform(5, 15),
            "steps": 60,
            "input_ms": draw.uniform(10, 60),
            "slow_rank": draw.randrange(ranks),
            "sleep_ms": draw.uniform(10, 80),
            "optimizer_ms": draw.uniform(1, 8),
            **clock,
        },
        hosts=ranks,
        flow="pacing",
    )


def _contended(draw: Draw) -> Training:
    """A training whose compute takes longer while its host sends, and the same without traffic in other blocks."""
    kib = draw.randrange(400, 800)
    mbit = round(8e-3 * 4 * 1024 * kib / draw.uniform(60, 110))
    options = {"layers": 4, "kib": kib, "ms": draw.uniform(20, 30), "steps": 74, "contention": draw.uniform(1.6, 3.0)}
    return Training(f"{mbit}mbit", f"stock,{NULL}", options)


Shown = Callable[[Findings], float]
# By what is drawn: the lengths, by name, with what is injected and what is shown.
KINDS: Mapping[Callable[[Draw], Training], Mapping[str, tuple[True_, Shown]]] = {
    _late: {
        "gradients on the wire, not hidden": (_wire, part_ms("transfer")),
        "gradients on the wire, all": (_wire, transfers_ms),
        "waiting for a peer": (_waiting, part_ms("waiting")),
        "input": (_counted("input"), part_ms("input")),
    },
    _contended: {"compute slowed by traffic": (_counted("slowed"), slowed_ms)},
}


def _mean(true: True_, training: Training, counts: Counts, steps: Sequence[Step]) -> float:
    return sum(true(training, counts, step) for step in steps) / len(steps)


def answers_of(training: Training, lengths: Mapping[str, tuple[True_, Shown]], seed: int) -> Iterator[Answer]:
    """Run a training, and compare its lengths with those of its report."""
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "counts"
        counted.mkdir()
        train(training.but(counts=str(counted)), folder, seed)
        counts = [json.loads((counted / str(rank)).read_text(encoding="utf-8")) for rank in range(training.hosts)]
        found = Run(folder).findings
    rows = [row for row in intervals.split_steps(found.trace) if row[0].arm == found.base]
    steps = [step for step, _, _ in rows]
    middle = [step for step, _, _ in intervals.typical(rows, lambda row: row[1])]
    step_ms = sum(step.duration_ns for step in steps) / len(steps) / 1e6
    for name, (true, shown) in lengths.items():
        whole_ms = _mean(true, training, counts, steps)
        # A difference of arms, and a rate, are means over all steps; the parts of a step are of the middle half.
        truth_ms = whole_ms if shown in (slowed_ms, transfers_ms) else _mean(true, training, counts, middle)
        yield Answer(name, training, truth_ms, whole_ms, shown(found), step_ms)


def answers(count: int, seed: int, only: str = "") -> Iterator[Answer]:
    """Yield `count` answers of each length whose name contains the text."""
    for draw, lengths in KINDS.items():
        wanted = {name: each for name, each in lengths.items() if only in name}
        for number in range(count if wanted else 0):
            training = draw(random.Random(f"{seed}/{draw.__name__}/{number}"))
            yield from answers_of(training, wanted, seed * 1000 + number)
