"""Callbacks in loops as Lightning, the Trainer and Accelerate run them; the examples, if these are installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import RANKS_LIMIT_S, Ranks

from netbottleneck.report import Run

SCRIPT = Path(__file__).parent / "scripts" / "callback_loops.py"
EXAMPLES = Path(__file__).parents[2] / "benchmarks" / "examples"
STEPS = 6  # of the script
MEASURED = {"NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2", "NETBOTTLENECK_TIMEOUT_S": "60"}


def weights(folder: Path) -> bytes:
    """Return the final weights, which are equal on both ranks."""
    first, second = ((folder / f"{rank}.weights").read_bytes() for rank in range(2))
    assert first == second
    return first


def alone() -> bytes:
    """Return the expected weights: both ranks' batches in one process, with averaged gradients."""
    streams = []
    for rank in (1, 0):  # rank 0's model is everybody's
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.ReLU(), torch.nn.Linear(30, 4))
        streams.insert(0, torch.get_rng_state())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        halves = []
        for rank in range(2):
            torch.set_rng_state(streams[rank])
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(4, 8)).square().mean().backward()
            halves.append([parameter.grad / 2 for parameter in model.parameters()])
            streams[rank] = torch.get_rng_state()
        for parameter, first, second in zip(model.parameters(), *halves, strict=True):
            parameter.grad = first + second
        optimizer.step()
    return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())


# FIRST: DDP is hooked by the variables before the callback is there.
@pytest.mark.parametrize("first", ["", "1"], ids=["callback", "variables"])
@pytest.mark.parametrize("loop", ["lightning", "transformers", "accelerate"])
def test_each_step_is_recorded_and_no_weight_changes(warm_ranks: Ranks, tmp_path: Path, loop: str, first: str) -> None:
    run = tmp_path / "run"
    env = {**MEASURED, "LOOP": loop, "FIRST": first, "OUT": str(tmp_path), "NETBOTTLENECK_DIR": str(run)}
    results = warm_ranks(2, SCRIPT, {**env, "NETBOTTLENECK_TRANSPORT": "stock,tcp"})
    assert weights(tmp_path) == alone()
    assert "Of your " in results[0].stdout
    trace = Run(run).trace
    assert sorted((step.rank, step.index) for step in trace.steps) == [(r, i) for r in range(2) for i in range(STEPS)]
    for step in trace.steps:
        assert step.grad_ready
        assert len(step.optimizer) == 1
        assert step.optimizer[0][0] >= max(ns for _, ns in step.grad_ready)


@pytest.mark.parametrize("loop", ["lightning", "transformers", "accelerate"])
def test_callbacks_do_nothing_where_the_package_is_switched_off(warm_ranks: Ranks, tmp_path: Path, loop: str) -> None:
    env = {**MEASURED, "LOOP": loop, "OUT": str(tmp_path), "NETBOTTLENECK": "0", "NETBOTTLENECK_TRANSPORT": "tcp"}
    for result in warm_ranks(2, SCRIPT, {**env, "NETBOTTLENECK_DIR": str(tmp_path / "run")}):
        assert result.stdout == ""
        assert "netbottleneck" not in result.stderr
    assert weights(tmp_path) == alone()
    assert not (tmp_path / "run").exists()


def test_a_callback_that_is_switched_off_refuses_nothing() -> None:
    python("""
import os, sys, types
os.environ["NETBOTTLENECK"] = "0"
sys.modules["lightning.pytorch"] = sys.modules["lightning"] = types.SimpleNamespace(Callback=object)
from netbottleneck.callbacks import LightningCallback
LightningCallback().on_train_start(types.SimpleNamespace(optimizers=[]), None)
""")


AGAIN = """
import sys
import types
import torch

sys.modules["transformers"] = types.SimpleNamespace(TrainerCallback=object)
from netbottleneck.callbacks import TransformersCallback

model = torch.nn.Linear(4, 4)
callback = TransformersCallback()
sessions = []
for attempt in range(2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback.on_train_begin(None, None, None, model=model, optimizer=optimizer)
    sessions.append(callback._run.session)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        if attempt == 0:
            break  # out of memory
        optimizer.step()
print([[session.closed, session.error] for session in sessions])
callback.on_train_end(None, None, None)
print([session.error for session in sessions], [session.step for session in sessions])
"""


def test_a_trainer_that_begins_again_ends_its_earlier_run(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**MEASURED, "NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_TRANSPORT": "tcp"}
    lines = warm_ranks(1, AGAIN, env)[0].stdout.splitlines()
    error = "RuntimeError: the trainer began again"
    assert str([[True, error], [False, None]]) in lines
    assert str([error, None]) + " [0, 3]" in lines


def test_what_cannot_be_measured_is_refused_and_an_error_is_recorded(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**MEASURED, "LOOP": "failing", "OUT": str(tmp_path), "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    for result in warm_ranks(2, SCRIPT, env):
        assert result.stdout.splitlines() == [
            "refused: a Sequential on 2 ranks: netbottleneck measures models of DistributedDataParallel, FSDP2, FSDP "
            "and DeepSpeed",
            "refused: 2 optimizers: netbottleneck measures loops with one",
            "left with KeyError: 'mine'",
        ]


def python(source: str) -> str:
    """Run source text in a new interpreter; return its output."""
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=RANKS_LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_no_framework_is_imported_before_it_is_used() -> None:
    python("""
import sys
import netbottleneck.callbacks
assert not {"torch", "lightning", "pytorch_lightning", "transformers", "accelerate"} & set(sys.modules)
""")


def test_the_callbacks_are_an_attribute_of_the_package() -> None:
    python("""
import sys
import netbottleneck
assert "netbottleneck.callbacks" not in sys.modules
assert "accelerate" in netbottleneck.callbacks.__all__
assert "torch" not in sys.modules
""")


def test_one_clear_line_names_the_missing_package() -> None:
    output = python("""
import sys
import netbottleneck.callbacks as callbacks
for name in ("lightning", "pytorch_lightning", "transformers", "accelerate"):
    sys.modules[name] = None
for name in callbacks.__all__:
    try:
        getattr(callbacks, name)
    except ImportError as error:
        print(error)
""")
    assert output.splitlines() == [
        "netbottleneck.callbacks.LightningCallback needs lightning or pytorch-lightning, which is not installed: "
        "pip install it",
        "netbottleneck.callbacks.TransformersCallback needs transformers, which is not installed: pip install it",
        "netbottleneck.callbacks.accelerate needs accelerate, which is not installed: pip install it",
    ]


@pytest.mark.frameworks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["lightning", "transformers", "accelerate"])
def test_an_example_is_measured(ranks: Ranks, tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    env = {**MEASURED, "NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_TRANSPORT": "stock,tcp"}
    ranks(2, EXAMPLES / f"{name}_ddp.py", env, limit_s=120)
    trace = Run(tmp_path / "run").trace
    assert sorted((step.rank, step.index) for step in trace.steps) == [(r, i) for r in range(2) for i in range(20)]
    for step in trace.steps:
        assert step.optimizer[0][0] >= max(ns for _, ns in step.grad_ready)
