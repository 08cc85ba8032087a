"""Users' own loops under netbottleneck.profile: the checks in scripts/e2e_loops.py, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Ranks, checks

from netbottleneck.trace.ring_reader import load

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "scripts" / "e2e_loops.py"
ENV = {"NETBOTTLENECK_TIMEOUT_S": "60", "NETBOTTLENECK_BLOCK_STEPS": "1", "NETBOTTLENECK_START_STEP": "0"}


ALL = [name for name in checks(SCRIPT) if name != "arms_take_turns"]


def run(warm_ranks: Ranks, names: list[str], transport: str) -> None:
    env = {**ENV, "E2E_TRANSPORT": transport}
    for result in warm_ranks(2, SCRIPT, env, args=names):
        lines = [line for line in result.stdout.splitlines() if line.startswith(("ok ", "failed "))]
        assert lines == [f"ok {name}" for name in names], result.stderr


@pytest.mark.parametrize("names", [ALL[start::8] for start in range(8)], ids=list("abcdefgh"))
def test_loops_train_as_without_the_package(warm_ranks: Ranks, names: list[str]) -> None:
    run(warm_ranks, names, "tcp")


@pytest.mark.parametrize("transport", ["stock", "ofi"])
def test_other_transports_train_alike(warm_ranks: Ranks, transport: str) -> None:
    names = ["a_rank_skips_a_parameter", "a_parameter_lies_channels_last", "gradients_are_replaced"]
    run(warm_ranks, names, transport)


def test_arms_that_take_turns_train_alike(warm_ranks: Ranks) -> None:
    run(warm_ranks, ["arms_take_turns"], "stock,tcp")


SKIPPED = """
import netbottleneck, torch
import torch.distributed as dist
from netbottleneck.runtime import session

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with netbottleneck.profile(model, optimizer, transport="stock,tcp", directory="run"):
    for step in range(8):
        if step == 2:
            session.AGREE_S = 1.0  # until here, no rank waits for the other in vain
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        assert model.weight.grad.tolist() == [[3.0] * 4] * 4, model.weight.grad
        if step != 2 or dist.get_rank() == 0:
            optimizer.step()
print("trained")
"""


def test_ranks_stay_in_one_arm_after_one_has_left_out_an_update(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, SKIPPED, ENV):
        assert "trained" in result.stdout
        assert "all further steps use tcp, from step 3 on" in result.stderr


WEIGHTS = """
import sys
import torch
import torch.distributed as dist
import netbottleneck

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank() * int(sys.argv[1]))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with netbottleneck.profile(model, optimizer, directory="run"):
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    found = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(found, weights)
    print("equal", torch.equal(*found))
"""


@pytest.mark.parametrize("seed", [0, 1], ids=["equal weights", "other weights"])
def test_a_loop_begins_with_equal_weights_and_the_log_says_who_had_others(warm_ranks: Ranks, seed: int) -> None:
    first, second = warm_ranks(2, WEIGHTS, {"NETBOTTLENECK_START_STEP": "0"}, args=[str(seed)])
    assert "equal True" in first.stdout
    assert ("averages their gradients. Ranks with other weights: 1. Leave it out" in first.stderr) == bool(seed)
    assert "other weights" not in second.stderr


AROUND_DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck
from netbottleneck.hooks.loop import Run

dist.init_process_group("gloo")


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


model = Around(DistributedDataParallel(torch.nn.Linear(4, 2)))
optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), [p.detach().clone() for p in model.parameters()]
for measure in (lambda: netbottleneck.profile(model, optimizer).__enter__(), lambda: Run(model, optimizer)):
    try:
        measure()
    except ValueError as error:
        print(error)
assert all(map(torch.equal, before, model.parameters()))
"""


def test_a_module_around_a_ddp_model_is_refused_and_stays_as_it_is(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, AROUND_DDP, {"NETBOTTLENECK_START_STEP": "0"}):
        by_profile, by_framework = result.stdout.splitlines()
        assert by_profile.endswith("pass that model instead, netbottleneck.profile(model.inner, optimizer)")
        assert by_framework.startswith("a Around on 2 ranks: netbottleneck measures models of DistributedData")


UNFIT = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Wrapper(torch.optim.Optimizer):
    def __init__(self, inside):  # calls no other, as Accelerate's
        self.inside = inside


def train():
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad.tolist() == [[2.0] * 4] * 4, model.weight.grad  # of this rank alone
        optimizer.step()


scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for wrong in (scheduler, "sgd", torch.optim.SGD, Wrapper(optimizer), model):
    before = model.weight.clone()
    try:
        with netbottleneck.profile(model, wrong, transport="tcp"):
            raise AssertionError(wrong)
    except TypeError as error:
        assert str(error).startswith(f"optimizer: {type(wrong).__name__} takes no step hooks"), error
    assert torch.equal(before, model.weight)
    train()
assert netbottleneck.attach(DistributedDataParallel(model), scheduler) is None  # the log says why
assert not os.path.exists(os.environ["NETBOTTLENECK_DIR"])
print("refused")
"""


def test_an_optimizer_without_step_hooks_is_refused_before_anything_changes(warm_ranks: Ranks, tmp_path: Path) -> None:
    for result in warm_ranks(2, UNFIT, {**ENV, "NETBOTTLENECK_DIR": str(tmp_path / "run")}):
        assert "refused" in result.stdout
        assert "is left alone: optimizer: StepLR takes no step hooks" in result.stderr


FAILING = """
import torch
import torch.distributed as dist
import netbottleneck
from netbottleneck.hooks import measured_model

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def failing(*_, **__):
    raise RuntimeError("no hooks")


measured_model.Updates = failing
try:
    with netbottleneck.profile(model, optimizer, transport="tcp"):
        raise AssertionError
except RuntimeError as error:
    assert str(error) == "no hooks", error
for _ in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    assert model.weight.grad.tolist() == [[2.0 + 2.0 * dist.get_rank()] * 4] * 4, model.weight.grad
    optimizer.step()
print("trained alone")
"""


def test_a_measurement_that_cannot_begin_leaves_no_hook_and_ends_its_run_with_the_error(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    for result in warm_ranks(2, FAILING, {**ENV, "NETBOTTLENECK_DIR": str(tmp_path / "run")}):
        assert "trained alone" in result.stdout
    assert [rank.error for rank in load(tmp_path / "run").ranks] == ["RuntimeError: no hooks"] * 2


OTHER = """
import torch
import torch.distributed as dist
import netbottleneck

torch.set_num_threads(1)
dist.init_process_group("gloo")
model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with netbottleneck.profile(model, torch.optim.AdamW(other.parameters()), transport="tcp"):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
        assert model.weight.grad.tolist() == [[3.0] * 4] * 4, model.weight.grad
        optimizer.step()
print("trained")
"""


def test_an_optimizer_that_never_steps_is_named_as_the_reason_for_a_run_without_steps(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    results = warm_ranks(2, OTHER, {**ENV, "NETBOTTLENECK_DIR": str(tmp_path / "run")})
    assert ["trained" in result.stdout for result in results] == [True, True]
    assert "the measured optimizer, AdamW, updates weights, and it made no update" in results[0].stderr


GENERATOR = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck
from netbottleneck.hooks import loop

torch.set_num_threads(1)
dist.init_process_group("gloo")
how, end = sys.argv[1:]
model = torch.nn.Linear(4, 4)
model = DistributedDataParallel(model) if how == "accelerate" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
measured = {"accelerate": loop._measured_loop, "profile": netbottleneck.profile}[how]


def steps():
    with measured(model, optimizer):
        while True:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            yield


for count, _ in enumerate(steps()):
    if count == 9 and end == "break":
        break
    if count == 9:
        raise KeyError("mine")
optimizer.step()  # belongs to no step of the run
print("after the loop")
"""


@pytest.mark.parametrize("how", ["profile", "accelerate"])
@pytest.mark.parametrize(("end", "error"), [("break", None), ("raise", "KeyError: 'mine'")])
def test_a_generator_that_is_left_ends_its_run_without_an_error_of_its_own(
    ranks: Ranks, tmp_path: Path, how: str, end: str, error: str | None
) -> None:
    env = {**ENV, "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    (tmp_path / "train.py").write_text(GENERATOR)
    results = ranks(2, tmp_path / "train.py", env, args=[how, end], check=False)
    assert ["after the loop" in result.stdout for result in results] == [error is None] * 2
    assert any("ended by an exception" in result.stderr for result in results) == (error is not None)
    run = load(tmp_path / "run")
    assert [(rank.finished, rank.error) for rank in run.ranks] == [(error is None, error)] * 2
    assert {step.index for step in run.steps} == set(range(10))
    assert error is not None or (tmp_path / "run" / "report.txt").exists()


AGAIN = """
import torch
import torch.distributed as dist
import netbottleneck

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def steps():
    with netbottleneck.profile(model, optimizer, transport="stock,tcp") as session:
        while True:
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
            assert model.weight.grad.tolist() == [[3.0] * 4] * 4, model.weight.grad
            optimizer.step()
            yield session


runs = []
for _ in range(3):
    for count, session in enumerate(steps()):
        if count == 4:
            break
    runs.append(session)
print("closed", [run.closed for run in runs], [run.error for run in runs])
"""


def test_a_generator_that_is_left_again_and_again_keeps_one_run_open(warm_ranks: Ranks, tmp_path: Path) -> None:
    for result in warm_ranks(2, AGAIN, {**ENV, "NETBOTTLENECK_DIR": str(tmp_path / "run")}):
        assert "closed [True, True, False] [None, None, None]" in result.stdout, result.stderr
    for folder in ("run", "run/2", "run/3"):
        assert (tmp_path / folder / "report.txt").exists()


COMPILED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck
from netbottleneck.hooks import ddp
from netbottleneck.hooks.loop import Run

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
model = DistributedDataParallel(net, gradient_as_bucket_view=True)
compiled, optimizer = torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), lr=0.1)


def gradients():
    model.zero_grad()
    compiled(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


expected = gradients()
with netbottleneck.profile(compiled, optimizer, transport="stock,tcp", directory="profiled"):
    assert ddp.measured_by(model) is not None
    for _ in range(8):
        assert all(map(torch.equal, gradients(), expected))
run = Run(compiled, optimizer)
assert run.session is not None and Run(compiled, optimizer).session is run.session
outer = DistributedDataParallel(torch.nn.Sequential(model))
assert ddp.attach(outer) is None
assert not ddp.measured_by(model).closed
assert any("a DDP model (Sequential" in note and "left alone" in note for note in run.session.notes), run.session.notes
run.end()
print("measured")
"""


def test_a_compiled_ddp_model_is_measured_as_that_model_is(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, COMPILED, {**ENV, "NETBOTTLENECK_TRANSPORT": "stock"}):
        assert "measured" in result.stdout


COUNT = """
import sys
import torch
import torch.distributed as dist
import netbottleneck

torch.set_num_threads(1)
dist.init_process_group("gloo")
netbottleneck.profile  # imported before anything is counted


class Many(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.each = torch.nn.ParameterList([torch.ones(3) for _ in range(count)])

    def forward(self, x):
        return torch.cat([p * x for p in self.each]).sum()


def calls(count):
    model = Many(count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    with netbottleneck.profile(model, optimizer, transport=sys.argv[1], directory=f"run.{count}"):
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(3))
            seen = []
            sys.setprofile(lambda frame, event, argument: seen.append(event) if event in ("call", "c_call") else None)
            loss.backward()
            sys.setprofile(None)
            found.append(len(seen))
            optimizer.step()
    return found[2:]  # the first step settles the order of the buckets


few, many = calls(10), calls(1000)
print("calls", few, many)
assert set(few) == set(many), (few, many)
"""


@pytest.mark.parametrize("transport", ["tcp", "ofi"])
def test_a_backward_pass_runs_no_python_for_each_parameter(warm_ranks: Ranks, transport: str) -> None:
    for result in warm_ranks(2, COUNT, ENV, args=[transport]):
        assert "calls [" in result.stdout


BOTH = """
import copy
import sys
import netbottleneck
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
torch.manual_seed(1)
models = [torch.nn.Linear(6, 700), torch.nn.Linear(700, 600)]
twins = copy.deepcopy(models)


def sgd(*trained):
    return torch.optim.SGD([p for model in trained for p in model.parameters()], lr=0.01, momentum=0.5)


def average():
    for parameter in [p for twin in twins for p in twin.parameters()]:
        dist.all_reduce(parameter.grad.div_(2))


def train(models, optimizers, averaged=lambda: None):
    torch.manual_seed(dist.get_rank())
    for _ in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = torch.randn(4, 6)
        for model in models:
            value = model(value)
        value.square().mean().backward()
        averaged()
        for optimizer in optimizers:
            optimizer.step()


train(twins, [sgd(twin) for twin in twins], average)
if sys.argv[1] == "one optimizer":
    train([DistributedDataParallel(model) for model in models], [sgd(*models)])
elif sys.argv[1] == "two optimizers":
    train([DistributedDataParallel(model) for model in models], [sgd(model) for model in models])
else:
    whole = DistributedDataParallel(torch.nn.Sequential(*models))
    optimizer = sgd(whole)
    with netbottleneck.profile(whole, optimizer, directory="profiled"):
        train([whole], [optimizer])
for model, twin in zip(models, twins):
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert (ours - theirs).abs().max() < 1e-10, (ours - theirs).abs().max()
print("alike")
"""


@pytest.mark.parametrize("how", ["one optimizer", "two optimizers", "profile in a measured script"])
def test_several_models_or_optimizers_train_correctly(warm_ranks: Ranks, how: str) -> None:
    for result in warm_ranks(2, BOTH, {**ENV, "NETBOTTLENECK_TRANSPORT": "tcp"}, args=[how]):
        assert "alike" in result.stdout


FREED = """
import gc
import weakref
import netbottleneck
import torch
from netbottleneck.torch.gradients import Gradients

torch.set_num_threads(1)


def train(measured):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop():
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run = None
    if measured:
        with netbottleneck.profile(model, optimizer) as run:
            loop()
    else:
        loop()
    return run, weakref.ref(model.weight)


gc.disable()
train(False)  # torch imports the rest of itself, and its frames form a circle
_, weight = train(False)
assert weight() is None
run, weight = train(True)
assert weight() is None
assert not [one for one in gc.get_objects() if type(one) is Gradients]
assert run.closed
print("freed")
"""


@pytest.mark.parametrize("transport", ["stock", "tcp"])
def test_a_loop_that_has_ended_keeps_no_parameter_and_no_bucket(warm_ranks: Ranks, transport: str) -> None:
    for result in warm_ranks(2, FREED, {**ENV, "NETBOTTLENECK_TRANSPORT": transport}):
        assert "freed" in result.stdout
