"""Ranks that decide about their arms by exchanged step times, simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from netbottleneck.runtime.blocks import Deciding
from netbottleneck.trace.transports import STOCK, Arm

TCP, OFI = Arm("tcp"), Arm("ofi")
ARMS = (STOCK, TCP, OFI)
MS = 10**6

Plan = TypeVar("Plan", bound=Deciding)


class Deciders(Generic[Plan]):
    """Ranks, each with its plan. step_ms(arm, step, rank): the time of a rank's step."""

    def __init__(
        self, plans: Sequence[Plan], step_ms: Callable[[Arm, int, int], float], *, runs_ahead: bool = False
    ) -> None:
        self.plans = plans
        for plan in plans:
            plan.runs_ahead = runs_ahead
        self.step_ms = step_ms
        self.step = 0
        self.arms: list[Arm] = []
        self.blocks: list[int] = []
        self.lines: list[str] = []

    def run(self, steps: int) -> Deciders[Plan]:
        """Make steps."""
        arms = self.plans[0].arms
        for _ in range(steps):
            if self.plans[0].ends_before(self.step):
                values = [plan.values(self.step) for plan in self.plans]
                (line,) = {plan.decide(self.step, values) for plan in self.plans}
                self.lines += [line] if line else []
            ((block, place),) = {plan.at(self.step) for plan in self.plans}
            self.arms.append(arms[place])
            self.blocks.append(block)
            for rank, plan in enumerate(self.plans):
                plan.took(round(MS * self.step_ms(arms[place], self.step, rank)))
            self.step += 1
        return self


def steady(seed: int, times: Mapping[Arm, float], noise: float = 0.05) -> Callable[[Arm, int, int], float]:
    """Return independent step times around those of the arms, in ms."""
    draw = np.random.default_rng(seed)
    return lambda arm, _step, _rank: times[arm] * math.exp(noise * draw.normal())
