"""Verdicts on figures: pure functions from the rounds of one interleaved run to a value and its 95 % interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.comparisons import Estimate

DRAWS = 2000
SEED = 1
LEAST_ROUNDS = 6  # fewer do not support a verdict

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A value and its bar (its minimum). reason: why it was not measured. broken: why the value is invalid.

    event: the value of an event, which needs fewer rounds.
    """

    name: str
    bar: float
    estimate: Estimate | None = None
    rounds: int = 0
    note: str = ""
    reason: str = ""
    broken: str = ""
    event: bool = False

    @property
    def verdict(self) -> str:
        """One of "pass", "fail", "undecided" and "not run"."""
        if self.reason or self.estimate is None:
            return "not run"
        enough = self.event or self.rounds >= LEAST_ROUNDS
        if self.broken or (enough and self.estimate.high < self.bar):
            return "fail"
        return "pass" if enough and self.estimate.low >= self.bar else "undecided"

    @property
    def margin(self) -> float:
        """Lower end of the interval over the bar; -1 if not run."""
        return -1.0 if self.estimate is None else self.estimate.low / self.bar

    def line(self, label: str = "") -> str:
        """Return the figure as one line."""
        if self.verdict == "not run":
            return f"{label}{'not run:':<10}{self.reason or 'nothing was measured'} ({self.name}, bar {self.bar:g})"
        found = self.estimate or Estimate(0.0, 0.0, 0.0)
        spread = f"[{found.low:.3f}, {found.high:.3f}] n={self.rounds}"
        text = f"{label}{self.verdict:<10}{found.value:7.3f} {spread:<24} bar {self.bar:<5g} {self.name}"
        return "; ".join(filter(None, [text, self.note, self.broken]))

    def to_json(self) -> dict[str, Any]:
        """Return the figure as JSON values."""
        found = self.estimate
        interval = None if found is None else [found.low, found.high]
        return {
            "name": self.name,
            "bar": self.bar,
            "value": None if found is None else found.value,
            "interval_95": interval,
            "rounds": self.rounds,
            "verdict": self.verdict,
            "note": "; ".join(filter(None, [self.note, self.reason, self.broken])),
        }


def worst(figures: Sequence[Figure]) -> Figure:
    """Return the figure that decides a gate's verdict."""
    order = ("fail", "not run", "undecided", "pass")
    return min(figures, key=lambda figure: (order.index(figure.verdict), figure.margin))


def _middle(rounds: Floats) -> Floats:
    found: Floats = np.median(rounds, axis=-1)
    return found


def _mean(rounds: Floats) -> Floats:
    found: Floats = np.mean(rounds, axis=-1)
    return found


def drawn(statistic: Callable[[NDArray[np.int64]], Floats], rounds: int) -> Estimate:
    """Return a statistic of rounds and its 95 % percentile interval, by a bootstrap over rounds.

    statistic: of indices of rounds, along the last axis. Source: Efron and Tibshirani, An Introduction to the
    Bootstrap, section 13.3.
    """
    indices = np.random.default_rng(SEED).integers(0, rounds, (DRAWS, rounds))
    low, high = (float(x) for x in np.quantile(statistic(indices), (0.025, 0.975)))
    return Estimate(float(statistic(np.arange(rounds)[None, :])[0]), low, high)


def ratio(ours: Sequence[float], theirs: Mapping[str, Sequence[float]], *, means: bool = False) -> Estimate:
    """Return the least of theirs divided by ours: medians over rounds, or means.

    Each bootstrap draw takes the same rounds of all, and the best of theirs. Raises ValueError if rounds do not match.
    """
    if not theirs or any(len(each) != len(ours) for each in theirs.values()) or not ours:
        raise ValueError("both sides of a ratio need the same number of rounds")
    middle = _mean if means else _middle
    mine, others = np.asarray(ours, np.float64), [np.asarray(each, np.float64) for each in theirs.values()]

    def statistic(indices: NDArray[np.int64]) -> Floats:
        best: Floats = np.min([middle(each[indices]) for each in others], axis=0)
        return best / np.maximum(middle(mine[indices]), 1e-12)

    return drawn(statistic, len(ours))


def closeness(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Return the ratio of two medians, the smaller over the larger: 1 if equal, 0.85 if one is 15 % below the other."""
    mine, other = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)

    def statistic(indices: NDArray[np.int64]) -> Floats:
        found = _middle(mine[indices]) / _middle(other[indices])
        near: Floats = np.minimum(found, 1 / np.maximum(found, 1e-12))
        return near

    return drawn(statistic, len(mine))


def held_out(ours: Sequence[float], fixed: Mapping[str, Sequence[float]]) -> tuple[Estimate, str]:
    """Return the best of the fixed ones divided by ours, and its name.

    Odd rounds select the best, even rounds give its value: so the selection does not bias the value.
    """
    best = min(fixed, key=lambda name: float(np.median(np.asarray(fixed[name])[1::2])))
    return ratio(list(ours)[::2], {best: list(fixed[best])[::2]}), best


def certain(value: float) -> Estimate:
    """Return a value without an interval, such as that of an event."""
    return Estimate(value, value, value)
