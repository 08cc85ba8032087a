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


def together(rows: Sequence[RunSteps]) -> RunSteps:
    """Return the sum of rows that follow each other; there is at least one."""
    return RunSteps(
        rows[0].first,
        sum(row.count for row in rows),
        sum(row.total_ns for row in rows),
        max(row.longest_ns for row in rows),
        sum(row.waited_ns for row in rows),
    )


def between(rows: Sequence[RunSteps], first: int, last: float) -> str:
    """Return a sentence about the rows that are wholly within some steps; "" if there is none."""
    within = [row for row in rows if row.count and first <= row.first and row.first + row.count - 1 <= last]
    if not within:
        return ""
    whole, end = together(within), within[-1].first + within[-1].count - 1
    mean = f"took {ms(whole.total_ns / whole.count)} on average"
    waiting = f"{ms(whole.waited_ns / whole.count)} of it waiting for communication"
    return f"Steps {whole.first} to {end} {mean}, {waiting}, and at most {ms(whole.longest_ns)} (measured)"
