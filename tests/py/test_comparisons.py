"""Intervals of comparisons: their coverage, their limits, and the number of pairs that a comparison needs."""

import math
import tracemalloc

import numpy as np
import pytest

from netbottleneck.analysis import changes, comparisons
from netbottleneck.analysis.intervals import middle_half
from netbottleneck.trace.transports import Arm

A, B = Arm("a"), Arm("b")
RATIO = 0.95
RUNS = 1000


def correlated(random, shape, rho, noise):
    """First-order autoregressive values along the last axis, each of variance 1."""
    fresh = noise(shape)
    values = fresh.copy()
    for place in range(1, shape[-1]):
        values[..., place] = rho * values[..., place - 1] + math.sqrt(1 - rho**2) * fresh[..., place]
    return values


def blocks_of_runs(random, pairs, tails):
    """Steps of RUNS runs, shape (runs, blocks, steps): blocks and the steps in them are alike, as on a real machine."""
    noise = random.standard_normal if tails == "normal" else lambda shape: random.standard_t(3, shape)
    between = correlated(random, (RUNS, 2 * pairs), 0.6, random.standard_normal)
    within = correlated(random, (RUNS, 2 * pairs, 6), 0.6, noise)
    return 1e8 * np.exp(0.02 * between[..., None] + 0.03 * within)


@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize("pairs", [3, 4, 5, 6, 7, 8, 10, 14])
def test_an_interval_covers_the_true_ratio_at_every_number_of_pairs(pairs, tails):
    steps = blocks_of_runs(np.random.default_rng(pairs), pairs, tails)
    second = np.array([False, True, True, False] * pairs)[: 2 * pairs]  # the arms alternate as in a session
    covered = claimed = 0
    for run in steps:
        base = {block: run[block] for block in np.flatnonzero(~second)}
        other = {block: run[block] for block in np.flatnonzero(second)}
        found = comparisons.compare_blocks(A, B, base, {block: RATIO * own for block, own in other.items()})
        covered += found.ratio.low <= RATIO <= found.ratio.high
        equal = comparisons.compare_blocks(A, B, base, other)
        claimed += equal.enough and equal.gain.low > 0
    assert covered >= 0.93 * RUNS
    assert claimed <= 0.035 * RUNS


@pytest.mark.parametrize("pairs", [5, 8, 12, 20, 50, 120])
def test_an_interval_covers_where_steps_are_alike_beyond_their_block(pairs):
    """The pairs' ratios are then alike, too: with 50 pairs their correlation is 0.15."""
    random = np.random.default_rng(pairs)
    steps = 0.05 * correlated(random, (RUNS, 2 * pairs * 10), 0.9, random.standard_normal)
    levels = np.median(steps.reshape(RUNS, 2 * pairs, 10)[..., 1:], axis=-1)
    second = np.array([False, True, True, False] * pairs)[: 2 * pairs]
    logs = (levels[:, second] - levels[:, ~second]).reshape(RUNS, pairs)
    found = [comparisons.middle_of_sequence(run) for run in logs]
    assert sum(one.low <= 0 <= one.high for one in found) >= 0.93 * RUNS
    plain = [comparisons.middle(run) for run in logs]
    assert pairs < 20 or sum(one.low <= 0 <= one.high for one in plain) < 0.93 * RUNS


def test_an_interval_of_independent_pairs_is_hardly_wider():
    random = np.random.default_rng(9)
    runs = random.standard_normal((RUNS, 20))
    wide = [
        [one.high - one.low for one in map(which, runs)]
        for which in (comparisons.middle_of_sequence, comparisons.middle)
    ]
    assert 1.0 <= np.mean(wide[0]) / np.mean(wide[1]) <= 1.1


@pytest.mark.parametrize("steps", [20, 60, 200])
def test_the_mean_of_steps_that_are_alike_is_covered(steps):
    random = np.random.default_rng(steps)
    runs = 100 + 5 * correlated(random, (RUNS, steps), 0.5, random.standard_normal)
    found = [comparisons.mean_of_steps(run) for run in runs]
    assert sum(one.low <= 100 <= one.high for one in found) >= 0.93 * RUNS
    independent = [comparisons.mean_of_steps(run) for run in random.normal(100, 5, (RUNS, steps))]
    assert sum(one.low <= 100 <= one.high for one in independent) >= 0.93 * RUNS


def covered_middles(random, lengths, many):
    """Part of the runs whose interval has the true mean of the middle half: the worst of the length, and a part of it.

    lengths: of the steps of each run; many: the same of very many steps.
    """

    def part_of(own):
        return 0.3 * own + 2e6 * random.standard_normal(own.shape)

    middle, shares = middle_half(many), []
    for values, truth in ((lengths, many[middle].mean()), (part_of(lengths), part_of(many)[middle].mean())):
        found = [comparisons.mean_of_typical(*run) for run in zip(values, lengths, strict=True)]
        shares.append(float(np.mean([one.low <= truth <= one.high for one in found])))
    return min(shares)


@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_the_mean_of_the_middle_half_of_blocks_of_steps_is_covered(tails):
    pairs, random = 60, np.random.default_rng(60)
    base = np.array([True, False, False, True] * pairs)[: 2 * pairs]
    lengths = blocks_of_runs(random, pairs, tails)[:, base].reshape(RUNS, -1)
    assert covered_middles(random, lengths, blocks_of_runs(random, pairs, tails).ravel()) >= 0.93


@pytest.mark.parametrize("steps", [20, 60, 200])
def test_the_mean_of_the_middle_half_is_covered_as_that_of_all_steps(steps):
    random = np.random.default_rng(steps)
    many = random.normal(1e8, 3e6, 300_000)
    assert covered_middles(random, random.normal(1e8, 3e6, (RUNS, steps)), many) >= 0.93
    alike = 1e8 + 3e6 * correlated(random, (RUNS, steps), 0.5, random.standard_normal)
    assert covered_middles(random, alike, many) >= 0.93


def test_the_mean_of_the_middle_half_is_that_of_the_typical_steps():
    lengths = [9, 1, 4, 5, 6]
    assert comparisons.mean_of_typical([1, 2, 3, 4, 8], lengths).value == 5
    assert comparisons.mean_of_typical([1, 2, 6], lengths[:3]).value == 3
    single = comparisons.mean_of_typical([7], [1])
    assert (single.low, single.value, single.high) == (-math.inf, 7, math.inf)
    with pytest.raises(ValueError, match="at least one value"):
        comparisons.mean_of_typical([], [])


def test_the_quantiles_are_those_of_the_tables():
    known = {1: 12.706, 2: 4.303, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042}
    assert {n: comparisons.student(n) for n in known} == pytest.approx(known, abs=1e-3)
    assert comparisons.student(0) == math.inf
    assert comparisons.student(10**6) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize("count", [6, 7, 50, 51, 300])
@pytest.mark.parametrize("kind", ["normal", "tied", "equal", "negative", "wide"])
def test_the_middle_of_many_values_is_that_of_all_their_averages(count, kind, monkeypatch):
    random = np.random.default_rng(count)
    values = {
        "normal": random.standard_normal(count),
        "tied": random.integers(-2, 3, count) * 0.1,
        "equal": np.full(count, 0.3),
        "negative": -random.random(count) - 1e-3,
        "wide": random.standard_normal(count) * 10.0 ** random.integers(-200, 200, count),
    }[kind]
    whole = comparisons.middle(values)
    monkeypatch.setattr(comparisons, "WALSH_KEPT", 0)
    assert comparisons.middle(values) == whole


def test_the_middle_of_many_values_needs_little_memory():
    values = np.random.default_rng(1).standard_normal(20_000)
    tracemalloc.start()
    try:
        found = comparisons.middle(values)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100 * values.nbytes
    assert found.low < found.value < found.high


def test_the_signed_rank_interval_of_seven_values_ends_at_the_third_walsh_averages():
    found = comparisons.middle([1, 2, 3, 4, 5, 6, 7])
    assert (found.low, found.value, found.high) == (2.0, 4.0, 6.0)


def test_a_single_pair_has_no_bounds_and_two_are_not_enough():
    one = comparisons.middle([3.0])
    assert (one.low, one.value, one.high) == (-math.inf, 3.0, math.inf)
    two = comparisons.compare_blocks(
        A, B, {0: np.array([10.0]), 2: np.array([10.0])}, {1: np.array([8.0]), 3: np.array([8.0])}
    )
    assert not two.enough
    assert two.more_pairs(0.03) == 1


@pytest.mark.parametrize("blocks", [2, 3, 4, 8])
def test_equal_runs_of_any_number_of_blocks_are_rarely_surely_unlike(blocks):
    """The steps of a block are closer to each other than to those of another block."""
    random = np.random.default_rng(blocks)
    level, steps = random.standard_normal((RUNS, 2, blocks, 1)), random.standard_normal((RUNS, 2, blocks, 14))
    runs = np.exp(0.03 * level + 0.003 * steps)
    found = [comparisons.ratio_of_runs(*(dict(enumerate(1e8 * run)) for run in pair)) for pair in runs]
    assert sum(not one.low <= 1 <= one.high for one in found) <= 0.07 * RUNS


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_the_interval_of_runs_of_one_block_covers_steps_that_are_alike(rho):
    random = np.random.default_rng(7)
    runs = 1e8 * np.exp(0.03 * correlated(random, (RUNS, 2, 60), rho, random.standard_normal))
    found = [comparisons.ratio_of_runs({0: before}, {0: after}) for before, after in runs]
    assert sum(not one.low <= 1 <= one.high for one in found) <= 0.07 * RUNS


def test_no_value_is_an_error():
    for estimate in (comparisons.middle, comparisons.mean_of_steps):
        with pytest.raises(ValueError, match="at least one value"):
            estimate([])


def paired(ratio, spread, pairs):
    log = math.log(ratio)
    half = comparisons.student(pairs - 1) * spread / math.sqrt(pairs)
    interval = comparisons.Estimate(ratio, math.exp(log - half), math.exp(log + half))
    return comparisons.Paired(A, B, pairs, 10 * pairs, comparisons.Estimate(0, 0, 0), interval, spread)


def test_the_plan_says_how_many_more_pairs_decide():
    unsure = paired(0.95, 0.03, 3)
    assert unsure.gain.low < 0.03 < unsure.gain.high
    more = unsure.more_pairs(0.03)
    assert more > 0
    assert paired(0.95, 0.03, 3 + more).more_pairs(0.03) == 0
    assert paired(0.95, 0.03, 2 + more).more_pairs(0.03) > 0
    assert paired(0.5, 0.03, 3).more_pairs(0.03) == 0
    assert paired(1.0, 0.001, 3).more_pairs(0.03) == 0


def test_a_difference_of_nothing_needs_more_pairs_than_are_planned():
    assert comparisons.pairs_needed(0.0, 0.1) == comparisons.PLAN_MAX


@pytest.mark.parametrize(("expected", "covered"), [(3, 0.8), (8, 0.93), (30, 0.93)])
def test_the_mean_of_delays_is_covered_and_surely_not_below_the_interval(expected, covered):
    """Delays of several lengths in few of 100 steps. Of 3, the longest may not be among them."""
    inside = below = 0
    for seed in range(1000):
        draw = np.random.default_rng(seed)
        values = np.where(draw.random(100) < expected / 100, draw.choice([20.0, 200.0, 400.0], 100), 0.0)
        found = comparisons.mean_of_delays(values)
        truth = 620 / 3 * expected / 100
        inside += found.low <= truth <= found.high
        below += truth < found.low
    assert inside >= covered * 1000
    assert below <= 0.025 * 1000 + 10


def test_the_interval_of_equal_delays_is_that_of_their_number():
    """Poisson, 5 events: 1.62 to 11.67 (Garwood, 1936)."""
    found = comparisons.mean_of_delays([0.0] * 5 + [1.0] * 5)
    assert [10 * value for value in (found.value, found.low, found.high)] == pytest.approx([5, 1.62, 11.67], abs=0.03)
    assert comparisons.mean_of_delays([0.0, 0.0]) == comparisons.Estimate(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="at least one value"):
        comparisons.mean_of_delays([])


def test_no_change_is_seen_in_values_of_one_level():
    """Independent ones, ones that are alike near each other, arms in turns, and equal ones."""
    found = []
    for seed in range(400):
        draw = np.random.default_rng(seed)
        noise = draw.normal(0, 0.1, 500)
        groups = np.arange(500) // 10 % 3
        found += [
            changes.last_change(np.exp(noise + groups), groups),
            changes.last_change(np.exp(noise), groups * 0),
        ]
    assert sum(place > 0 for place in found) <= 1
    assert changes.last_change(np.ones(500), np.zeros(500, int)) == 0
    assert changes.last_change([], []) == 0


@pytest.mark.parametrize("factor", [0.8, 1.25, 3.0])
@pytest.mark.parametrize("after", [20, 100])
def test_the_last_change_is_found_where_it_is(factor, after):
    """Within a cycle of the arms, that take turns; a few steps are ten times as long."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        groups = np.arange(200 + after) // 5 % 2
        level = np.where(np.arange(200 + after) < 200, 1.0, factor) * np.where(draw.random(200 + after) < 0.02, 10, 1)
        values = np.exp(draw.normal(0, 0.02, 200 + after)) * level * (1 + groups)
        assert abs(changes.last_change(values, groups) - 200) <= 10


@pytest.mark.parametrize(("steps", "at"), [(100, 50), (100, 45), (120, 40), (90, 37), (200, 100)])
@pytest.mark.parametrize("factor", [0.6, 1.2])
def test_a_change_near_the_middle_is_found_among_arms_in_turns(steps, at, factor):
    """One arm has more steps before the change, the other one behind it: their medians are of different states."""
    place = np.arange(steps)
    groups = (place + 10) // 20 % 2  # A, B B, A A, ...
    found = []
    for seed in range(50):
        noise = np.random.default_rng(seed).normal(0, 0.02, steps)
        values = np.exp(noise) * np.where(place >= at, factor, 1.0) * (1 + 0.05 * groups)
        found.append(changes.last_change(values, groups))
    assert sum(abs(each - at) <= 1 for each in found) >= 47


def test_ten_steps_show_a_large_change():
    for seed in range(100):
        values = np.exp(np.random.default_rng(seed).normal(0, 0.1, 110)) * np.repeat([1.0, 2.0], [100, 10])
        assert 95 <= changes.last_change(values, np.zeros(110, int)) <= 100


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_steps_that_are_rarely_slow_are_a_change_and_a_few_are_none(share):
    for seed in range(20):
        draw = np.random.default_rng(seed)
        values = np.exp(draw.normal(0, 0.05, 260))
        few = values * np.where(draw.random(260) < 0.02, 3, 1)
        late = values * np.where((np.arange(260) >= 200) & (draw.random(260) < share), 3, 1)
        assert changes.last_change(few, np.zeros(260, int)) == 0
        assert 190 <= changes.last_change(late, np.zeros(260, int)) < 250


def test_values_that_are_like_their_neighbours_and_short_groups_of_slow_ones_are_no_change():
    found = []
    for seed in range(100):
        draw = np.random.default_rng(seed)
        noise = np.zeros(500)
        for at in range(1, 500):
            noise[at] = 0.9 * noise[at - 1] + draw.normal(0, 0.1 * math.sqrt(1 - 0.81))
        found.append(changes.last_change(np.exp(noise), np.zeros(500, int)))
    assert sum(place > 0 for place in found) <= 5
    for last in range(200, 500):
        values = np.where(np.arange(last) % 120 < 8, 2.0, 1.0) * np.exp(
            np.random.default_rng(last).normal(0, 0.02, last)
        )
        assert changes.last_change(values, np.zeros(last, int)) == 0


def test_only_the_last_of_several_changes_counts():
    values = np.repeat([1.0, 4.0, 2.0], 60) * np.exp(np.random.default_rng(1).normal(0, 0.05, 180))
    assert changes.last_change(values, np.zeros(180, int)) == 120
