"""Known answers of trainings in labs: lengths that a training is given, and those that its report shows.

The training counts the time before its forward, the moment of each rank's last gradient, and the compute that it adds
while its host sends (the option `counts` of train.py). The time on the wire follows from the bytes of the gradients and
the rate at which the lab lets a connection send. Where the report shows the middle half of the steps, the truth is of
the middle half by the training's own count.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from netbottleneck.analysis.findings import Findings
from netbottleneck.lab.network import parse_lab
from netbottleneck.report import Run
from netbottleneck.trace.model import Step
from netbottleneck.trace.transports import NULL
from scenario.known import Answer, Draw, part_ms, slowed_ms, transfers_ms
from scenario.live import train
from scenario.training import Training

Counts = Sequence[Sequence[Mapping[str, float]]]  # of each rank, by step
Truth = Callable[[Training, Counts, Step], float]  # ms
Shown = Callable[[Findings], float]  # ms a step


def _counted(name: str) -> Truth:
    """Return what a rank counted in a step under a name, in ms."""

    def counted(_: Training, counts: Counts, step: Step) -> float:
        return counts[step.rank][step.index].get(name, 0.0)

    return counted


def _waiting(_: Training, counts: Counts, step: Step) -> float:
    """Ms from a rank's last gradient to the last one of all ranks."""
    ready = [one[step.index]["ready"] for one in counts]
    return max(ready) - ready[step.rank]


def _wire_ms(training: Training, kib: float) -> float:
    """Ms of a ring all-reduce of so many KiB at the rate of a connection."""
    ranks, (bps,) = training.hosts, parse_lab(training.lab).links[0].flow_bps
    return 8e3 * 2 * (ranks - 1) / ranks * 1024 * kib / bps


def _wire(training: Training, *_: object) -> float:
    """Ms of a step's gradients on the wire."""
    return _wire_ms(training, sum(training.options["sizes"]))


def _late_wire(training: Training, *_: object) -> float:
    """Ms of the last bucket on the wire, the first layer's: the other ends before the last gradient."""
    return _wire_ms(training, training.options["sizes"][0])


def _late(draw: Draw) -> Training:
    """Two buckets over paced connections, one of them hidden, a slow input, one rank that sleeps in its backward."""
    ranks, late, hidden = draw.choice((2, 2, 2, 3, 4)), draw.randrange(1500, 4000), draw.randrange(1024, 1400)
    mbit = round(8e-3 * 2 * (ranks - 1) / ranks * 1024 * late / draw.uniform(90, 200))
    training = Training(
        f"none/{mbit}mbit",
        "stock",
        {
            "layers": 2,
            "sizes": [late, hidden],
            "bucket_kib": hidden,
            "steps": 44,
            "input_ms": draw.uniform(15, 80),
            "slow_rank": draw.randrange(ranks),
            "sleep_ms": draw.uniform(20, 120),
            "uneven": 0.25,
            "optimizer_ms": draw.uniform(1, 8),
            **({"clock_s": draw.randrange(60, 3600)} if draw.random() < 0.3 else {}),
        },
        hosts=ranks,
        flow="pacing",
    )
    return training.but(ms=draw.uniform(1.2, 1.5) * _wire_ms(training, hidden) + 5)


def _contended(draw: Draw) -> Training:
    """A training whose compute takes longer while its host sends, and the same without traffic in other blocks."""
    kib = draw.randrange(400, 800)
    mbit = round(8e-3 * 4 * 1024 * kib / draw.uniform(90, 150))
    options = {"layers": 4, "kib": kib, "ms": draw.uniform(25, 35), "steps": 90, "contention": draw.uniform(3.0, 5.0)}
    return Training(f"{mbit}mbit", f"stock,{NULL}", options)


# By what is drawn: the lengths, by name, with what is injected and what is shown.
KINDS: Mapping[Callable[[Draw], Training], Mapping[str, tuple[Truth, Shown]]] = {
    _late: {
        "gradients on the wire, not hidden": (_late_wire, part_ms("transfer")),
        "gradients on the wire, all": (_wire, transfers_ms),
        "waiting for a peer": (_waiting, part_ms("waiting")),
        "input": (_counted("input"), part_ms("input")),
    },
    _contended: {"compute slowed by traffic": (_counted("slowed"), slowed_ms)},
}


def _steps(found: Findings) -> list[Step]:
    """The steps of the base that a report counts: without the first one of each block."""
    blocks: dict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in sorted(found.trace.steps, key=lambda step: step.index):
        if step.arm == found.base:
            blocks[step.rank, step.block].append(step)
    return [step for own in blocks.values() for step in own[1:]]


def _middle(steps: Sequence[Step], counts: Counts) -> list[Step]:
    """The middle half of these steps by what the ranks counted as their durations, in the mean."""
    indices = sorted({step.index for step in steps})
    means = {at: float(np.mean([one[at + 1]["begin"] - one[at]["begin"] for one in counts])) for at in indices}
    low, high = np.percentile(list(means.values()), [25, 75])
    return [step for step in steps if low <= means[step.index] <= high]


def _mean_ms(truth: Truth, training: Training, counts: Counts, steps: Sequence[Step]) -> float:
    return sum(truth(training, counts, step) for step in steps) / len(steps)


def answers_of(training: Training, lengths: Mapping[str, tuple[Truth, Shown]], seed: int) -> Iterator[Answer]:
    """Run a training, and compare its lengths with those of its report."""
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "counts"
        counted.mkdir()
        train(training.but(counts=str(counted)), folder, seed)
        counts = [json.loads((counted / str(rank)).read_text(encoding="utf-8")) for rank in range(training.hosts)]
        found = Run(folder).findings
    steps = _steps(found)
    middle = _middle(steps, counts)
    step_ms = sum(step.duration_ns for step in steps) / len(steps) / 1e6
    for name, (truth, shown) in lengths.items():
        whole_ms = _mean_ms(truth, training, counts, steps)
        # A comparison of arms, and a rate, are of all steps; the parts of a step are of the middle half.
        truth_ms = whole_ms if shown in (slowed_ms, transfers_ms) else _mean_ms(truth, training, counts, middle)
        yield Answer(name, training, truth_ms, whole_ms, shown(found), step_ms)


def answers(count: int, seed: int, only: str = "") -> Iterator[Answer]:
    """Yield `count` answers of each length whose name contains the text."""
    for draw, lengths in KINDS.items():
        wanted = {name: each for name, each in lengths.items() if only in name}
        for number in range(count if wanted else 0):
            training = draw(random.Random(f"{seed}/{draw.__name__}/{number}"))
            yield from answers_of(training, wanted, seed * 1000 + number)
