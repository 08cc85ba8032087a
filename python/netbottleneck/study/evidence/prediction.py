"""What was forecast of each cell against what was then measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from netbottleneck.analysis.stats import Estimate
from netbottleneck.study.evidence.values import CellFacts

# A forecast is good within the first, and still of use within the second.
GOOD, FAIR = 0.05, 0.12
# A step hides communication well where less of it than this is exposed: then it is easily foretold.
EXPOSED_MIN = 0.20


@dataclass(frozen=True, slots=True)
class Miss:
    """One arm of one cell. error: predicted over measured step, less 1; exposed: the part of the step that was."""

    key: str
    arm: str
    predicted_ns: Estimate
    measured_ns: Estimate
    exposed: float | None

    @property
    def error(self) -> float:
        """Signed, as a part of the measured step."""
        return self.predicted_ns.value / self.measured_ns.value - 1


@dataclass(frozen=True, slots=True)
class Record:
    """All forecasts of a study. median, worst: of the errors' sizes. good, fair: how many within GOOD and FAIR.

    exposed: of how many at least EXPOSED_MIN of the step was exposed. refused: (cell, arm, why)."""

    misses: tuple[Miss, ...]
    refused: tuple[tuple[str, str, str], ...] = ()

    @property
    def errors(self) -> tuple[float, ...]:
        """Without signs."""
        return tuple(abs(miss.error) for miss in self.misses)

    @property
    def median(self) -> float:
        """Of the errors. Raises ValueError where there is no forecast."""
        return statistics.median(self.errors)

    @property
    def worst(self) -> Miss:
        """The forecast that was furthest off. Raises ValueError where there is none."""
        return max(self.misses, key=lambda miss: abs(miss.error))

    def within(self, limit: float) -> int:
        """How many are off by no more than this."""
        return sum(error <= limit for error in self.errors)

    @property
    def exposed(self) -> int:
        """How many have a step that is not easily foretold."""
        return sum(miss.exposed is not None and miss.exposed >= EXPOSED_MIN for miss in self.misses)


def record(cells: Sequence[CellFacts]) -> Record:
    """Every arm that moves bytes and was forecast before it ran."""
    misses, refused = [], []
    for cell in cells:
        for arm in cell.transports:
            told = cell.forecast.get(arm.name)
            if told is None:
                continue
            if told.step_ns is None:
                refused.append((cell.key, arm.name, told.why))
                continue
            share = None if arm.parts is None else arm.parts.exposed_ns / arm.parts.step_ns
            misses.append(Miss(cell.key, arm.name, told.step_ns, arm.step_ns, share))
    return Record(tuple(misses), tuple(refused))
