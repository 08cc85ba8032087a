"""DDP on a torch device over the fake CUDA driver: weights are the CPU's, and the record has the device's times."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import Ranks
from warm import WarmPair

pytest.importorskip("torch")

import torch

from netbottleneck.analysis.intervals import backward_intervals, split_steps
from netbottleneck.hooks.measured_model import follow_device
from netbottleneck.report import Run
from netbottleneck.report.caveats import warnings
from netbottleneck.trace import ring_file, ring_reader
from netbottleneck.trace.events import Event
from netbottleneck.trace.transports import BARE

SCRIPT = Path(__file__).parent / "scripts" / "device_ddp.py"
STEPS, PARAMETERS = 24, 6


def trained(ranks: Ranks, where: str, env: dict[str, str]) -> str:
    """Return the digest that all ranks print."""
    printed = {result.stdout.splitlines()[0] for result in ranks(2, SCRIPT, env, args=[where, str(STEPS)])}
    assert len(printed) == 1, printed
    return printed.pop()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, warm: WarmPair) -> str:
    """Return the weights of the same training on the CPU, which nothing measures."""
    return trained(Ranks(tmp_path_factory.mktemp("cpu"), warm=warm), "cpu", {})


def measured(folder: Path, device: dict[str, str], transports: str, seed: int = 1) -> dict[str, str]:
    """Return the environment of a measured training on the device."""
    names = {"TRANSPORT": transports, "DIR": str(folder), "BLOCK_STEPS": "4", "START_STEP": "2", "SAMPLE_EVERY": "5"}
    return {**device, "FAKE_CUDA_SEED": str(seed), **{f"NETBOTTLENECK_{name}": value for name, value in names.items()}}


@pytest.mark.parametrize("transports", ["stock", "stock,tcp,ofi"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_weights_are_those_of_the_cpu_and_times_those_of_the_device(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: str, tmp_path: Path, transports: str, seed: int
) -> None:
    folder = tmp_path / "run"
    assert trained(warm_ranks, "fakecuda", measured(folder, device, transports, seed)) == on_cpu
    run = Run(folder)
    error_ns = {rank.rank: rank.device_error_ns for rank in run.trace.ranks}
    assert None not in error_ns.values()
    # How long steps take, whether that changes, and how many blocks tell arms apart, is the machine's: not judged.
    of_speed = ("Our hooks slow the stock path", "this report has both states", "comparison with")
    assert not [line for line in warnings(run.findings) if not any(words in line for words in of_speed)]
    steps = [step for step in run.trace.steps if step.arm != BARE]
    assert {str(step.arm) for step in steps} == set(transports.split(","))
    for step in steps:
        where = (step.rank, step.index)
        assert len(step.forward) == 1, where
        assert sorted(index for index, _ in step.grad_ready) == list(range(PARAMETERS)), where
        # With our transports and outside sampled steps, the gradients' times are the host's.
        apart_ns = error_ns[step.rank] if str(step.arm) != "stock" and not step.sampled else 0
        assert step.begin_ns <= step.forward[0][1] <= step.grad_ready[0][1] + apart_ns, where
        assert step.grad_ready[0][1] <= step.end_ns, where
        assert step.waits, where
        assert len({at for _, at in step.grad_ready}) > 2 if step.sampled else bool(step.optimizer), where
    assert any(step.sampled for step in steps)
    for _, split, _ in split_steps(run.trace):
        assert sum(split.phases().values()) == split.step_ns
    inside = [one for one in run.trace.collectives if one.step is not None]
    assert {one.by_script for one in inside} == {False, True}
    assert all(one.finished for one in inside)
    assert {one.tensor_bytes for one in inside if one.by_script} == {4000, 8000}


def test_the_training_waits_while_its_stream_carries_a_call(
    warm_ranks: Ranks, device: dict[str, str], tmp_path: Path
) -> None:
    """NCCL runs a call that is not asynchronous on the current stream: the wait for its work then finds it done."""
    folder = tmp_path / "run"
    trained(warm_ranks, "fakecuda", measured(folder, device, "stock"))
    trace = Run(folder).trace
    calls = {(c.rank, c.step): c for c in trace.collectives if c.kind == "broadcast" and c.tensor_bytes == 8000}
    shares = []
    for step in trace.steps:
        call = calls.get((step.rank, step.index))
        if call is not None:
            begin_ns, end_ns = call.start_ns or 0, call.done_ns or 0
            (wait,) = [(begin, end) for key, begin, end in step.waits if key == call.key]
            assert wait[1] >= end_ns
            shares.append((end_ns - wait[0]) / (end_ns - begin_ns))
    assert len(shares) >= 10
    assert statistics.median(shares) > 0.5


def test_the_times_of_the_host_are_recorded_too(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: str, tmp_path: Path
) -> None:
    """Steps and calls of the process group, by which NCCL's own events are found."""
    assert trained(warm_ranks, "fakecuda", measured(tmp_path / "run", device, "stock")) == on_cpu
    trace = Run(tmp_path / "run").trace.of_rank(0)
    ring = ring_file.read_ring(tmp_path / "run" / "ranks" / "0.train.ring")
    names = {number: name for name, number in ring_file.EVENTS.items()}
    rows = ring.events[["kind", "time_ns", "step", "key", "a", "b", "c", "d", "e"]].tolist()
    events = [Event(names[kind], *rest) for kind, *rest in rows]
    on_host = ring_reader.host_events(events)
    steps = ring_reader.StepIndex(ring_reader.rank_steps(on_host, 0, trace.arms, None)[0])
    calls = ring_reader.collectives(on_host, 0, None, steps, ring_reader.BucketIndex(trace.buckets))
    gradients = [one for one in trace.collectives if not one.by_script]
    assert [(one.key, one.round, one.step) for one in calls] == [(one.key, one.round, one.step) for one in gradients]
    error_ns = trace.ranks[0].device_error_ns
    assert error_ns is not None
    for call, gradient in zip(calls, gradients, strict=True):
        assert call.start_ns is not None
        assert gradient.start_ns is not None
        assert call.submit_ns < call.start_ns <= gradient.start_ns + error_ns


def test_auto_waits_for_the_device_at_the_ends_of_a_block(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: str, tmp_path: Path
) -> None:
    """After the first and last step of each block the host has caught up; without auto it never waits."""
    for transports in ("auto", "stock,tcp"):
        env = measured(tmp_path / transports, device, transports)
        results = warm_ranks(2, SCRIPT, env, args=["fakecuda", str(STEPS)])
        for result in results:
            lines = result.stdout.splitlines()
            assert lines[0] == on_cpu
            drained = int(lines[1].removeprefix("drained "))
            assert 4 <= drained < STEPS if transports == "auto" else drained == 0


def test_auto_does_not_wait_for_a_stream_that_is_captured(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: str, tmp_path: Path
) -> None:
    env = measured(tmp_path / "run", device, "auto")
    for result in warm_ranks(2, SCRIPT, env, args=["fakecuda", str(STEPS), "capturing"]):
        assert result.stdout.splitlines()[:2] == [on_cpu, "drained 0"]


@pytest.mark.parametrize("transports", ["stock", "tcp"])
def test_passes_without_a_reduction_have_the_time_of_their_last_gradient(
    warm_ranks: Ranks, device: dict[str, str], tmp_path: Path, transports: str
) -> None:
    env = measured(tmp_path / "run", device, transports)
    warm_ranks(2, SCRIPT, env, args=["fakecuda", str(STEPS), "accumulate"])
    steps = [step for step in Run(tmp_path / "run").trace.steps if step.arm != BARE]
    assert {step.sampled for step in steps} == {False, True}
    for step in steps:
        assert len(step.forward) == 4
        assert len(backward_intervals(step)) == 4
        others = 4 if step.sampled else 1
        assert Counter(index for index, _ in step.grad_ready) == {0: 4, **dict.fromkeys(range(1, PARAMETERS), others)}


def test_a_failed_stamp_ends_the_measuring_and_not_the_training(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    env = {**measured(folder, device, "stock"), "FAKE_CUDA_FAIL": "cuStreamIsCapturing"}
    assert trained(warm_ranks, "fakecuda", env) == on_cpu
    notes = Run(folder).trace.notes
    assert any("measuring ended at step" in note and "CUDA: cuStreamIsCapturing" in note for note in notes), notes


OLD_ON_ONE_RANK = f"""
import os, runpy, sys
if os.environ["RANK"] == "1":
    os.environ["FAKE_CUDA_VERSION"] = "11080"
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_a_clock_that_opens_on_one_rank_only_leaves_the_model_alone_on_all(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: str, tmp_path: Path
) -> None:
    env = measured(tmp_path / "run", device, "tcp")
    results = warm_ranks(2, OLD_ON_ONE_RANK, env, args=["fakecuda", str(STEPS)])
    assert [result.stdout.splitlines()[0] for result in results] == [on_cpu] * 2
    assert ["is left alone: " in result.stderr for result in results] == [True, True]
    assert "driver 11.8 is too old" in results[1].stderr
    assert "no step was recorded" not in results[0].stderr + results[1].stderr


def test_a_model_that_cannot_be_observed_is_not_said_to_make_no_steps(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: str, tmp_path: Path
) -> None:
    env = {**measured(tmp_path / "run", device, "stock"), "FAKE_CUDA_VERSION": "11080"}
    for result in warm_ranks(2, SCRIPT, env, args=["fakecuda", str(STEPS)]):
        assert result.stdout.splitlines()[0] == on_cpu
        assert result.stderr.count("driver 11.8 is too old") == 1
        assert "no step was recorded" not in result.stderr


def test_a_model_on_an_amd_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    parameter = SimpleNamespace(device=torch.device("cuda:0"))
    with pytest.raises(ValueError, match="it is on an AMD GPU"):
        follow_device(cast(Any, None), [cast(Any, parameter)])


@pytest.mark.parametrize("captured", [("0", "1"), ("0",), ("1",)])
def test_buckets_of_a_captured_stream_travel_over_the_own_group_on_all_ranks(
    warm_ranks: Ranks, device: dict[str, str], on_cpu: str, tmp_path: Path, captured: tuple[str, ...]
) -> None:
    env = measured(tmp_path / "run", device, "stock,tcp")
    for result in warm_ranks(2, SCRIPT, env, args=["fakecuda", str(STEPS), *captured]):
        assert result.stdout.splitlines()[0] == on_cpu
        here = "was made while its stream is captured into a CUDA graph: keep backward out of the capture"
        why = here if str(result.rank) in captured else "another rank sends its gradients over the model's own group"
        assert [why in line for line in result.stderr.splitlines() if "measuring has ended" in line] == [True]


def test_a_bucket_costs_one_event_and_a_gradient_one_in_sampled_steps_alone(
    warm_ranks: Ranks, device: dict[str, str], tmp_path: Path
) -> None:
    env = measured(tmp_path / "run", device, "tcp")
    for result in warm_ranks(2, SCRIPT, env, args=["fakecuda", str(STEPS), "count"]):
        lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("events ")]
        rows = [tuple(map(int, line)) for line in lines]
        assert {own for *_, own in rows} == {1}
        second = [(sampled, since_first) for index, sampled, since_first, _ in rows if index == 1]
        assert set(second) == {(0, 0), (1, 2)}  # of the two gradients in the second bucket
