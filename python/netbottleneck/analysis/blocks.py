"""Blocks of steps that take turns: neighbours make pairs, which are drawn again for an interval. Pure and seeded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from netbottleneck.trace.model import Step

BOOTSTRAP_DRAWS = 2000
BOOTSTRAP_SEED = 0


def by_block(rows: Iterable[tuple[Step, Sequence[float]]]) -> dict[int, NDArray[np.float64]]:
    """By block: of each step what `rows` tell of it on each rank, the median over the ranks that finished it."""
    by_step: dict[tuple[int, int], list[Sequence[float]]] = defaultdict(list)
    for step, told in rows:
        by_step[step.block, step.index].append(told)
    blocks: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
    for (block, _), of_ranks in sorted(by_step.items()):
        blocks[block].append(np.median(np.array(of_ranks, np.float64), axis=0))
    return {block: np.array(steps) for block, steps in blocks.items()}


def _pairs(
    base: Mapping[int, NDArray[np.float64]], other: Mapping[int, NDArray[np.float64]]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Neighbouring blocks of two transports, each block once: blocks of third transports between them do not count."""
    blocks = sorted([(block, 0) for block in base] + [(block, 1) for block in other])
    found = []
    place = 0
    while place + 1 < len(blocks):
        (left, is_other), (right, next_is_other) = blocks[place], blocks[place + 1]
        if is_other == next_is_other:
            place += 1
            continue
        found.append((base[right], other[left]) if is_other else (base[left], other[right]))
        place += 2
    return found


@dataclass(frozen=True, slots=True)
class Drawn:
    """Medians of steps of pairs of neighbouring blocks: as found, (pairs, …), and as redrawn, (draws, pairs, …)."""

    steps: int
    base: NDArray[np.float64]
    other: NDArray[np.float64]
    base_drawn: NDArray[np.float64]
    other_drawn: NDArray[np.float64]


def redrawn(
    base: Mapping[int, NDArray[np.float64]], other: Mapping[int, NDArray[np.float64]], seed: int = BOOTSTRAP_SEED
) -> Drawn | None:
    """Pairs of neighbouring blocks, drawn again, and the steps within each; None where no two blocks are neighbours.

    A block is an array of its steps, one number each or a row; those of a row stay together."""
    pairs = _pairs(base, other)
    if not pairs:
        return None
    random = np.random.default_rng(seed)

    def redraw(steps: NDArray[np.float64]) -> NDArray[np.float64]:
        picks: NDArray[np.int64] = random.integers(len(steps), size=(BOOTSTRAP_DRAWS, len(steps)))
        return np.asarray(np.median(steps[picks], axis=1), np.float64)

    found = [[np.median(steps, axis=0) for steps in pair] for pair in pairs]
    drawn = [[redraw(steps) for steps in pair] for pair in pairs]
    which = random.integers(len(pairs), size=(BOOTSTRAP_DRAWS, len(pairs)))
    column = random.integers(BOOTSTRAP_DRAWS, size=which.shape)
    sides = [np.array([pair[side] for pair in drawn])[which, column] for side in (0, 1)]
    steps = sum(len(a) + len(b) for a, b in pairs)
    return Drawn(steps, *(np.array([pair[side] for pair in found]) for side in (0, 1)), *sides)
