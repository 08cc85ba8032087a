"""NETBOTTLENECK_ALTERNATE=until_known: transports alternate until their differences are known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Ranks

from deciding import ARMS, OFI, TCP, Deciders, steady
from netbottleneck import config
from netbottleneck.analysis.thresholds import GAIN_MIN
from netbottleneck.report import Run
from netbottleneck.runtime.blocks import KNOWN_PAIRS, KNOWN_TESTS, PAIRS_MOST, Blocks, UntilKnown
from netbottleneck.trace.model import KNOWN
from netbottleneck.trace.transports import STOCK, Arm

LENGTH = 10
TWO = (STOCK, TCP)


def job_of(
    step_ms: Callable[[Arm, int, int], float], arms: tuple[Arm, ...] = TWO, start_step: int = 0
) -> Deciders[UntilKnown]:
    return Deciders([UntilKnown(arms, LENGTH, start_step) for _ in range(2)], step_ms)


def alike(seed: int, ratio: float, noise: float, correlation: float) -> Callable[[Arm, int, int], float]:
    """Step times that drift over blocks, the same on both ranks: their logarithms are an autoregressive sequence."""
    draw = np.random.default_rng(seed)
    level, times = 0.0, {}

    def step_ms(arm: Arm, step: int, _rank: int) -> float:
        nonlocal level
        if step not in times:
            level = correlation * level + math.sqrt(1 - correlation**2) * draw.normal()
            times[step] = 50.0 * (ratio if arm == TCP else 1.0) * math.exp(noise * level)
        return times[step]

    return step_ms


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_the_interval_at_the_end_covers_the_truth(correlation: float) -> None:
    """By the same numbers as a report: all blocks so far. They end the run, which an interval alone does not know."""
    covered = []
    for seed in range(240):
        ratio = (1.0, 0.985, 0.9, 0.7, 1.2, 0.94)[seed % 6]
        plan = job_of(alike(seed, ratio, (0.02, 0.05)[seed // 6 % 2], correlation)).run(3000).plans[0]
        if plan.known_at is not None:
            found = plan.against_first["tcp"]
            covered.append(found.low <= ratio <= found.high)
    assert len(covered) > 180
    assert np.mean(covered) >= 0.93


def test_a_run_near_the_limit_ends_on_the_right_side_or_not_at_all() -> None:
    """Intervals of those that end may be too far from the limit: it ends the few that are."""
    sides = []
    for seed in range(60):
        ratio = (0.965, 0.975)[seed % 2]
        plan = job_of(alike(seed, ratio, 0.03, (0.0, 0.9)[seed // 2 % 2])).run(3000).plans[0]
        if plan.known_at is not None:
            found = plan.against_first["tcp"]
            sides.append((ratio < 1 - GAIN_MIN, found.high < 1 - GAIN_MIN, found.low > 1 - GAIN_MIN))
    assert len(sides) > 10
    assert {side for side in sides} <= {(True, True, False), (False, False, True)}


def test_arms_alternate_as_always_until_the_first_stays() -> None:
    job = job_of(steady(1, {STOCK: 50.0, TCP: 40.0})).run(800)
    (known_at,) = {plan.known_at for plan in job.plans}
    assert known_at is not None
    assert known_at % (2 * LENGTH) == 0
    assert known_at >= 2 * LENGTH * (KNOWN_PAIRS + KNOWN_TESTS - 1)
    always = Blocks(TWO, LENGTH)
    assert job.blocks == [always.at(step)[0] for step in range(800)]
    assert job.arms[:known_at] == [TWO[always.at(step)[1]] for step in range(known_at)]
    assert set(job.arms[known_at:]) == {STOCK}


def test_equal_arms_are_known_too() -> None:
    (plan, _) = job_of(steady(2, dict.fromkeys(TWO, 50.0), 0.02)).run(1000).plans
    assert plan.known_at is not None
    found = plan.against_first["tcp"]
    assert found.low <= 1.0 <= found.high
    assert found.high - found.low <= 1.02 * GAIN_MIN


def test_a_comparison_ends_after_400_pairs_in_any_case() -> None:
    job = job_of(steady(3, {STOCK: 50.0, TCP: 50.0}, 1.0)).run(2 * LENGTH * PAIRS_MOST)
    assert job.lines == []
    (line,) = job.run(1).lines
    assert line.startswith(f"{KNOWN} as well as 400 pairs of blocks tell: from step 8000 on stock; ")
    assert set(job.run(100).arms[8000:]) == {STOCK}


def test_a_gain_at_the_limit_of_a_verdict_is_not_known() -> None:
    """Nor one whose interval is wide. The run says at its end that nothing ended the alternation."""
    for noise in (0.01, 1.0):
        job = job_of(steady(3, {STOCK: 50.0, TCP: 50.0 * (1 - GAIN_MIN)}, noise)).run(1500)
        assert set(job.arms[-2 * LENGTH :]) == set(TWO)
        assert job.lines == []
        assert "alternated until the run ended at step 1500" in job.plans[0].unfinished(1500)


def test_a_gain_of_the_first_arm_at_the_limit_is_not_known_either() -> None:
    """A report compares with stock, whatever the order of the list."""
    times = {TCP: 50.0 * (1 - GAIN_MIN), STOCK: 50.0}
    assert job_of(steady(3, times, 0.01), (TCP, STOCK)).run(1500).plans[0].known_at is None


def test_every_arm_must_be_known() -> None:
    """Tcp is at the limit, ofi is not."""
    times = {STOCK: 50.0, TCP: 50.0 * (1 - GAIN_MIN), OFI: 80.0}
    assert job_of(steady(4, times, 0.01), ARMS).run(1500).plans[0].known_at is None
    assert job_of(steady(4, times | {TCP: 40.0}, 0.01), ARMS).run(1500).plans[0].known_at is not None


def test_blocks_before_the_first_recorded_step_do_not_count() -> None:
    """There tcp is slower."""
    after = steady(5, {STOCK: 50.0, TCP: 40.0}, 0.01)
    job = job_of(
        lambda arm, step, rank: (90.0 if arm == TCP else 50.0) if step < 205 else after(arm, step, rank), start_step=205
    )
    plan = job.run(1000).plans[0]
    assert plan.known_at is not None
    assert plan.known_at >= 205 + 2 * LENGTH * KNOWN_PAIRS
    assert plan.against_first["tcp"].high < 0.85


@pytest.mark.parametrize("end_step", [0, 205, 280])
def test_blocks_behind_the_last_recorded_step_do_not_count(end_step: int) -> None:
    plans = [UntilKnown(TWO, LENGTH, 0, end_step) for _ in range(2)]
    plan = Deciders(plans, steady(5, {STOCK: 50.0, TCP: 40.0}, 0.01)).run(1000).plans[0]
    assert plan.known_at == (None if end_step == 205 else 2 * LENGTH * (KNOWN_PAIRS + KNOWN_TESTS - 1))


def test_blocks_of_one_step_count_as_little_as_in_a_report() -> None:
    plans = [UntilKnown(TWO, 1) for _ in range(2)]
    assert Deciders(plans, steady(5, {STOCK: 50.0, TCP: 40.0}, 0.01)).run(1000).plans[0].known_at is None


def test_a_device_is_waited_for_until_the_differences_are_known() -> None:
    exact: list[bool] = []

    def step_ms(arm: Arm, step: int, rank: int) -> float:
        if rank == 0:
            exact.append(job.plans[0].exact_after(step))
        return 40.0 if arm == TCP else 50.0

    job = job_of(step_ms)
    known_at = job.run(1000).plans[0].known_at
    assert known_at is not None
    assert [step for step in range(1000) if exact[step]] == [
        step for step in range(known_at) if step % LENGTH in (0, LENGTH - 1)
    ]


def test_the_line_and_the_record_have_the_interval() -> None:
    job = job_of(steady(6, {STOCK: 50.0, TCP: 40.0})).run(800)
    (line,), plan = job.lines, job.plans[0]
    found = plan.against_first["tcp"]
    ends = f"[{100 * (found.low - 1):+.1f} %, {100 * (found.high - 1):+.1f} %]"
    assert line == (
        f"The differences between the transports are known: from step {plan.known_at} on stock; step time against "
        f"stock (measured, 95 % interval): tcp {100 * (found.value - 1):+.1f} % {ends}"
    )
    assert plan.unfinished(800) == ""
    record = json.loads(json.dumps(plan.described()))["until_known"]
    assert record == {"known_at": plan.known_at, "against_first": {"tcp": found.as_dict()}}


def test_another_value_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"NETBOTTLENECK_ALTERNATE=sometimes.*always or until_known"):
        config.settings(environ={"NETBOTTLENECK_ALTERNATE": "sometimes"})


# In a job of two ranks.

SCRIPT = """
import os
import signal
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck
from netbottleneck.runtime import blocks

torch.set_num_threads(1)


def took(self, ns):  # made up, as the machine's own times may vary too much to be told apart
    usual(self, (5_000_000 if step // 3 % 4 in (0, 3) else 20_000_000) + step * 7919 % 97 * 1000)  # tcp is the slower


usual, blocks.UntilKnown.took = blocks.UntilKnown.took, took
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for step in range(160):
    if {end}:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
print("weights", [p.double().sum().item().hex() for p in model.parameters()])
dist.destroy_process_group()
"""


def compared(folder: Path) -> dict[str, str]:
    return {
        "NETBOTTLENECK_TRANSPORT": "stock,tcp",
        "NETBOTTLENECK_ALTERNATE": "until_known",
        "NETBOTTLENECK_BLOCK_STEPS": "3",
        "NETBOTTLENECK_START_STEP": "0",
        "NETBOTTLENECK_DIR": str(folder / "run"),
        "NETBOTTLENECK_TIMEOUT_S": "60",
    }


def test_a_job_that_is_killed_later_keeps_what_it_found(warm_ranks: Ranks, tmp_path: Path) -> None:
    script = SCRIPT.format(end="step == 140")
    warm_ranks(2, script, compared(tmp_path), check=False)
    run = Run(tmp_path / "run")
    (note,) = [note for note in run.trace.notes if note.startswith(KNOWN)]
    found = [json.loads((tmp_path / f"run/ranks/{rank}.meta.json").read_text()) for rank in (0, 1)]
    assert found[0]["until_known"] == found[1]["until_known"]
    assert not found[0]["finished"]
    assert f"from step {found[0]['until_known']['known_at']} on stock" in note


def test_a_job_goes_on_over_the_first_transport(warm_ranks: Ranks, tmp_path: Path) -> None:
    script = SCRIPT.format(end="False")
    plain = warm_ranks(2, script, {})
    results = warm_ranks(2, script, compared(tmp_path))
    for one, other in zip(plain, results, strict=True):
        assert [x for x in one.stdout.splitlines() if "weights" in x] == [
            x for x in other.stdout.splitlines() if "weights" in x
        ]
    run = Run(tmp_path / "run")
    found = [json.loads((tmp_path / f"run/ranks/{rank}.meta.json").read_text())["until_known"] for rank in (0, 1)]
    assert found[0] == found[1]
    known_at = found[0]["known_at"]
    assert known_at % 6 == 0
    always = Blocks(TWO, 3)
    for rank in (0, 1):
        arms = {step.index: step.arm for step in run.trace.steps if step.rank == rank}
        assert len(arms) == 160
        assert {step: arm for step, arm in arms.items() if step < known_at} == {
            step: TWO[always.at(step)[1]] for step in range(known_at)
        }
        assert {arm for step, arm in arms.items() if step >= known_at} == {STOCK}
    (note,) = [note for note in run.trace.notes if note.startswith(KNOWN)]
    assert f"from step {known_at} on stock" in note
    text = (tmp_path / "run" / "report.txt").read_text()
    assert note[:60] in " ".join(text.split())
