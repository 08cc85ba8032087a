"""Records of a measured loop: its modules, and the begin and end of its steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Ranks

pytest.importorskip("torch")

import torch

from netbottleneck import config
from netbottleneck.analysis import intervals
from netbottleneck.hooks import left_alone, loop, observed, run_end
from netbottleneck.runtime import job
from netbottleneck.runtime.session import words
from netbottleneck.torch.optimizer import _Adasum, remade
from netbottleneck.trace.model import Trace
from netbottleneck.trace.ring_reader import load
from netbottleneck.trace.transports import Arm
from ringwriter import FakeRun

LOOP = """
import json
import torch
from torch.utils.checkpoint import checkpoint
import netbottleneck
from netbottleneck.trace import ring_reader

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inside = {inside}
updates = 0


def update(_):
    global updates
    updates += 1
    optimizer.step()
    optimizer.zero_grad()


if inside:
    model[0].weight.register_post_accumulate_grad_hook(update)
with netbottleneck.profile(model, optimizer):
    for _ in range(6):
        x = torch.ones(2, 4, requires_grad=True)
        if inside:  # each half of the loss runs the model once more, within the backward pass
            loss = sum(checkpoint(model, x, use_reentrant=True).square().mean() for _ in range(2))
        else:
            loss = model(x).square().mean()
        loss.backward()
        if not inside:
            update(None)
trace = ring_reader.load({run!r})
record = {{"updates": updates, "steps": len(trace.steps), "modules": list(trace.modules)}}
print(json.dumps({{**record, "ends": [[rank.finished, rank.error] for rank in trace.ranks]}}))
"""


@pytest.mark.parametrize(("inside", "updates"), [(False, 6), (True, 12)])
def test_a_step_is_one_pass_of_the_loop_for_any_place_of_its_updates(
    warm_ranks: Ranks, tmp_path: Path, inside: bool, updates: int
) -> None:
    run = tmp_path / "run"
    env = {"NETBOTTLENECK_DIR": str(run), "NETBOTTLENECK_START_STEP": "0"}
    result = warm_ranks(1, LOOP.format(inside=inside, run=str(run)), env)[0]
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["updates"] == updates
    assert record["steps"] in (5, 6)  # the last may have no end
    assert record["modules"] == ["0", "1", "2"]
    assert record["ends"] == [[True, None]]


UNUSED = """
import copy
import sys
import torch
import netbottleneck

torch.manual_seed(1)
layers = {name: torch.nn.Linear(4, 4) for name in ("first", "unused", "last")}
model = torch.nn.ModuleDict(layers)
model.forward = lambda x: model["last"](model["first"](x))
twin = copy.deepcopy(model)
twin.forward = lambda x: twin["last"](twin["first"](x))


def train(model, optimizer):
    for step in range(6):
        optimizer.zero_grad()
        if step == 3:
            model["first"].requires_grad_(False)
        if step != 4:
            model(torch.full((2, 4), step + 1.0)).square().mean().backward()
        optimizer.step()
    return [parameter.grad is None for parameter in model.parameters()]


def adam(model):
    return torch.optim.AdamW(model.parameters(), weight_decay=0.1)


theirs = adam(twin)
expected = train(twin, theirs)
optimizer = adam(model)
with netbottleneck.profile(model, optimizer, transport=sys.argv[1]):
    assert train(model, optimizer) == expected, expected
for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
    assert torch.equal(mine, plain)
assert len(optimizer.state) == len(theirs.state) == 4
print("alike")
"""


@pytest.mark.parametrize("transport", ["tcp", "stock", "stock,tcp"])
def test_one_rank_trains_as_without_us_with_parameters_that_have_no_gradient(
    warm_ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    env = {"NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_BLOCK_STEPS": "1"}
    assert "alike" in warm_ranks(1, UNUSED, env, args=[transport])[0].stdout


RAISES = """
import copy
import torch
import torch.distributed as dist
import netbottleneck

raising, transport = {raising!r}, {transport!r}
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
twin = copy.deepcopy(model)


def average():
    for parameter in twin.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(model, averaged):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    yield optimizer
    failing = []

    def look(gradient):
        if failing:
            raise RuntimeError("of the script")

    model[0].weight.register_hook(look)
    for step in range(7):
        failing[:] = [step] * (step in (0, 3, 4) and dist.get_rank() in raising)
        optimizer.zero_grad()
        loss = model(torch.full((2, 8), step + 1.0 + dist.get_rank())).square().mean()
        try:
            loss.backward()
        except RuntimeError as error:
            if str(error) != "of the script":
                raise
            continue
        averaged()
        optimizer.step()


if len(raising) == dist.get_world_size():
    for _ in train(twin, average):
        pass
loop = train(model, lambda: None)
try:
    with netbottleneck.profile(model, next(loop), transport=transport):
        for _ in loop:
            pass
except netbottleneck.Error as error:
    print("error", error)
else:
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, plain)
    print("alike")
"""
RAISES_ENV = {"NETBOTTLENECK_BUCKET_BYTES": "300", "NETBOTTLENECK_BLOCK_STEPS": "1"}


@pytest.mark.parametrize(("ranks", "transport"), [(1, "tcp"), (2, "tcp"), (2, "stock,tcp")])
def test_training_goes_on_after_a_backward_pass_that_raised_on_all_ranks(
    warm_ranks: Ranks, tmp_path: Path, ranks: int, transport: str
) -> None:
    env = {**RAISES_ENV, "NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_TIMEOUT_S": "60"}
    for result in warm_ranks(ranks, RAISES.format(raising=list(range(ranks)), transport=transport), env):
        assert "alike" in result.stdout


def test_a_backward_pass_that_raised_on_one_rank_is_an_error_there(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**RAISES_ENV, "NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_TIMEOUT_S": "5"}
    results = warm_ranks(2, RAISES.format(raising=[0], transport="tcp"), env)
    assert "a backward pass of rank 0 raised an exception, and not that of every rank" in results[0].stdout
    assert "error" in results[1].stdout


NESTED = """
import torch
from torch.utils.checkpoint import checkpoint
import netbottleneck
from netbottleneck.torch.gradients import Gradients

layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])


class Model(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.layers, self.head = layers, head

    def forward(self, x, depth):
        def nested(x, layer, depth):
            run = layer if depth == 1 else lambda x: nested(x, layer, depth - 1)
            return checkpoint(run, x, use_reentrant=True)

        if self.head is None:
            return nested(nested(x, self.layers, depth), self.layers[0], depth)
        return self.head(nested(x, self.layers, depth))


flush, count = Gradients.flush, []
Gradients.flush = lambda self: (count.append(1), flush(self))[1]
for head in (None, torch.nn.Linear(4, 4)):
    model = Model(head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with netbottleneck.profile(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            count.clear()
            model(torch.ones(2, 4, requires_grad=True), 1 + step % 3).square().mean().backward()
            print("flushed", len(count))
            optimizer.step()
"""


def test_gradients_of_nested_passes_are_sent_once_at_the_end_of_the_outermost(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    result = warm_ranks(1, NESTED, {"NETBOTTLENECK_DIR": str(tmp_path / "run")})[0]
    assert [line for line in result.stdout.splitlines() if line.startswith("flushed")] == ["flushed 1"] * 12


SAMPLED = """
import torch
import netbottleneck

fast, calls = torch._transformer_encoder_layer_fwd, []
torch._transformer_encoder_layer_fwd = lambda *args: (calls.append(1), fast(*args))[1]
frozen = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval().requires_grad_(False)
model = torch.nn.Sequential(frozen, torch.jit.script(torch.nn.ReLU()), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
with netbottleneck.profile(model, optimizer):
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 3, 8)).sum().backward()
        optimizer.step()
print("fast", len(calls))
"""


def test_a_sampled_step_leaves_a_fast_path_and_torchscript_as_they_are(warm_ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    env = {"NETBOTTLENECK_DIR": str(run), "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_SAMPLE_EVERY": "1"}
    result = warm_ranks(1, SAMPLED, env)[0]
    assert "fast 6" in result.stdout.splitlines()
    trace = load(run)
    assert not [note for note in trace.notes if "measuring ended" in note]
    assert len(trace.steps) >= 5
    for step in trace.steps:
        assert [trace.modules[index] for index, _, _ in step.modules] == ["2"]


CLOSURE = """
import torch
import netbottleneck

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss


with netbottleneck.profile(model, optimizer):
    for _ in range(6):
        optimizer.step(closure)
"""


def test_the_passes_of_a_closure_are_compute_and_not_the_optimizer(warm_ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    warm_ranks(1, CLOSURE, {"NETBOTTLENECK_DIR": str(run), "NETBOTTLENECK_START_STEP": "0"})
    steps = [step for step in load(run).steps if step.grad_ready]
    assert len(steps) >= 4
    for step in steps:
        ((begin, end),) = step.forward
        assert [a < b <= begin or end <= a < b for a, b in step.optimizer] == [True, True]
        assert intervals.backward_intervals(step)[0][1] <= step.optimizer[1][0]


COMPILED = """
import torch
import netbottleneck


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self._step = None

    def _impl(self, x):
        return self.layers(x)

    def forward(self, x):
        if self._step is None:
            self._step = torch.compile(self._impl, fullgraph=True, backend="aot_eager")
        return self._step(x)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with netbottleneck.profile(model, optimizer):
    for step in range(12):
        optimizer.zero_grad()
        model(torch.ones(2 + step // 6, 4)).sum().backward()  # compiled again for another size
        optimizer.step()
frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print("graphs", frames)
"""


def test_a_sampled_step_leaves_compiled_code_inside_the_model_as_it_is(warm_ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    env = {"NETBOTTLENECK_DIR": str(run), "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_SAMPLE_EVERY": "1"}
    result = warm_ranks(1, COMPILED, env)[0]
    graphs = next(int(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("graphs"))
    assert graphs <= 3  # the first pass calls the compiler after it is sampled
    trace = load(run)
    assert len([note for note in trace.notes if "the training uses torch.compile" in note]) == 1
    assert not [note for note in trace.notes if "measuring ended" in note]
    assert not [step.modules for step in trace.steps[1:] if step.modules]


# A rank with a DDP model of three buckets from the second pass on, in a run whose session is given.
DDP = """
import json
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from netbottleneck import config
from netbottleneck.hooks import ddp
from netbottleneck.runtime.session import open_session
from netbottleneck.trace import ring_reader

torch.set_num_threads(1)
dist.init_process_group("gloo")
os.environ["NETBOTTLENECK_TRANSPORT"] = {transport!r}  # after the import, which would measure every model
layers = [torch.nn.Linear(600, 600) for _ in range(3)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
session = open_session(config.settings(), model="Sequential")
"""

DDP_END = """
def train(steps, look):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 600)).sum().backward()
        look()
        optimizer.step()
        look()


run()
session.close()
dist.destroy_process_group()
print(json.dumps({"record": record, "folder": str(session.folder)}))
"""
ENV = {"NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2", "NETBOTTLENECK_TIMEOUT_S": "60"}


def ran(warm_ranks: Ranks, tmp_path: Path, transport: str, source: str) -> tuple[Any, Trace, str]:
    """Run `run` of a source with the DDP model; return `record`, the trace and stderr."""
    env = {**ENV, "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    script = DDP.format(transport=transport) + source + DDP_END
    result = warm_ranks(1, script, env)[0]
    printed = json.loads(result.stdout.splitlines()[-1])
    return printed["record"], load(printed["folder"]), result.stderr


LAYOUTS = """
record = {"layouts": [], "pending": []}


def run():
    measured = ddp.attach(model, session=session)
    gradients = measured.gradients
    layers[0].weight.register_post_accumulate_grad_hook(lambda _: record["pending"].append(gradients.pending))

    def note():
        record["layouts"].append([gradients.version, [[b.name, *b.parameters] for b in gradients.buckets]])

    def look():
        record["pending"].append(gradients.pending)
        note()

    note()
    train(6, look)
"""


@pytest.mark.parametrize("transport", ["tcp", "stock,tcp"])
def test_each_layout_of_ddps_buckets_has_its_own_version_and_all_are_recorded(
    warm_ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    record, trace, log = ran(warm_ranks, tmp_path, transport, LAYOUTS)
    assert "left alone" not in log
    layouts = [(version, json.dumps(layout)) for version, layout in record["layouts"]]
    assert len({version for version, _ in layouts}) == len({layout for _, layout in layouts}) == len(set(layouts))
    names = {name for _, layout in record["layouts"] for name, *_ in layout}
    assert len(names) > 1  # DDP lays its buckets out anew after the first pass
    last = [name for name, *_ in record["layouts"][-1][1]]
    assert [bucket.name for bucket in trace.buckets][: len(last)] == last
    assert {bucket.name for bucket in trace.buckets} >= {op.name for op in trace.collectives if not op.by_script}
    assert {c.arm for c in trace.collectives if c.bucket is not None} == set(transport.split(","))


def test_buckets_under_way_are_those_sent_and_not_waited_for(warm_ranks: Ranks, tmp_path: Path) -> None:
    record, _, _ = ran(warm_ranks, tmp_path, "tcp", LAYOUTS)
    inside, after = record["pending"][0::3], record["pending"][1::3] + record["pending"][2::3]
    assert inside[0] == 0  # one bucket, which is sent with its last gradient
    assert min(inside[2:]) > 0
    assert set(after) == {0}


SEGMENTS = """
from torch.utils.checkpoint import checkpoint


class Segments(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


model = DistributedDataParallel(Segments(), bucket_cap_mb=1)
record = {"inside": [], "after": []}


def run():
    gradients = ddp.attach(model, session=session).gradients
    layers[0].weight.register_post_accumulate_grad_hook(lambda _: record["inside"].append(gradients.pending))
    train(8, lambda: record["after"].append(gradients.pending))
"""


def test_buckets_stay_under_way_from_one_reentrant_checkpoint_to_the_next(warm_ranks: Ranks, tmp_path: Path) -> None:
    record, trace, _ = ran(warm_ranks, tmp_path, "tcp", SEGMENTS)
    assert record["inside"][-2:] == [2, 2]  # of three; the layout is known by then
    assert set(record["after"]) == {0}
    assert not [note for note in trace.notes if "measuring ended" in note]


BARE = """
record = []


def run():
    ddp.attach(model, session=session)
    for _ in range(8):
        record.append([session.arm, "__call__" in vars(DistributedDataParallel)])
        train(1, lambda: None)
"""


def test_a_bare_step_calls_the_model_without_our_wrapper(warm_ranks: Ranks, tmp_path: Path) -> None:
    record, _, _ = ran(warm_ranks, tmp_path, "stock,bare", BARE)
    assert {arm for arm, _ in record} == {"stock", "bare"}
    assert [wrapped for _, wrapped in record] == [arm == "stock" for arm, _ in record]


FAILING = """
from netbottleneck.hooks import reducer_group

record = []


def full(name):
    raise OSError(28, "No space left on device")


def run():
    reducer_group.key_of = full
    ddp.attach(model, session=session)
    train(3, lambda: record.append(layers[0].weight.grad is not None))
"""


def test_a_failure_to_record_a_bucket_is_logged_once_and_ends_only_the_recording(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    record, trace, log = ran(warm_ranks, tmp_path, "stock", FAILING)
    assert record == [True] * 6
    assert log.count("measuring has ended, the training goes on: OSError: [Errno 28] No space left on device") == 1
    assert [note for note in trace.notes if "measuring ended at step 0" in note]


RANGES = """
from netbottleneck import config
from netbottleneck.runtime.session import open_session

class Ranges:
    open, seen = [], []
    def range_start(self, name):
        self.open.append(name)
        return name
    def range_end(self, which):
        self.open.remove(which)
        self.seen.append(which)

session = open_session(config.settings({"transports": "null", "directory": "run", "progress_s": 0}))
session.ranges = Ranges()
for step in range(3):
    session.begin()
    assert Ranges.open == [f"step {step} over null"], Ranges.open
    session.end(recorded=step != 1)  # a step that the script leaves is a range too
session.end(recorded=False)
session.close()
assert (Ranges.open, Ranges.seen) == ([], [f"step {step} over null" for step in range(3)])
"""


def test_each_step_of_a_gpu_is_an_nvtx_range_with_its_arm(plain_ranks: Ranks) -> None:
    plain_ranks(1, RANGES)


LATE = """
import contextlib
import signal
import types
from netbottleneck.hooks import run_end


def write(session, show):
    with contextlib.suppress(Exception):
        signal.raise_signal(signal.SIGALRM)  # the timer of the limit sends it
    print("went on")


run_end._write = write
place = types.SimpleNamespace(rank=0)
run_end.report(types.SimpleNamespace(place=place, until=0.0, folder="run", collect=lambda: None))
print("reported")
"""


def test_the_limit_of_the_report_is_no_error_that_its_code_handles(warm_ranks: Ranks) -> None:
    (result,) = warm_ranks(1, LATE, {})
    assert "reported" in result.stdout, result.stdout + result.stderr
    assert "went on" not in result.stdout
    assert (
        "the report is not complete, as it takes longer than 1 s: netbottleneck report run --write run" in result.stderr
    )


FOREIGN_HANDLER = """
import signal
from netbottleneck.hooks import run_end

real = signal.signal


def of_c(number, handler):
    real(number, handler)  # raises TypeError for None


# As Python has it of a handler that C code installed before Python started.
signal.signal, signal.getsignal = of_c, lambda number: None
with run_end._at_most(60.0):
    print("reported")
"""


def test_a_handler_of_other_code_for_the_alarm_stays(warm_ranks: Ranks) -> None:
    (result,) = warm_ranks(1, FOREIGN_HANDLER, {})
    assert "reported" in result.stdout


def test_an_exception_ends_the_process_only_if_it_is_not_interactive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.uncaught() is None
    failure = NameError("of a cell")
    monkeypatch.setattr(sys, "last_value", failure, raising=False)
    assert job.uncaught() is failure
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert job.uncaught() is None


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"step": 0}, "a step ends where a torch optimizer updates weights"),
        (
            {"step": 0, "optimizer": "AdamW"},
            "a step ends where the measured optimizer, AdamW, updates weights, and it made no update: measure the one",
        ),
        ({"step": 8}, "the run has 8 steps, and NETBOTTLENECK_START_STEP=10"),
        ({"step": 1}, "the run has 1 step, and NETBOTTLENECK_START_STEP=10"),
        (
            {"stays": Arm("stock")},
            "all further steps use stock: ranks differ; leave out NETBOTTLENECK_TRANSPORT to obs",
        ),
        ({"step": 0, "followed": True}, "its model was measured in another run from then on, by netbottleneck.profile"),
    ],
)
def test_a_run_without_steps_names_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, known: dict[str, Any], reason: str
) -> None:
    folder, chosen = FakeRun(tmp_path, blocks=0).write(), config.settings(environ={})
    every = {"step": 9, "stays": None, "why_stays": "ranks differ", "followed": False, "optimizer": "", **known}
    session: Any = SimpleNamespace(folder=folder, settings=chosen, **every)
    run_end._write(session, show=False)
    assert f": no step was recorded: {reason}" in caplog.text


def test_a_run_whose_file_of_events_had_no_room_for_a_step_says_so(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_TRACE_EVENTS": "5"}
    source = """
import netbottleneck, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    results = warm_ranks(2, source, env)
    assert "no step was recorded: " in results[0].stderr
    assert "(NETBOTTLENECK_TRACE_EVENTS)" in results[0].stderr


@pytest.mark.parametrize("source", ["transport", "NETBOTTLENECK_TRANSPORT"])
def test_an_untouched_arm_of_a_plain_model_is_refused_by_the_name_of_its_source(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    model = torch.nn.Linear(4, 4)
    monkeypatch.setenv("NETBOTTLENECK_TRANSPORT", "stock,bare")
    given = {source: "stock,bare"} if source == "transport" else {}
    with pytest.raises(ValueError, match=f"^{source}=stock,bare: netbottleneck alone moves the gradients"):
        loop.profile(model, torch.optim.SGD(model.parameters(), lr=0.1), **given).__enter__()


def test_an_exception_without_a_message_is_recorded_by_its_type() -> None:
    assert words(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert words(RuntimeError("boom")) == "RuntimeError: boom"


LEAVING = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "error"), [(0, None), (3, "SystemExit: 3")])
def test_an_exit_with_another_code_than_0_is_the_error_of_its_rank(
    ranks: Ranks, tmp_path: Path, code: int, error: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEAVING)
    env = {"NETBOTTLENECK_DIR": str(tmp_path / "run"), "NETBOTTLENECK_START_STEP": "0"}
    (result,) = ranks(1, "netbottleneck", env, args=["run", str(script), str(code)], check=False)
    assert result.code == code
    hint = f"rank 0 ended by an exception; its steps until then: netbottleneck report {tmp_path / 'run'}"
    assert result.stderr.count(hint) == (error is not None)
    trace = load(tmp_path / "run")
    assert trace.steps
    assert [(rank.finished, rank.error) for rank in trace.ranks] == [(error is None, error)]


def test_an_optimizer_that_combines_steps_is_not_told_to_average_gradients() -> None:
    optimizer = remade(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), _Adasum)
    assert left_alone.why_not(optimizer).startswith("Horovod's Adasum combines steps, not gradients")


class _Refusing(torch.nn.Sequential):
    """A module without a list of parameters, whose class has another error than torch for a missing name."""

    def parameters(self, lr: float) -> Any:
        return [{"params": super().parameters(), "lr": lr}]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise KeyError(name)
        return super().__getattr__(name)


def test_a_module_that_refuses_questions_about_it_runs_while_a_model_is_sought() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    stop = observed.attach_when_known(optimizer)
    try:
        assert _Refusing(torch.nn.ReLU())(torch.ones(2)).tolist() == [1.0, 1.0]
    finally:
        stop()


REFUSING = """
import torch
import netbottleneck
import horovod.torch as hvd

hvd.init()
torch.manual_seed(0)


class Net(torch.nn.Sequential):
    def __getattr__(self, name):
        if name.startswith("_"):
            raise KeyError(name)
        return super().__getattr__(name)


class Loss(torch.nn.MSELoss):
    def parameters(self, lr):
        return [lr]


model, loss = Net(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)), Loss()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
loss(torch.ones(1), torch.ones(1))
for _ in range(4):
    optimizer.zero_grad()
    loss(model(torch.ones(2, 4)), torch.ones(2, 1)).backward()
    optimizer.step()
print("trained")
hvd.shutdown()
"""


def test_a_model_is_found_among_modules_that_refuse_questions(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    for result in warm_ranks(2, REFUSING, env):
        assert "trained" in result.stdout, result.stderr
        assert "measuring has ended" not in result.stderr
    assert load(tmp_path / "run").modules == ("0", "1")


INNER = """
import os
import time
import torch, torch.distributed as dist
import netbottleneck
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
ddp = DistributedDataParallel(inner)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(24):
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step % 4 == 0:
        with torch.no_grad():
            for _ in range(3):
                ddp.module(torch.ones(2, 4))
                time.sleep(0.01)
            ddp.module(torch.ones(2, 4))
dist.destroy_process_group()
"""


def test_evaluation_by_the_module_inside_a_ddp_model_is_evaluation(warm_ranks: Ranks, tmp_path: Path) -> None:
    names = {"DIR": str(tmp_path / "run"), "START_STEP": "0", "TRANSPORT": "stock,tcp", "BLOCK_STEPS": "4"}
    warm_ranks(2, INNER, {f"NETBOTTLENECK_{name}": value for name, value in {**names, "SAMPLE_EVERY": "5"}.items()})
    steps = load(tmp_path / "run").steps
    assert any(step.sampled for step in steps)
    for step in steps:
        assert len(step.forward) == 1
        assert len(step.evaluation) == (4 if step.index % 4 == 1 else 0)
        assert all(begin < step.forward[0][0] for begin, _ in step.evaluation)
        layers = {index for index, *_ in step.modules}
        assert len(layers) == (3 if step.sampled else 0)
    assert all(
        evaluated >= 30_000_000
        for evaluated in (step.evaluation[-1][1] - step.evaluation[0][0] for step in steps if step.evaluation)
    )
