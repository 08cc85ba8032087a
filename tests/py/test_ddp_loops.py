"""DDP models with our hooks, in the loops of scripts/training_loops.py, and models that are left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Ranks

from netbottleneck.trace.model import NOT_RECORDED

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent / "scripts"
ENV = {"NETBOTTLENECK_TIMEOUT_S": "60", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_DIR": "run"}
LOOPS = re.findall(
    r"^def (\w+)\(way: Way\) -> int", (SCRIPTS / "training_loops.py").read_text(encoding="utf-8"), re.MULTILINE
)
COMPILED = [name for name in LOOPS if "compiled" in name]
EAGER = [name for name in LOOPS if name not in COMPILED]


def end_alike(ranks: Ranks, script: str, names: list[str]) -> None:
    """Run the named loops of a script on two ranks; all results must equal those of plain DDP."""
    assert names
    for result in ranks(2, SCRIPTS / script, {**ENV, "LOOPS_TRANSPORT": "tcp"}, args=names):
        lines = [line for line in result.stdout.splitlines() if line.startswith(("ok ", "failed "))]
        assert lines == [f"ok {name}" for name in names], result.stderr


@pytest.mark.parametrize(
    "names",
    [[f"{EAGER[0]}/0"], [f"{EAGER[0]}/1"], EAGER[1::2], EAGER[2::2], COMPILED],
    ids=["settings-a", "settings-b", "eager-a", "eager-b", "compiled"],
)
def test_training_loops_end_as_with_plain_ddp(warm_ranks: Ranks, names: list[str]) -> None:
    end_alike(warm_ranks, "ddp_loops.py", names)


@pytest.mark.parametrize("transport", ["stock", "stock,ofi"])
def test_other_transports_end_alike(warm_ranks: Ranks, transport: str) -> None:
    names = ["gradients_of_three_passes_add_up", "each_rank_leaves_out_a_layer"]
    env = {**ENV, "LOOPS_TRANSPORT": transport, "NETBOTTLENECK_BLOCK_STEPS": "1"}
    for result in warm_ranks(2, SCRIPTS / "ddp_loops.py", env, args=names):
        assert [f"ok {name}" for name in names] == re.findall("^ok .*", result.stdout, re.MULTILINE), result.stderr


LIFE = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from netbottleneck.hooks import ddp

torch.set_num_threads(1)
dist.init_process_group("gloo")
os.environ["NETBOTTLENECK_TRANSPORT"] = "tcp"  # after the import, which would measure every model


def sgd(*trained, momentum=0.5):
    return torch.optim.SGD([p for each in trained for p in each.parameters()], lr=0.25, momentum=momentum)


def train(model, *optimizers, steps=4):
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randint(-2, 3, (4, 4)).float()).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def made():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return model


# Two optimizers that take turns have one step for both; an optimizer of something else counts for nothing.
model, twin = made(), made()
reference = DistributedDataParallel(twin)
train(reference, sgd(twin[0]), sgd(twin[1]))
ours = DistributedDataParallel(model)
measured = ddp.attach(ours)
stranger = torch.nn.Parameter(torch.ones(1))
stranger.grad = torch.ones(1)
other = torch.optim.SGD([stranger], lr=0.5)
other.step()
train(ours, sgd(model[0]), sgd(model[1]))
other.step()
assert measured.session.step == 4, measured.session.step

# A second call ends the first run.
again = ddp.attach(ours, sgd(model))
assert measured.session.closed and again.session.folder != measured.session.folder
train(ours, again_by := sgd(model))
assert again.session.step == 0  # another optimizer does not count
train(reference, sgd(twin))
again.session.close()  # without a report, which takes its time
back = ddp.attach(ours)
train(ours, sgd(model))
train(reference, sgd(twin))
assert back.session.step == 4

# After the end DDP goes on by itself.
back.session.close()
train(ours, sgd(model))
train(reference, sgd(twin))
for mine, theirs in zip(model.parameters(), twin.parameters()):
    assert torch.equal(mine, theirs)

print("done")
dist.barrier()
dist.destroy_process_group()
"""


SPARSE = """
import copy
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from netbottleneck.hooks import ddp

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
os.environ["NETBOTTLENECK_TRANSPORT"] = "tcp"
torch.manual_seed(1)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(0, 8, (5,))).square().sum().backward()
        optimizer.step()


first = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 2))
class Last(torch.nn.Module):  # its sparse gradient is ready first
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.words = torch.nn.Embedding(8, 4, sparse=True)

    def forward(self, x):
        return self.linear(torch.nn.functional.one_hot(x % 4, 4).double()) * self.words(x)


for model in (first, Last()):
    twin = copy.deepcopy(model)
    ours = DistributedDataParallel(model)
    session = ddp.attach(ours).session
    train(ours)
    assert session.step == 4
    session.close()
    train(DistributedDataParallel(twin))
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        assert (mine - theirs).abs().max() < 1e-10
print("done")
dist.barrier()
dist.destroy_process_group()
"""


def test_a_sparse_gradient_uses_ddps_own_path(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, SPARSE, ENV):
        assert "done" in result.stdout


def test_a_hook_is_taken_away_and_put_back(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, LIFE, ENV):
        assert "done" in result.stdout


REFUSED = """
import os
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from netbottleneck.hooks import ddp

dist.init_process_group("gloo")
os.environ["NETBOTTLENECK_TRANSPORT"] = "tcp"
with pytest.raises(TypeError, match="no DistributedDataParallel"):
    ddp.attach(torch.nn.Linear(2, 2))
alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
part = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=alone)
assert ddp.attach(part) is None
first, second = DistributedDataParallel(torch.nn.Linear(2, 2)), DistributedDataParallel(torch.nn.Linear(2, 2))
assert ddp.attach(first) is not None
assert ddp.attach(second) is None
os.environ["NETBOTTLENECK_STRICT"] = "1"
with pytest.raises(ValueError, match="has 1 of 2 ranks"):
    ddp.attach(part)
with pytest.raises(ValueError, match="another DDP model is measured"):
    ddp.attach(second)
print("done")
dist.barrier()
dist.destroy_process_group()
"""


def test_unmeasurable_models_are_left_alone_or_an_error_in_strict_mode(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, REFUSED, ENV):
        assert "done" in result.stdout
        assert "the DDP model of Linear is left alone: its process group has 1 of 2 ranks" in result.stderr


BESIDE = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from netbottleneck.hooks import ddp

dist.init_process_group("gloo")


class Own(DistributedDataParallel):
    pass


def made(width, kind=DistributedDataParallel):
    model = kind(torch.nn.Linear(width, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, model.module.in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


earlier, idle, beside, former = made(3), made(4), made(5, Own), made(6)
for _ in range(3):
    train(*earlier)
    train(*former)
measured = DistributedDataParallel(former[0].module), former[1]
session = ddp.attach(*measured).session
later = None
for _ in range(12):
    train(*beside)
    idle[0](torch.ones(1, 4))  # a forward pass with gradients alone
    train(*measured)
    later = later or made(7)
    train(*later)
after = made(8)
for _ in range(12):
    train(*after)
session.close()
for note in sorted(session.notes):
    print(note)
print("done")
dist.barrier()
dist.destroy_process_group()
"""


def test_models_that_train_beside_the_measured_one_are_noted_though_they_were_never_offered(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, BESIDE, ENV):
        named = re.findall(r"^a DDP model \((.*)\) was left alone: (.*), and what", result.stdout, re.MULTILINE)
        assert named == [(f"Linear, 2 parameters, {size} B", NOT_RECORDED) for size in (48, 64)]


FORWARDING = """
import os
import pytest
import torch
import torch.distributed as dist
import netbottleneck
from torch.nn.parallel import DistributedDataParallel
from netbottleneck.hooks import ddp

dist.init_process_group("gloo")


class Forwarding(DistributedDataParallel):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


model = Forwarding(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
assert ddp.measured_by(model) is not None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def fails(*_, **__):
    raise RuntimeError("of the measurement")


ddp.attach = fails
DistributedDataParallel(torch.nn.Linear(2, 2))
os.environ["NETBOTTLENECK_STRICT"] = "1"
with pytest.raises(RuntimeError, match="of the measurement"):
    DistributedDataParallel(torch.nn.Linear(2, 2))
print("done")
dist.barrier()
dist.destroy_process_group()
"""


def test_a_model_is_built_whatever_its_class_looks_up_and_the_measurement_raises(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, FORWARDING, {**ENV, "NETBOTTLENECK": "1"}):
        assert "done" in result.stdout
        assert "a DDP model is left alone: RuntimeError: of the measurement" in result.stderr


LOST = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from netbottleneck.errors import PeerError
from netbottleneck.hooks import ddp

dist.init_process_group("gloo")
os.environ["NETBOTTLENECK_TRANSPORT"] = "tcp"
model = DistributedDataParallel(torch.nn.Linear(1 << 18, 4))
ddp.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(1 << 20):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 1 << 18)).sum()
    if step == 3 and dist.get_rank() == 1:
        os._exit(0)
    try:
        loss.backward()
    except PeerError as error:
        print("lost", error.peer, flush=True)
        os._exit(0)
    optimizer.step()
"""


def test_a_lost_rank_is_named_in_the_backward_pass_of_the_others(warm_ranks: Ranks) -> None:
    first, _ = warm_ranks(2, LOST, ENV)
    assert first.stdout.splitlines()[-1] == "lost 1"
