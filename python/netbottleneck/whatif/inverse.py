"""Inverse questions: the least of something that reaches an aim, found by halves, with the interval of the fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from netbottleneck.analysis.stats import Estimate
from netbottleneck.whatif.questions import PREDICTED, End, Job, Setting, ends, interval, play, scaling

# A step that is longer by no more than this gains nothing.
NOTHING = 0.01
# Halvings of a search: a factor of 10^6 between its ends is found to 0.2 %.
HALVINGS = 13


@dataclass(frozen=True, slots=True)
class Least:
    """The answer to an inverse question: the least `what` that reaches the aim, and its interval.

    value is None where none does, `reason` says why; an end of the interval that was not found is inf."""

    question: str
    aim: str
    value: Estimate | None
    reason: str = ""
    interval: bool = True
    label: str = PREDICTED
    workers: int = 0
    ranks_per_host: int = 1
    link_bps: float | None = None


def _search(meets: Callable[[float], bool], low: float, high: float, whole: bool) -> float:
    """The least value between low and high that meets an aim which high meets; by halves, of the logarithm."""
    if meets(low):
        return low
    for _ in range(HALVINGS if not whole else max(1, math.ceil(math.log2(high)))):
        if whole and high - low <= 1:
            break
        middle = float(round((low + high) / 2)) if whole else math.sqrt(low * high)
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class Aim:
    """What an inverse question wants. question: kind and unit; span: where to look; whole: numbers only."""

    question: str
    words: str
    span: tuple[float, float]
    whole: bool = False


def least(job: Job, aim: Aim, make: Callable[[float], Setting], limit_ns: Callable[[End], float]) -> Least:
    """The least value whose setting has a step of at most limit_ns, at each end of what it is not sure of.

    A larger value must never make a step longer."""
    low, high = aim.span
    best = make(high)
    told = Least(aim.question, aim.words, None, workers=best.workers, ranks_per_host=best.cost.ranks_per_host)
    try:
        reached_ns = play(job, best).step_ns
    except ValueError as error:
        return replace(told, reason=str(error))

    def found(end: End) -> float:
        bound_ns = limit_ns(end)

        def meets(value: float) -> bool:
            setting = make(value)
            try:
                return play(end.job, setting, end.bent(setting.cost)).step_ns <= bound_ns
            except ValueError:
                return False  # an operation is longer than the simulation knows: the best setting's was not

        return _search(meets, low, high, aim.whole) if meets(high) else math.inf

    value = found(End("", job))
    if math.isinf(value):
        return replace(told, reason=f"at most {100 * scaling(job, reached_ns):.1f} % is reached")
    others = ends(job, best.cost)
    between = interval(value, others, [found(end) for end in others])
    between = replace(between, low=max(low, between.low))  # ends that are added in squares reach too far
    return replace(told, value=between, interval=bool(others))
