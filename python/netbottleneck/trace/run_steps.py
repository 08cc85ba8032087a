"""Steps of a run that is longer than its record: some in a row, as sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netbottleneck.units import ms


@dataclass(frozen=True, slots=True)
class RunSteps:
    """`count` steps of one rank from `first` on. waited_ns: of total_ns, waiting for communication."""

    first: int
    count: int
    total_ns: int
    longest_ns: int
    waited_ns: int


def between(rows: Sequence[RunSteps], first: int, last: float) -> str:
    """Return a sentence about the rows that are wholly within some steps; "" if there is none."""
    within = [row for row in rows if row.count and first <= row.first and row.first + row.count - 1 <= last]
    if not within:
        return ""
    count, total_ns = sum(row.count for row in within), sum(row.total_ns for row in within)
    waited_ns, longest_ns = sum(row.waited_ns for row in within), max(row.longest_ns for row in within)
    end = within[-1].first + within[-1].count - 1
    mean = f"took {ms(total_ns / count)} on average, {ms(waited_ns / count)} of it waiting for communication"
    return f"Steps {within[0].first} to {end} {mean}, and at most {ms(longest_ns)} (measured)"
