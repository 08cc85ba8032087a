"""The judgement of benchmarks/auto.py: whether the arm that auto keeps is the best one."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import auto  # noqa: E402


def one(ratio: tuple[float, float, float], by_step: int = 100, cost: float = 0.01) -> auto.Outcome:
    return auto.Outcome("2000mbit", 256, 10.0, "tcp", "stock", by_step, ratio, 20.0, cost)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        ((1.0, 1.0, 1.0), "right"),
        ((0.95, 1.0, 1.02), "right"),
        ((0.957, 1.15, 1.569), "undecided"),
        ((0.0, 1.0, math.inf), "undecided"),
        ((1.03, 1.15, 1.2), "wrong"),
    ],
)
def test_an_arm_is_right_only_if_it_is_surely_not_slower(ratio: tuple[float, float, float], expected: str) -> None:
    assert one(ratio).judged == expected
    assert one(ratio, by_step=auto.BY_STEP + 1).judged == "wrong"


def test_what_is_undecided_is_named_and_not_right() -> None:
    right = one((1.0, 1.0, 1.0))
    assert auto.summary([right] * 20)[1]
    found, passed = auto.summary([right] * 18 + [one((0.957, 1.15, 1.569))] * 2)
    assert "18 of 20 right; 2 undecided (2000mbit, width 256; 2000mbit, width 256); trials cost" in found
    assert not passed


def test_trials_that_cost_too_much_do_not_pass() -> None:
    cheap, dear = one((1.0, 1.0, 1.0)), one((1.0, 1.0, 1.0), cost=0.021)
    assert auto.summary([cheap] * 20)[1]
    found, passed = auto.summary([cheap] * 19 + [dear])
    assert "at most 2 % of a run of 2000 steps or 30 s in 19 of 20" in found
    assert not passed
