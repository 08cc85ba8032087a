"""NETBOTTLENECK_TRANSPORT=auto: trials of the arms, by simulated step times, and in jobs of two ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import Ranks

from deciding import ARMS, MS, OFI, TCP, Deciders, steady
from netbottleneck import config
from netbottleneck.report import Run
from netbottleneck.runtime import auto, blocks
from netbottleneck.runtime.auto import Auto, usable
from netbottleneck.trace.transports import AUTO, STOCK, Arm


def job_of(step_ms: Callable[[Arm, int, int], float], ranks: int = 2, *, runs_ahead: bool = False) -> Deciders[Auto]:
    return Deciders([Auto(ARMS) for _ in range(ranks)], step_ms, runs_ahead=runs_ahead)


@pytest.mark.parametrize("best", ARMS)
def test_the_fastest_arm_is_kept_within_200_steps(best: Arm) -> None:
    for seed in range(20):
        times = {arm: 50.0 if arm == best else 60.0 for arm in ARMS}
        job = job_of(steady(seed, times)).run(400)
        assert set(job.arms[200:]) == {best}
        assert [trial.kept for trial in job.plans[0].trials] == [best]


def first_trials(times: dict[Arm, float], noise: float) -> list[auto.Trial]:
    return [job_of(steady(seed, times, noise)).run(200).plans[0].trials[0] for seed in range(100)]


def test_stock_stays_if_all_arms_are_equal() -> None:
    kept = [trial.kept for trial in first_trials(dict.fromkeys(ARMS, 50.0), 0.02)]
    assert kept.count(str(STOCK)) >= 92


def test_an_arm_that_is_probably_faster_is_kept_and_the_line_says_so() -> None:
    trials = first_trials({STOCK: 50.0, TCP: 47.0, OFI: 52.0}, 0.2)
    unsure = [trial for trial in trials if "probably the fastest, not surely" in trial.why]
    assert sum(trial.kept == str(TCP) for trial in trials) >= 70
    assert len(unsure) >= 20
    for trial in unsure:
        gain = trial.against_stock[trial.kept]
        assert gain.value < 1 - auto.EQUAL
        assert gain.high >= 1
        assert f"on {trial.kept}: {trial.why}" in trial.line()
        assert trial.again == [str(STOCK), trial.kept] or len(trial.again) == len(ARMS)


def test_without_a_difference_a_gain_is_probable_in_one_of_five_trials_of_an_arm() -> None:
    trials = first_trials(dict.fromkeys(ARMS, 50.0), 0.1)
    kept = [trial.kept for trial in trials]
    assert kept.count(str(TCP)) <= 20
    assert kept.count(str(OFI)) <= 20
    sure = [trial for trial in trials if trial.kept != str(STOCK) and "probably the fastest" not in trial.why]
    assert len(sure) <= 8


def test_stock_stays_if_the_gain_is_too_small_to_matter() -> None:
    times = {STOCK: 50.0, TCP: 49.5, OFI: 49.8}
    kept = [job_of(steady(seed, times, 0.02)).run(200).arms[-1] for seed in range(100)]
    assert kept.count(STOCK) >= 92


FIRST_BLOCK = range(auto.BLOCK_STEPS, 2 * auto.BLOCK_STEPS)  # of a trial: over stock


@pytest.mark.parametrize(
    ("disturbed", "factor", "runs_ahead"),
    [(FIRST_BLOCK, 1.3, False), (FIRST_BLOCK, 8.0, False), (FIRST_BLOCK[2:3], 2.0, True)],
    ids=["slow block", "very slow block", "one stall on a device"],
)
def test_stock_stays_if_its_first_block_is_disturbed(disturbed: range, factor: float, *, runs_ahead: bool) -> None:
    for seed in range(20):
        undisturbed = steady(seed, {STOCK: 50.0, TCP: 51.0, OFI: 51.5}, 0.01)

        def step_ms(arm: Arm, step: int, rank: int, undisturbed: Callable[..., float] = undisturbed) -> float:
            return (factor if step in disturbed else 1.0) * undisturbed(arm, step, rank)

        job = job_of(step_ms, runs_ahead=runs_ahead).run(200)
        assert [trial.kept for trial in job.plans[0].trials] == [STOCK]


def test_the_arm_kept_stays_if_its_first_block_in_a_later_trial_is_disturbed() -> None:
    """At step 1000 all arms become slower alike. The next trial finds tcp's first block disturbed."""
    undisturbed = steady(6, {STOCK: 60.0, TCP: 50.0, OFI: 51.0}, 0.01)
    first: list[int] = []

    def step_ms(arm: Arm, step: int, rank: int) -> float:
        if step > 1000 and not first and (job.arms[-2], arm) == (STOCK, TCP):
            first.append(step)
        slow = 1.3 if first and arm == TCP and step < first[0] + auto.BLOCK_STEPS else 1.0
        return slow * (1.5 if step >= 1000 else 1.0) * undisturbed(arm, step, rank)

    job = job_of(step_ms)
    job.run(3000)
    trials = job.plans[0].trials
    assert max(trial.first_step for trial in trials) > 1000
    assert {trial.kept for trial in trials} == {TCP}


def test_stock_that_is_much_slower_leaves_after_two_blocks() -> None:
    job = job_of(steady(7, {STOCK: 150.0, TCP: 50.0, OFI: 52.0})).run(200)
    assert job.arms.count(STOCK) == 3 * auto.BLOCK_STEPS
    assert [trial.kept for trial in job.plans[0].trials] == [TCP]


def test_stock_that_is_slower_in_each_of_five_cycles_leaves() -> None:
    """Stock takes 1.3 or 3.5 times as long, and changes at random: its interval is too wide to be sure."""
    kept = []
    for seed in range(40):
        draw = np.random.default_rng(seed)
        factor = 1.3

        def step_ms(arm: Arm, _step: int, rank: int, draw: np.random.Generator = draw) -> float:
            nonlocal factor
            if rank == 0 and draw.random() < 0.03:
                factor = float(draw.choice([1.3, 3.5]))
            return {STOCK: 20.0 * factor, TCP: 20.0, OFI: 21.0}[arm] * math.exp(0.05 * draw.normal())

        kept.append(job_of(step_ms).run(200).arms[-1])
    assert kept.count(STOCK) <= 2


def test_a_trial_runs_short_blocks_in_turns_and_numbers_them() -> None:
    job = job_of(steady(1, dict.fromkeys(ARMS, 50.0))).run(60)
    assert set(job.arms[: auto.BLOCK_STEPS]) == {STOCK}
    trial = job.arms[auto.BLOCK_STEPS :]
    order = [*ARMS, *reversed(ARMS)]
    assert trial[: len(order) * auto.BLOCK_STEPS] == [arm for arm in order for _ in range(auto.BLOCK_STEPS)]
    assert job.blocks == sorted(job.blocks)
    for before, after in zip(range(59), range(1, 60), strict=True):
        assert job.arms[before] == job.arms[after] or job.blocks[after] == job.blocks[before] + 1


def test_a_few_disturbed_blocks_do_not_decide_between_two_arms() -> None:
    for seed in range(20):
        undisturbed = steady(seed, {STOCK: 100.0, TCP: 60.0, OFI: 62.0}, 0.02)
        disturbed: set[int] = set()

        def step_ms(
            arm: Arm,
            step: int,
            rank: int,
            undisturbed: Callable[..., float] = undisturbed,
            disturbed: set[int] = disturbed,
        ) -> float:
            if arm == TCP and step >= 20 and len(disturbed) < 10:  # two blocks of it
                disturbed.add(step)
            return (2.0 if step in disturbed else 1.0) * undisturbed(arm, step, rank)

        assert [trial.kept for trial in job_of(step_ms).run(200).plans[0].trials] == [TCP]


def test_a_trial_of_fewer_arms_has_more_blocks_of_each() -> None:
    """Stock leaves after three rounds; the others differ too little to leave."""
    for seed in range(20):
        job = job_of(steady(seed, {STOCK: 100.0, TCP: 60.0, OFI: 60.3}, 0.1)).run(200)
        (trial,) = job.plans[0].trials
        blocks_of = {arm: job.arms[auto.BLOCK_STEPS : trial.end_step].count(arm) // auto.BLOCK_STEPS for arm in ARMS}
        assert blocks_of[TCP] == blocks_of[OFI] == trial.blocks
        assert trial.blocks > auto.TRIAL_BLOCKS // len(ARMS)
        assert auto.TRIAL_BLOCKS - 1 <= sum(blocks_of.values()) <= auto.TRIAL_BLOCKS


def test_an_arm_that_is_much_slower_has_one_block() -> None:
    job = job_of(steady(2, {STOCK: 50.0, TCP: 52.0, OFI: 150.0})).run(200)
    assert job.arms.count(OFI) == auto.BLOCK_STEPS
    (line,) = job.lines
    assert "the others seemed slower, not surely" in line
    assert "(too few pairs)" in line
    (trial,) = job.plans[0].described()["auto"]["trials"]
    assert trial["against_stock"]["ofi"]["low"] is None
    assert trial["against_stock"]["ofi"]["value"] > 2


def test_the_line_says_that_the_others_are_slower_only_if_they_surely_are() -> None:
    surely = {"the others are slower": True, "the others seemed slower, not surely": False}
    seen = set()
    for seed in range(40):
        job = job_of(steady(seed, {STOCK: 50.0, TCP: 36.0, OFI: 40.0}, 0.3)).run(200)
        trial, plan = job.plans[0].trials[0], job.plans[0]
        if trial.why in surely:
            kept = Arm.parse(trial.kept)
            found = [plan._against(arm, kept) for arm in ARMS if arm != kept]
            assert all(each is not None and each.low > 0 for each in found) == surely[trial.why]
            seen.add(trial.why)
    assert seen == set(surely)


def test_the_slowest_rank_counts() -> None:
    """Over tcp one rank is slower than over stock, and the other one faster."""

    def step_ms(arm: Arm, _step: int, rank: int) -> float:
        return {STOCK: 50.0, TCP: 30.0 if rank else 70.0, OFI: 55.0}[arm]

    assert job_of(step_ms).run(200).arms[-1] == STOCK


def test_a_trial_that_does_not_tell_arms_apart_is_followed_by_one_of_them_alone() -> None:
    """Tcp is 3 % faster than stock, and the noise of neighbouring steps alike. Ofi leaves in the first trial."""
    undecided = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)
        last = 0.0

        def step_ms(arm: Arm, _step: int, rank: int, draw: np.random.Generator = draw) -> float:
            nonlocal last
            last = 0.7 * last + 0.7 * draw.normal() if rank == 0 else last
            return {STOCK: 30.0, TCP: 29.1, OFI: 36.0}[arm] * math.exp(0.05 * last)

        job = job_of(step_ms).run(8000)
        assert job.arms[-1] == TCP
        first, *later = job.plans[0].trials
        undecided += first.kept == str(STOCK)
        assert [trial.first_step >= auto.AGAIN * before.end_step for before, trial in pairwise([first, *later])] == [
            True
        ] * len(later)
        if later:
            assert first.again == [str(STOCK), str(TCP)]
            assert OFI not in job.arms[first.end_step :]
            assert f"trial of stock and tcp may follow after step {auto.AGAIN * first.end_step}" in job.lines[0]
            assert set(later[0].against_stock) == {str(TCP)}
    assert undecided > 2


def test_a_lasting_change_begins_another_trial() -> None:
    """At step 1000 the network changes, so that tcp is the fastest arm. One slow window changes nothing."""
    draw = np.random.default_rng(3)

    def step_ms(arm: Arm, step: int, _rank: int) -> float:
        before, after = {STOCK: 50.0, TCP: 55.0, OFI: 60.0}, {STOCK: 120.0, TCP: 80.0, OFI: 110.0}
        slow = 2.0 if 500 <= step < 520 else 1.0
        return slow * (after if step >= 1000 else before)[arm] * math.exp(0.03 * draw.normal())

    job = job_of(step_ms).run(5000)
    assert [trial.kept for trial in job.plans[0].trials] == [STOCK, TCP]
    assert job.plans[0].trials[1].first_step > 1000
    assert job.arms[-1] == TCP
    assert len(job.lines) == 2


def test_no_trial_begins_while_trials_cost_too_much() -> None:
    """The step time changes every 300 steps, and stock is always the fastest arm."""

    def step_ms(arm: Arm, step: int, _rank: int) -> float:
        return (1.5 if step // 300 % 2 else 1.0) * {STOCK: 50.0, TCP: 58.0, OFI: 59.0}[arm]

    job = job_of(step_ms).run(20_000)
    (plan, _) = job.plans
    assert len(plan.trials) > 1
    assert plan.cost_ns <= auto.COST_MAX * plan.elapsed_ns
    lost = sum(step_ms(arm, step, 0) - step_ms(STOCK, step, 0) for step, arm in enumerate(job.arms))
    whole = sum(step_ms(arm, step, 0) for step, arm in enumerate(job.arms))
    assert lost <= auto.COST_MAX * whole


def test_the_first_trial_costs_at_most_2_percent_of_a_run_of_2000_steps() -> None:
    """Arms up to twice as slow as the fastest one: each leaves in time."""
    for seed in range(200):
        draw = np.random.default_rng(seed)
        times = dict(zip(ARMS, 50.0 * draw.uniform(1, 2, 3), strict=True))
        job = job_of(steady(seed, times)).run(200)
        (trial,) = job.plans[0].trials
        lost = sum(times[arm] - min(times.values()) for arm in job.arms[trial.first_step : trial.end_step])
        assert lost <= auto.COST_MAX * auto.LEAST_RUN * min(times.values())


def test_the_first_trial_ends_before_it_costs_more_than_2_percent_of_a_run_of_2000_steps() -> None:
    """Tcp is slow in the second half of each 30 steps, so that it does not leave."""

    def step_ms(arm: Arm, step: int, _rank: int) -> float:
        return 250.0 if arm == TCP and step % 30 >= 15 else 50.0

    job = job_of(step_ms).run(200)
    (trial,) = job.plans[0].trials
    assert "another round would cost more than 2 % of a run of 2000 steps" in trial.why
    assert 0.5 * auto.LEAST_RUN < trial.least_steps <= auto.LEAST_RUN
    assert trial.kept == STOCK
    assert set(trial.again) == set(ARMS)


def test_a_first_trial_of_short_steps_may_cost_2_percent_of_30_seconds() -> None:
    """As above, with steps a hundredth as long: 2000 of them are no run that anyone would tune."""

    def step_ms(arm: Arm, step: int, _rank: int) -> float:
        return 2.5 if arm == TCP and step % 30 >= 15 else 0.5

    job = job_of(step_ms).run(300)
    (trial,) = job.plans[0].trials
    assert trial.why.startswith(f"after {auto.TRIAL_BLOCKS - 2} blocks of steps")
    assert 2 * auto.LEAST_RUN < trial.least_steps <= auto.LEAST_RUN_S * 1000 / 0.5


def test_the_line_names_what_was_measured() -> None:
    job = job_of(steady(4, {STOCK: 60.0, TCP: 50.0, OFI: 61.0})).run(300)
    (line,) = job.lines
    trial = job.plans[0].trials[0]
    assert f"from step {trial.end_step} on tcp" in line
    low, value, high = (f"{100 * (each - 1):+.1f}" for each in (trial.against_stock["tcp"].low, 50 / 60, 1.0))
    assert f"[{low} %," in line
    assert trial.against_stock["tcp"].low < 50 / 60 < trial.against_stock["tcp"].high
    assert float(value) < float(high)
    json.dumps(job.plans[0].described())


def test_the_line_tells_the_run_of_which_a_trial_costs_the_bound() -> None:
    """Tcp is the fastest arm. Over the others a block of the trial costs as many ms more as its steps, times 10."""
    times = {STOCK: 60.0, TCP: 50.0, OFI: 60.0}
    job = job_of(lambda arm, _step, _rank: times[arm]).run(300)
    (line,), (trial,) = job.lines, job.plans[0].trials
    slower = sum(arm != TCP for arm in job.arms[trial.first_step : trial.end_step])
    assert trial.cost_ns == slower * 10 * MS
    assert trial.least_steps == math.ceil(slower * 10 / 50 * 49)
    assert line.endswith(
        f"{slower * 10} ms more than the same steps over tcp, 2 % of a run of {trial.least_steps} steps"
    )
    assert trial.cost_ns == pytest.approx(auto.COST_MAX * (trial.cost_ns + trial.least_steps * 50 * MS), rel=0.001)


def test_a_trial_that_costs_nothing_has_no_part_of_a_run() -> None:
    (line,) = job_of(lambda _arm, _step, _rank: 50.0).run(300).lines
    assert line.endswith("0 ms more than the same steps over stock")


def test_steps_of_a_host_that_runs_ahead_count_as_a_whole() -> None:
    plan = Auto([STOCK, TCP], 5)
    plan.runs_ahead = True
    exact = []
    for step, ns in enumerate((50, 1, 1, 1, 9)):
        exact.append(plan.exact_after(step))
        plan.took(ns)
    assert exact == [True, False, False, False, True]
    assert blocks.VALUES.unpack(plan.values(5)) == (5, 3, 3, 3)


def test_a_run_that_ends_within_a_trial_says_so() -> None:
    job = job_of(steady(5, dict.fromkeys(ARMS, 50.0))).run(30)
    assert "ended at step 30" in job.plans[0].unfinished(30)
    assert "from step 5 on" in job.plans[0].unfinished(30)
    assert job.run(300).plans[0].unfinished(330) == ""


def test_arms_that_a_rank_cannot_use_are_left_out() -> None:
    kept, notes = usable((TCP, OFI), [{TCP: "", OFI: ""}, {TCP: "", OFI: "no libfabric"}])
    assert kept == [TCP]
    assert notes == ["auto leaves ofi out: rank 1: no libfabric"]


def test_auto_stands_alone() -> None:
    assert config.settings({"transports": "auto"}).transports == (AUTO,)
    with pytest.raises(ValueError, match="auto, one of stock"):
        config.settings({"transports": "stock,auto"})


# In jobs of two ranks.

SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck
from netbottleneck.runtime import auto, session

auto.LOOK_STEPS = (1000, 1000)  # no second trial where other programs change the step time
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for step in range({steps}):
    {before}
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    if {skip}:
        continue
    optimizer.step()
print("weights", [p.double().sum().item().hex() for p in model.parameters()])
dist.destroy_process_group()
"""


def measured(folder: Path) -> dict[str, str]:
    return {
        "NETBOTTLENECK_TRANSPORT": "auto",
        "NETBOTTLENECK_DIR": str(folder),
        "NETBOTTLENECK_START_STEP": "0",
        "NETBOTTLENECK_TIMEOUT_S": "60",
    }


def test_a_job_tries_all_arms_and_computes_what_it_would(warm_ranks: Ranks, tmp_path: Path) -> None:
    source = SCRIPT.format(steps=230, before="", skip="False")
    plain = warm_ranks(2, source, {})
    env = measured(tmp_path / "run")
    results = warm_ranks(2, source, env)
    for one, other in zip(plain, results, strict=True):
        assert [x for x in one.stdout.splitlines() if "weights" in x] == [
            x for x in other.stdout.splitlines() if "weights" in x
        ]
    run = Run(tmp_path / "run")
    by_step = {step.index: step.arm for step in run.trace.steps if step.rank == 0}
    assert len(by_step) == 230
    natives = [arm for arm in run.trace.arms if arm != STOCK]
    assert TCP in natives
    assert set(by_step.values()) == set(run.trace.arms)
    (note,) = [note for note in run.trace.notes if note.startswith("auto: ")]
    assert f"on {by_step[229]}:" in note
    both = [{s.index: (s.arm, s.block) for s in run.trace.steps if s.rank == rank} for rank in (0, 1)]
    assert both[0] == both[1]
    text = (tmp_path / "run" / "report.txt").read_text()
    assert note[:60] in " ".join(text.split())


def test_ranks_that_make_different_steps_stay_with_their_arm(warm_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 leaves out an update. At the end of the block the ranks are at different steps."""
    env = measured(tmp_path / "run")
    # No rank waits for the other in vain until step 10.
    shorter = "session.AGREE_S = 1.0 if step == 6 else session.AGREE_S"
    source = SCRIPT.format(steps=40, before=shorter, skip="dist.get_rank() == 1 and step == 7")
    results = warm_ranks(2, source, env)
    assert all("weights" in result.stdout for result in results)
    run = Run(tmp_path / "run")
    (note,) = [note for note in run.trace.notes if note.startswith("all further steps use stock")]
    assert "from step 10 on" in note


def test_one_rank_has_nothing_to_choose(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = measured(tmp_path / "run")
    warm_ranks(1, SCRIPT.format(steps=10, before="", skip="False"), env)
    assert Run(tmp_path / "run").trace.arms == (STOCK,)


def test_a_rank_without_libfabric_leaves_ofi_out(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = measured(tmp_path / "run") | {"NETBOTTLENECK_LIBFABRIC": str(tmp_path / "libfabric.so.1")}
    warm_ranks(2, SCRIPT.format(steps=12, before="", skip="False"), env)
    trace = Run(tmp_path / "run").trace
    assert trace.arms == (STOCK, TCP)
    assert any(note.startswith("auto: the run ended at step 12") for note in trace.notes)
    assert any(note.startswith("auto leaves ofi out: rank 0: ") for note in trace.notes)
