"""Assignment of the steps of a run to arms, which alternate by blocks of steps.

`Blocks` has a fixed order. A `Deciding` one depends on the steps before: all ranks exchange their step times at the end
of each block, and every rank decides by the same values, so all decide the same.
"""

import math
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import Any

from netbottleneck.analysis.comparisons import Estimate, middle_of_sequence
from netbottleneck.analysis.thresholds import GAIN_MIN
from netbottleneck.trace.model import KNOWN
from netbottleneck.trace.transports import BARE, STOCK, Arm
from netbottleneck.units import percent

# The difference between two arms is known if its interval, in so many tests in a row, was from at least so many pairs
# of blocks, was at most so wide to each side, of the step or of the difference, and was far from a gain of GAIN_MIN of
# either arm. The width matters most: an interval that ends a run because of its place covers less than 95 %.
KNOWN_TESTS, KNOWN_PAIRS, KNOWN_WIDTH, KNOWN_PART = 3, 10, GAIN_MIN / 2, 0.25
# The limits must be so many times as far from the value as the ends of its interval: it is tested again and again.
KNOWN_FAR = 1.5
# From test to test the pairs grow by one in so many: a test takes longer the more there are. The most pairs of a run.
TEST_PART, PAIRS_MOST = 20, 400

VALUES = struct.Struct(
    "<QQQQ"
)  # of a rank at the end of a block: step; ns of the fastest, the median, the slowest step


@dataclass(frozen=True)
class Blocks:
    """Assignment of steps to arms: blocks of equal length, with the order of the arms reversed from cycle to cycle.

    So a drift of the machine favours no arm (A B, B A, A B, …). turns: the arms that take turns; (): all. The block
    first_block begins with the step first_step.
    """

    arms: tuple[Arm, ...]
    length: int
    turns: tuple[Arm, ...] = ()
    first_step: int = 0
    first_block: int = 0

    def at(self, step: int) -> tuple[int, int]:
        """Return (block, index of the arm) of a step."""
        turns = self.turns or self.arms
        block = (step - self.first_step) // self.length
        cycle, position = divmod(block, len(turns))
        return self.first_block + block, self.arms.index(turns[position if cycle % 2 == 0 else -1 - position])

    def ends_before(self, step: int) -> bool:
        """Return False: arms change without a decision."""
        return False

    def exact_after(self, step: int) -> bool:
        """Return False: times of steps are not compared while the run goes on."""
        return False

    def took(self, ns: int) -> None:
        """Ignore the time of a step."""

    def values(self, step: int) -> bytes:
        """Return what ranks compare before the arm changes."""
        return step.to_bytes(8, "little")

    def decide(self, step: int, of_ranks: Iterable[bytes]) -> str:
        """Return "": nothing is to be decided."""
        return ""


def observing(length: int, start_step: int) -> Blocks:
    """Return the assignment of an observing run: stock has the first recorded block, so that a short run has some."""
    plan = Blocks((STOCK, BARE), length)
    first = plan.arms[plan.at(start_step)[1]]
    return plan if first == STOCK else Blocks(plan.arms, length, (BARE, STOCK))


@dataclass(frozen=True, slots=True)
class Block:
    """Step times of a block in ns, each the largest of the ranks': the fastest, the median and the slowest step."""

    fastest: int
    median: int
    slowest: int


class Deciding(ABC):
    """Assignment by the steps before. Has the interface of Blocks.

    length: steps in a block. runs_ahead: a device computes, and the host's time of a step is its own only over all
    steps between two that `exact_after` names.
    """

    def __init__(self, arms: Sequence[Arm], length: int) -> None:
        self.arms = tuple(arms)
        self.length = length
        self.runs_ahead = False
        self._end = length  # first step after the current block
        self._times: list[int] = []  # ns of its steps on this rank

    @abstractmethod
    def at(self, step: int) -> tuple[int, int]:
        """Return (block, index of the arm) of the current step."""

    @abstractmethod
    def unfinished(self, step: int) -> str:
        """Return a line for people if a run that ends before this step has not found what it was to find, else ""."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return what was found, for the run's record; an infinite interval is None."""

    @abstractmethod
    def _decide(self, step: int, block: Block) -> str:
        """Begin the next block. Returns as `decide`."""

    def ends_before(self, step: int) -> bool:
        """Return True if a block ends before this step: all ranks then exchange `values` and call `decide`."""
        return step >= self._end

    def took(self, ns: int) -> None:
        """Note the time of a step."""
        self._times.append(ns)

    def exact_after(self, step: int) -> bool:
        """Return True if this step, not noted yet, is the first or the last of its block."""
        return not self._times or self.ends_before(step + 1)

    def values(self, step: int) -> bytes:
        """Return what the other ranks need of the block that ends before this step."""
        counted = self._times[1:] or self._times or [0]
        counted = [round(mean(counted))] if self.runs_ahead else counted
        return VALUES.pack(step, min(counted), round(median(counted)), max(counted))

    def decide(self, step: int, of_ranks: Iterable[bytes]) -> str:
        """Begin the next block, by the values of all ranks. Returns a line for people if something was found, or ""."""
        rows = [VALUES.unpack(values) for values in of_ranks]
        block = Block(*(max(row[place] for row in rows) for place in (1, 2, 3)))
        self._times = []
        return self._decide(step, block)


class UntilKnown(Deciding):
    """The order of Blocks, until the difference of each arm from the first is known; from then on the first alone.

    At the latest after PAIRS_MOST pairs of blocks. Blocks count that lie within start_step and end_step (0: no end),
    and have two steps or more.
    """

    def __init__(self, arms: Sequence[Arm], length: int, start_step: int = 0, end_step: int = 0) -> None:
        super().__init__(arms, length)
        self.known_at: int | None = None
        self.against_first: dict[str, Estimate] = {}
        self._plan = Blocks(self.arms, length)
        self._counted = range(start_step, end_step + 1 if end_step else sys.maxsize)
        self._cycle: dict[Arm, Block] = {}
        self._logs: dict[Arm, list[float]] = {arm: [] for arm in self.arms[1:]}  # of step time over the first arm's
        self._known = 0  # consecutive tests in which all differences were known

    def at(self, step: int) -> tuple[int, int]:
        """Return (block, index of the arm) of a step."""
        return self._plan.at(step)

    def ends_before(self, step: int) -> bool:
        """As Deciding.ends_before. False once the differences are known."""
        return self.known_at is None and super().ends_before(step)

    def took(self, ns: int) -> None:
        """Note the time of a step, unless the differences are known."""
        if self.known_at is None:
            super().took(ns)

    def exact_after(self, step: int) -> bool:
        """As Deciding.exact_after. False once the differences are known."""
        return self.known_at is None and super().exact_after(step)

    def unfinished(self, step: int) -> str:
        """As Deciding.unfinished."""
        if self.known_at is not None:
            return ""
        return f"The transports alternated until the run ended at step {step}: a difference between them is not known"

    def described(self) -> dict[str, Any]:
        """As Deciding.described."""
        found = {arm: each.as_dict() for arm, each in self.against_first.items()}
        return {"until_known": {"known_at": self.known_at, "against_first": found}}

    def _decide(self, step: int, block: Block) -> str:
        number, place = self._plan.at(step - 1)
        self._end = step + self.length
        if self.length > 1 and step - self.length in self._counted and step in self._counted:
            self._cycle[self.arms[place]] = block
        if (number + 1) % len(self.arms):
            return ""
        cycle, self._cycle = self._cycle, {}
        if len(cycle) < len(self.arms):
            return ""
        first = max(cycle[self.arms[0]].median, 1)
        for arm, logs in self._logs.items():
            logs.append(math.log(max(cycle[arm].median, 1) / first))
        pairs = len(self._logs[self.arms[1]])
        if pairs % max(1, pairs // TEST_PART) == 0:
            self._known = self._known + 1 if all(map(is_known, self._logs.values())) else 0
        if self._known >= KNOWN_TESTS:
            return self._ends(step, number, "")
        return self._ends(step, number, f" as well as {pairs} pairs of blocks tell") if pairs >= PAIRS_MOST else ""

    def _ends(self, step: int, number: int, how: str) -> str:
        self.known_at = step
        self._plan = Blocks(self.arms, self.length, self.arms[:1], step, number + 1)
        self.against_first = {str(arm): ratio_of(logs) for arm, logs in self._logs.items()}
        return (
            f"{KNOWN}{how}: from step {step} on {self.arms[0]}; step time against {self.arms[0]} "
            f"(measured, 95 % interval): {changes(self.against_first)}"
        )


def is_known(logs: Sequence[float]) -> bool:
    """Return True if the difference of two arms, by the logarithms of their step times' ratio, is known for now."""
    if len(logs) < KNOWN_PAIRS:
        return False
    found = middle_of_sequence(logs)
    wide = (found.high - found.low) / 2
    low, high = (found.value + KNOWN_FAR * (end - found.value) for end in (found.low, found.high))
    undecided = any(low <= limit <= high for limit in (math.log1p(-GAIN_MIN), -math.log1p(-GAIN_MIN)))
    return wide <= max(KNOWN_WIDTH, KNOWN_PART * abs(found.value)) and not undecided


def ratio_of(logs: Sequence[float]) -> Estimate:
    """Return the ratio of which these are logarithms, with its 95 % interval."""
    found = middle_of_sequence(logs)
    return Estimate(*(math.exp(end) for end in (found.value, found.low, found.high)))


def changes(ratios: Mapping[str, Estimate]) -> str:
    """Return ratios as changes with their intervals, for people."""
    change = partial(percent, digits=1, signed=True)

    def interval(ratio: Estimate) -> str:
        ends = ratio.low - 1, ratio.high - 1
        return f"[{', '.join(map(change, ends))}]" if ratio.known else "(too few pairs)"

    return ", ".join(f"{name} {change(ratio.value - 1)} {interval(ratio)}" for name, ratio in ratios.items())
