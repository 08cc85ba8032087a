"""Medians over the blocks of an arm with their 95 % intervals: bootstrap over blocks and over steps within each.

As stats.compare does for pairs of blocks; pure and seeded.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from netbottleneck.analysis.blocks import BOOTSTRAP_DRAWS, BOOTSTRAP_SEED
from netbottleneck.analysis.stats import Estimate

Blocks = Mapping[int, NDArray[np.float64]]


def _draws(blocks: Blocks, seed: int) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    drawn = np.array(
        [np.median(own[random.integers(len(own), size=(BOOTSTRAP_DRAWS, len(own)))], axis=1) for own in blocks.values()]
    )
    which = random.integers(len(drawn), size=(BOOTSTRAP_DRAWS, len(drawn)))
    column = random.integers(BOOTSTRAP_DRAWS, size=which.shape)
    return np.asarray(np.median(drawn[which, column], axis=1), np.float64)


def _middle(blocks: Blocks) -> float:
    return float(np.median([np.median(own) for own in blocks.values()]))


def _estimate(value: float, draws: NDArray[np.float64]) -> Estimate:
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def median(blocks: Blocks, seed: int = BOOTSTRAP_SEED) -> Estimate | None:
    """The median of the blocks' medians; None of no blocks."""
    return _estimate(_middle(blocks), _draws(blocks, seed)) if blocks else None


def ratio(above: Blocks, below: Blocks, seed: int = BOOTSTRAP_SEED) -> Estimate | None:
    """One arm's median over another's, not paired: for arms that did not take turns."""
    if not above or not below:
        return None
    return _estimate(_middle(above) / _middle(below), _draws(above, seed) / _draws(below, seed + 1))


def inverse(one: Estimate) -> Estimate:
    """1 over it."""
    return Estimate(1 / one.value, 1 / one.high, 1 / one.low)
