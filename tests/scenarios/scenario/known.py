"""Known answers: jobs with an injected length of time, and the length that the report shows for it.

The truth is what the clock of the simulated job counts while it runs (`Clockwork.spent`). It is the mean over the steps
that a report says it shows: of the steps after the first of each block, the middle half by mean duration. For `slowed`,
which a report compares by blocks of two arms, it is the mean over all steps after the first of each block.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from netbottleneck.analysis import findings
from netbottleneck.analysis.findings import Findings
from netbottleneck.report.progress import step_parts
from scenario.job import MIB, MS, Job, work_of

Draw = random.Random
# Largest relative error of an answer.
ERROR_MAX = 0.05
# A length is drawn from this part of the compute of a step on, up to this part.
PART_MIN, PART_MAX = 0.02, 0.6
# A length below this part of the step is not resolved: its job is drawn again.
RESOLVED_MIN = 0.01
DRAWS_MAX = 60
# `slowed` is a difference of noisy blocks: 5 % of it must be at least this many standard deviations.
DEVIATIONS = 3.0


def _plain(draw: Draw) -> Job:
    """A job without a cause: ranks, transport, compute, buckets, noise and clocks are drawn."""
    ranks = draw.choice((2, 2, 3, 4, 8))
    buckets = tuple(int(MIB * math.exp(draw.uniform(-2, 2.5))) for _ in range(draw.randint(1, 8)))
    return Job(
        ranks=ranks,
        arms=(draw.choice(("stock", "tcp")),),
        blocks=draw.randint(2, 5),
        block_steps=draw.randint(10, 24),
        forward_ms=draw.uniform(8, 60),
        backward_ms=draw.uniform(20, 150),
        optimizer_ms=draw.uniform(0.3, 8),
        input_ms=draw.uniform(0.1, 1.0),
        buckets=buckets,
        link_bps=draw.uniform(1e10, 1e11),
        flow_bps=draw.uniform(5e9, 2e10),
        latency_ms=draw.uniform(0.02, 0.3),
        jitter=draw.uniform(0.0, 0.04),
        noise=draw.uniform(0.0, 0.005),
        clock_ms={rank: draw.uniform(-30, 30) for rank in range(1, ranks)} if draw.random() < 0.3 else {},
    )


def _length_ms(draw: Draw, job: Job) -> float:
    """A length, from a small to a large part of the compute of a step."""
    part = math.exp(draw.uniform(math.log(PART_MIN), math.log(PART_MAX)))
    return part * (job.forward_ms + job.backward_ms + job.optimizer_ms)


def _slow_link(draw: Draw, job: Job) -> Job:
    """Gradients that take a while, by the rate of the link or of a flow, or by the latency."""
    ms = _length_ms(draw, job)
    if draw.random() < 0.25:
        return replace(job, latency_ms=ms / len(job.buckets))
    bps = 8e3 * job.bus_bytes(sum(job.buckets)) / ms
    if job.arms == ("stock",) and draw.random() < 0.5:
        return replace(job, flow_bps=bps)
    return replace(job, link_bps=bps)


def _late_peer(draw: Draw, job: Job) -> Job:
    """One rank that sleeps, computes longer or gets its input later."""
    rank, ms = draw.randrange(job.ranks), _length_ms(draw, job)
    how = draw.randrange(3)
    if how == 0:
        return replace(job, sleeps_ms={rank: ms})
    if how == 1:
        return replace(job, slower={rank: 1 + ms / (job.forward_ms + job.backward_ms)})
    return replace(job, input_of_ms={rank: ms})


def _contended(draw: Draw, job: Job) -> Job:
    """Compute that takes longer beside traffic, and the same job without traffic in every second block."""
    buckets = (*job.buckets, *(int(MIB * draw.uniform(4, 16)) for _ in range(2)), MIB)
    wire_ms = job.backward_ms * draw.uniform(0.3, 0.8)
    job = replace(job, buckets=buckets, arms=(*job.arms, "null"), blocks=draw.randint(5, 8), clock_ms={})
    bps = 8e3 * job.bus_bytes(sum(buckets)) / wire_ms
    return replace(job, link_bps=bps, flow_bps=bps, contention=draw.uniform(1.1, 1.9))


def _slow_input(draw: Draw, job: Job) -> Job:
    """Input of every rank that takes a while, and not the same from step to step."""
    return replace(job, input_ms=_length_ms(draw, job), input_jitter=draw.uniform(0.0, 0.25))


@dataclass(frozen=True)
class Kind:
    """A length that is injected. spent: its name in the clock's count; shown: ms a step of it in the findings."""

    name: str
    inject: Callable[[Draw, Job], Job]
    spent: str
    shown: Callable[[Findings], float]


def part_ms(name: str) -> Callable[[Findings], float]:
    """Return a part of base's step, as the report's line of parts has it."""

    def shown(found: Findings) -> float:
        assert found.base is not None
        return step_parts(found.parts[found.base])[name] / MS

    return shown


def transfers_ms(found: Findings) -> float:
    """Ms a step at the rate that the report gives for the transfers."""
    assert found.base is not None
    parts, rate = found.parts[found.base], found.achieved[found.base]
    return parts.step_ns / MS * rate.average_bps / rate.active_bps


def slowed_ms(found: Findings) -> float:
    """Ms a step by which forward and backward are longer than without traffic."""
    assert found.slowed is not None
    return found.slowed.difference_ns.value / MS


KINDS: Sequence[Kind] = (
    Kind("gradients on the wire, not hidden", _slow_link, "exposed", part_ms("transfer")),
    Kind("gradients on the wire, all", _slow_link, "wire", transfers_ms),
    Kind("waiting for a peer", _late_peer, "waiting", part_ms("waiting")),
    Kind("compute slowed by traffic", _contended, "slowed", slowed_ms),
    Kind("input", _slow_input, "input", part_ms("input")),
)


@dataclass(frozen=True)
class Answer:
    """A run's known and shown length, in ms a step. error: relative; error_all: against the mean of all steps.

    kind: what is injected. job: how, for a message. draws: jobs that were drawn until this one was resolved.
    """

    kind: str
    job: object
    truth_ms: float
    truth_all_ms: float
    shown_ms: float
    step_ms: float
    draws: int = 1

    @property
    def error(self) -> float:
        """Relative error of the shown length."""
        return self.shown_ms / self.truth_ms - 1

    @property
    def error_all(self) -> float:
        """Relative error of the shown length, against the mean of all steps."""
        return self.shown_ms / self.truth_all_ms - 1

    @property
    def wrong(self) -> bool:
        """True if the error is beyond the limit."""
        return abs(self.error) > ERROR_MAX


def _deviation_ms(job: Job) -> float:
    """Standard deviation of the difference of two arms' compute that the drawn noise makes.

    Noise is one level a block; jitter is one of each step and rank. Medians deviate by a quarter more than means.
    """
    steps = job.ranks * (job.block_steps - 1)
    level = math.hypot(job.noise, 1.25 * job.jitter / math.sqrt(steps))
    return (job.forward_ms + job.backward_ms) * level * math.sqrt(2 / job.blocks)


def _resolved(kind: Kind, job: Job, truth_ms: float, step_ms: float) -> bool:
    """True if a length is large enough to be told from the noise of its job."""
    least_ms = RESOLVED_MIN * step_ms
    if kind.spent == "slowed":
        least_ms = max(least_ms, DEVIATIONS / ERROR_MAX * _deviation_ms(job))
    return truth_ms >= least_ms


def answer(kind: Kind, draw: Draw, seed: int) -> Answer:
    """Draw a job of this kind, run it, and compare what its report shows with the clock's count.

    Raises ValueError if the injected length is too short to be resolved in each of DRAWS_MAX jobs.
    """
    draws = 0
    while draws < DRAWS_MAX:
        draws += 1
        job = kind.inject(draw, _plain(draw))
        work, trace = work_of(job, seed)
        own = [step for step in trace.steps if str(step.arm) == job.arms[0] and step.index % job.block_steps > 0]
        numbers = np.array([step.index for step in own])
        durations_ms = np.array([step.duration_ns for step in own]) / MS
        long_ms = np.array([durations_ms[numbers == number].mean() for number in numbers])  # of all ranks
        spent_ms = np.array([work.spent[step.index, step.rank][kind.spent] for step in own])
        low, high = np.percentile(long_ms, [25, 75])
        middle = spent_ms[(low <= long_ms) & (long_ms <= high)]
        whole_ms = float(spent_ms.mean())
        truth_ms = whole_ms if kind.spent == "slowed" else float(middle.mean())
        if _resolved(kind, job, truth_ms, float(long_ms.mean())):
            break
    else:
        raise ValueError(f"{kind.name}: {DRAWS_MAX} jobs with an injected length that is too short")
    shown_ms = kind.shown(findings.find(trace))
    return Answer(kind.name, job, truth_ms, whole_ms, shown_ms, float(long_ms.mean()), draws)


def answers(count: int, seed: int, only: str = "") -> Iterator[Answer]:
    """Yield `count` answers of each kind whose name contains the text."""
    for kind in (kind for kind in KINDS if only in kind.name):
        for number in range(count):
            yield answer(kind, random.Random(f"{seed}/{kind.name}/{number}"), seed * 1000 + number)


def table(found: Sequence[Answer]) -> list[Mapping[str, str | float | int]]:
    """A row for each kind: runs, parts of the step, errors in percent, and runs beyond the limit.

    all_steps: the same errors against the mean of all steps.
    """
    rows: list[Mapping[str, str | float | int]] = []
    for kind in dict.fromkeys(one.kind for one in found):
        own = [one for one in found if one.kind == kind]
        errors = sorted(100 * abs(one.error) for one in own)
        all_steps = sorted(100 * abs(one.error_all) for one in own)
        parts = [100 * one.truth_ms / one.step_ms for one in own]
        rows.append(
            {
                "kind": kind,
                "runs": len(own),
                "least_part_percent": round(min(parts), 1),
                "largest_part_percent": round(max(parts), 1),
                "median_error_percent": round(statistics.median(errors), 2),
                "nine_of_ten_percent": round(errors[math.ceil(0.9 * len(errors)) - 1], 2),
                "largest_error_percent": round(errors[-1], 2),
                "beyond": sum(one.wrong for one in own),
                "all_steps_median_percent": round(statistics.median(all_steps), 2),
                "all_steps_largest_percent": round(all_steps[-1], 2),
                "all_steps_beyond": sum(abs(one.error_all) > ERROR_MAX for one in own),
            }
        )
    return rows
