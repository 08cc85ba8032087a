"""Blocks of steps, in which the arms of a run take turns in a fixed order."""

from __future__ import annotations

from collections import Counter

import pytest

from netbottleneck import config
from netbottleneck.runtime.blocks import observing
from netbottleneck.trace.transports import BARE, STOCK


@pytest.mark.parametrize("period", [2, 5, 8, 10, 20, 25, 50, 64, 100, 500])
def test_work_of_a_usual_period_falls_into_all_blocks_alike(period: int) -> None:
    """Each arm has its share of it in the steps that count: all but the first of a block."""
    settings = config.settings(environ={})
    length = settings.block_steps
    plan = observing(length, settings.start_step)
    steps = [step for step in range(4 * length * period) if step % length]
    arms = {step: plan.arms[plan.at(step)[1]] for step in steps}
    counted = Counter(arms.values())
    assert counted.keys() == {STOCK, BARE}
    for first in range(period):
        working = Counter(arms[step] for step in steps if step % period == first)
        assert {arm: period * count for arm, count in working.items()} == counted
