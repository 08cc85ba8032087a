"""Every scenario of tests/scenarios with one seed: its verdict and saving, and not that verdict about its twin."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))

from scenario.cases import CASES
from scenario.judge import judge, run

SEED = 1
# A saving differs from the difference to the twin by at most this part.
ERROR_MAX = 0.25


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_scenario_gets_its_verdict_and_its_twin_does_not(make):
    result = run(make(random.Random(f"{SEED}/{make.__name__}")), SEED, judge)
    assert result.wrong == ()
    if result.error is not None:
        assert abs(result.error) < ERROR_MAX
