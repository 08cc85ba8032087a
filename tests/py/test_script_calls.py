"""The script's own calls: collectives of torch.distributed, steps of other optimizers, evaluation and checkpoints."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import Ranks

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from netbottleneck import _core
from netbottleneck.analysis.intervals import backward_intervals, split_steps
from netbottleneck.hooks import collectives
from netbottleneck.hooks.updates import Updates
from netbottleneck.report import Run
from netbottleneck.trace import ring_file
from netbottleneck.trace.model import Trace
from netbottleneck.whatif.plan import travelling_bytes

# Two ranks with a DDP model. `body` runs once a step, after the forward pass; what it returns is compared.
SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck
import netbottleneck.torch
from netbottleneck.launch import connect

torch.set_num_threads(1)
dist.init_process_group("{backend}")
rank, size = dist.get_rank(), dist.get_world_size()
now = connect.core().now_ns
work_type = dist.distributed_c10d.Work
spots = [(dist.ProcessGroup, "allreduce"), (dist.ProcessGroup, "barrier"), (work_type, "wait"),
         (torch._C.Future, "wait"),
         (dist, "_broadcast_coalesced"), (torch.serialization, "_open_zipfile_writer")]
own = [vars(owner)[name] for owner, name in spots]
untouched = lambda: all(vars(owner)[name] is one for (owner, name), one in zip(spots, own))
notes = {{"untouched": [], "values": [], "times": []}}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        return inside(self.norm(self.layer(x)))


inside = lambda x: x
{setting}
torch.manual_seed(rank)
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{made}
for step in range({steps}):
    notes["untouched"].append(untouched())
    optimizer.zero_grad()
    output = model(torch.full((4, 8), rank + step + 1.0))
{before}
    output.square().sum().backward()
    optimizer.step()
{after}
    notes["values"].append([p.tolist() for p in model.parameters()])
notes["untouched"].append(untouched())
dist.barrier()
dist.destroy_process_group()
print(json.dumps(notes))
"""
ENV = {"NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_TIMEOUT_S": "60"}


def ran(
    ranks: Ranks,
    folder: Path,
    transport: str = "",
    *,
    setting: str = "",
    made: str = "",
    before: str = "",
    after: str = "",
    steps: int = 6,
    block: int = 100,
    backend: str = "gloo",
) -> tuple[list[Any], Trace | None]:
    """Run the script with these parts; "": not measured. Return each rank's notes, and the trace."""
    indented = {
        name: "\n".join(f"    {line}" for line in text.strip("\n").splitlines())
        for name, text in (("before", before), ("after", after))
    }
    where = {"NETBOTTLENECK_DIR": str(folder), "NETBOTTLENECK_TRANSPORT": transport}
    env = {**where, **ENV, "NETBOTTLENECK_BLOCK_STEPS": str(block)} if transport else {}
    source = SCRIPT.format(backend=backend, setting=setting, made=made, steps=steps, **indented)
    results = ranks(2, source, env)
    notes = [
        json.loads([line for line in result.stdout.splitlines() if line.startswith("{")][-1]) for result in results
    ]
    return notes, Run(folder).trace if transport else None


ALL_KINDS = """
got = []
full = torch.full((1000,), rank + 1.0)
dist.all_reduce(full)
parts = [torch.zeros(10, dtype=torch.int64) for _ in range(size)]
dist.all_gather(parts, torch.full((10,), rank))
flat = torch.zeros(20)
dist.all_gather_into_tensor(flat, torch.full((10,), float(rank)))
shared = torch.full((5,), float(rank))
dist.broadcast(shared, 1)
summed = torch.full((6,), rank + 1.0)
dist.reduce(summed, 0)
gathered = [torch.zeros(4) for _ in range(size)] if rank == 0 else None
dist.gather(torch.full((4,), float(rank)), gathered, 0)
scattered = torch.zeros(3)
dist.scatter(scattered, [torch.full((3,), 1.0 + r) for r in range(size)] if rank == 0 else None, 0)
reduced = torch.zeros(7)
dist.reduce_scatter_tensor(reduced, torch.arange(14.0))
if rank == 0:
    dist.send(torch.full((9,), 3.0), 1)
    received = torch.zeros(9)
else:
    received = torch.zeros(9)
    dist.recv(received, 0)
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
later = torch.full((11,), rank + 1.0)
work = dist.all_reduce(later, async_op=True, group=small)
kind = type(work).__name__
work.wait()
together = [torch.full((2,), rank + 1.0), torch.full((3,), rank + 2.0)]
with dist._coalescing_manager():
    for one in together:
        dist.all_reduce(one)
dist.barrier()
got += [full, *parts, flat, shared, *(gathered or []), scattered, reduced, received, later, *together]
notes["values"].append([one.tolist() for one in got] + [objects, kind, work.is_completed()])
"""


@pytest.mark.parametrize("transport", ["stock", "tcp"])
def test_each_call_of_torch_distributed_is_recorded_and_its_results_stay(
    warm_ranks: Ranks, tmp_path: Path, transport: str
) -> None:
    parts: Any = {"made": "small = dist.new_group([0, 1])", "before": ALL_KINDS}
    plain, _ = ran(warm_ranks, tmp_path, **parts)
    measured, trace = ran(warm_ranks, tmp_path / "run", transport, **parts)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert trace is not None
    for rank in range(2):
        own = [c for c in trace.collectives if c.rank == rank and c.by_script and c.step == 3 and c.phase == "other"]
        assert all(c.finished and c.submit_ns <= (c.start_ns or 0) <= (c.done_ns or 0) for c in own)
        assert {c.ranks for c in own} == {2}
        found = [(c.kind, c.tensor_bytes) for c in own]
        point = ("send" if rank == 0 else "recv", 36)
        for wanted in (
            ("allreduce", 4000),
            ("allgather", 160),
            ("allgather", 80),
            ("broadcast", 20),
            ("reduce", 24),
            ("gather", 32),
            ("scatter", 24),
            ("reducescatter", 56),
            point,
            ("allreduce", 44),
            ("allreduce", 20),
            ("barrier", 0),
        ):
            assert wanted in found
        assert {c.arm for c in own} == {transport}
    whole = [c for c in trace.collectives if c.by_script and c.kind not in ("send", "recv")]
    assert sorted(c.match for c in whole if c.rank == 0) == sorted(c.match for c in whole if c.rank == 1)


FUNCTIONAL = """
got = []
whole = torch.full((1000,), rank + 1.0)
got += [functional.all_reduce(whole, "sum", world) + 1]
got += functional.all_reduce_coalesced([whole[:3].clone(), whole[:4].clone()], "max", world)
got += [functional.all_gather_tensor(torch.full((10,), float(rank)), 0, world)]
got += [functional.reduce_scatter_tensor(torch.arange(14.0), "sum", 0, world)]
got += [functional.all_to_all_single(torch.arange(6.0) + rank, [3, 3], [3, 3], world)]
got += [functional.broadcast(torch.full((5,), float(rank)), 1, world)]
got += [torch.ops._c10d_functional.all_reduce_.default(torch.full((11,), rank + 1.0), "sum", world.group_name)]
got[-1] = functional.wait_tensor(got[-1])
whole_again = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
leaf = torch.full((12,), rank + 1.0, requires_grad=True)
functional.all_gather_tensor_autograd(leaf, 0, world).wait().square().sum().backward()
functional.all_reduce(torch.ones(0), "sum", world).wait()
never_awaited = functional.all_reduce(torch.ones(13), "sum", world)
got += [whole_again, leaf.grad, compiled(torch.full((15,), rank + 1.0))]
notes["values"].append([one.tolist() for one in got])
"""

MADE_FUNCTIONAL = """
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

world, mesh = dist.group.WORLD, init_device_mesh("cpu", (2,))
operator = torch.ops._c10d_functional.all_reduce
spots += [(operator, "_op"), (operator.default, "_op")]
own = [vars(owner)[name] for owner, name in spots]
known = {operator, operator.default}
notes["values"].append(all(one in known for one in (operator, operator.default)))


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled(x):
    return functional.all_reduce(x * 2, "sum", world) + 1
"""


def test_functional_collectives_are_recorded_and_their_results_stay(warm_ranks: Ranks, tmp_path: Path) -> None:
    after = 'notes["values"].append(operator in known)'
    parts: Any = {"made": MADE_FUNCTIONAL, "before": FUNCTIONAL, "after": after}
    plain, _ = ran(warm_ranks, tmp_path, **parts)
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", **parts)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert measured[0]["untouched"][-1]
    assert trace is not None
    for rank in range(2):
        own = [c for c in trace.collectives if c.rank == rank and c.by_script and c.step == 3 and c.phase == "other"]
        found = sorted((c.kind, c.tensor_bytes) for c in own if c.kind not in ("scatter", "broadcast"))
        assert found == [
            ("allgather", 32),
            ("allgather", 80),
            ("allgather", 96),
            ("allreduce", 0),
            ("allreduce", 28),
            ("allreduce", 44),
            ("allreduce", 52),
            ("allreduce", 60),
            ("allreduce", 4000),
            ("alltoall", 24),
            ("reducescatter", 56),
        ]
        ended = [c for c in own if (c.kind, c.tensor_bytes) != ("allreduce", 52)]
        assert all(c.finished and c.submit_ns <= (c.start_ns or 0) <= (c.done_ns or 0) for c in ended)
        assert {c.ranks for c in own} == {2}
    for step, split, _ in split_steps(trace):
        assert len([key for key, _, _ in step.waits if key]) >= 9
        assert sum(split.phases().values()) == split.step_ns


PHASES = """
class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


inside = Reduced.apply


class Averaging(torch.optim.SGD):
    def step(self, closure=None):
        dist.barrier()
        return super().step(closure)


torch.optim.SGD = Averaging
"""


def test_a_call_has_the_phase_in_which_it_was_made(warm_ranks: Ranks, tmp_path: Path) -> None:
    plain, _ = ran(warm_ranks, tmp_path, setting=PHASES)
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", setting=PHASES)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert trace is not None
    rows = [c for c in trace.collectives if c.rank == 0 and c.by_script and c.step == 3]
    assert sorted({(c.phase, c.kind) for c in rows}) == [
        ("backward", "allreduce"),
        ("forward", "allreduce"),
        ("forward", "broadcast"),  # of DDP's buffers
        ("optimizer", "barrier"),
    ]
    for step, split, _ in split_steps(trace):
        assert any(key for key, _, _ in step.waits)
        assert sum(split.phases().values()) == split.step_ns


APART = """
import threading
import time


def elsewhere():
    time.sleep(0.03 * (rank == 0))
    dist.all_gather_into_tensor(torch.zeros(2 * size), torch.ones(2), group=others)


others = dist.new_group()
"""
HOW = """
thread = threading.Thread(target=elsewhere)
thread.start()
time.sleep(0.02 + 0.02 * rank)
later = torch.full((9,), rank + 1.0)
later = dist.all_reduce(later, async_op=True).get_future().wait()[0]
thread.join()
notes["values"].append(later.tolist())
"""


def test_a_wait_at_a_future_is_exposed_and_a_call_of_another_thread_is_not(warm_ranks: Ranks, tmp_path: Path) -> None:
    plain, _ = ran(warm_ranks, tmp_path, made=APART, before=HOW)
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", made=APART, before=HOW)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert trace is not None
    last = {c.step: c.submit_ns for c in trace.collectives if c.rank == 1 and c.tensor_bytes == 36}
    found = [(step, exposed) for step, _, exposed in split_steps(trace) if step.rank == 0]
    assert found
    for step, exposed in found:
        names = {c.kind for c, _ in exposed if c.by_script}
        assert "allgather" not in names
        assert "allreduce" in names
        assert any(begin < last[step.index] <= end for _, begin, end in step.waits)


BUSY = """
import random

numbers = [random.random() for _ in range(30_000)]
optimizer.register_step_pre_hook(lambda *_: sorted(numbers) and None)  # with the GIL, as gloo needs it, too
"""
THEN_BUSY = """
dist.all_reduce(torch.ones(3), async_op=True).wait()
sorted(numbers)
"""


def test_an_operation_ends_with_the_wait_for_it_though_the_script_goes_on_with_the_gil(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    _, trace = ran(warm_ranks, tmp_path / "run", "stock", made=BUSY, before=THEN_BUSY, steps=30)
    assert trace is not None
    steps = {(step.rank, step.index): step for step in trace.steps}
    waited = [one for one in trace.collectives if (one.rank, one.step) in steps and one.kind == "allreduce"]
    assert {one.by_script for one in waited} == {False, True}
    for one in waited:
        key = one.key if one.by_script else 0
        waits = [end for of, _, end in steps[one.rank, one.step or 0].waits if of == key]
        assert one.done_ns is not None
        assert one.done_ns <= max(waits)


SHARDED = """
from torch.distributed.optim import ZeroRedundancyOptimizer

plain = torch.optim.SGD
torch.optim.SGD = lambda parameters, lr: ZeroRedundancyOptimizer(parameters, optimizer_class=plain, lr=lr)


class Raising(plain):
    def step(self, closure=None):
        raise ArithmeticError


raising = Raising([torch.nn.Parameter(torch.ones(1))])
"""
RAISED = """
try:
    raising.step()
except ArithmeticError:
    pass
dist.all_reduce(torch.ones(3))
"""


def test_calls_of_an_optimizer_around_another_one_s_step_are_its_calls(warm_ranks: Ranks, tmp_path: Path) -> None:
    parts = {"setting": SHARDED, "before": "dist.all_reduce(torch.ones(5))", "after": RAISED}
    plain, _ = ran(warm_ranks, tmp_path, **parts)
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", **parts)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert trace is not None
    rows = [c for c in trace.collectives if c.by_script and c.step == 3 and c.phase != "forward"]
    assert {(c.phase, c.kind, c.tensor_bytes) for c in rows if c.tensor_bytes == 20} == {("other", "allreduce", 20)}
    assert {c.phase for c in rows if c.kind == "broadcast"} == {"optimizer"}
    for step in trace.steps:
        assert len(step.optimizer) == 1


def test_a_bare_step_and_a_run_that_has_ended_leave_torch_as_it_is(warm_ranks: Ranks, tmp_path: Path) -> None:
    after = "notes['times'].append(next(iter(collectives_of())).session.arm if collectives_of() else '')"
    setting = "from netbottleneck.hooks import ddp\ncollectives_of = lambda: list(ddp._measured.values())\n"
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock,bare", setting=setting, after=after, steps=9, block=3)
    for notes in measured:
        arms = ["stock", *notes["times"]]  # of the step that follows
        assert notes["untouched"] == [arm == "bare" for arm in arms]
        assert {"stock", "bare"} == set(arms)
    assert trace is not None
    assert {c.arm for c in trace.collectives if c.step is not None} == {"stock"}


FAILING = """
for call in (lambda: dist.all_reduce("no tensor"), lambda: dist.broadcast(torch.ones(2), 7),
             lambda: dist.group.WORLD.allreduce(torch.ones(2), 1, 2, 3), lambda: dist.group.WORLD.allgather(1),
             lambda: dist.all_gather([torch.ones(1)], torch.ones(2))):
    try:
        call()
    except Exception as error:
        notes["values"].append([type(error).__name__, str(error).split("Invoked with")[0]])
"""


def test_a_call_that_fails_raises_what_it_raises_without_us(warm_ranks: Ranks, tmp_path: Path) -> None:
    plain, _ = ran(warm_ranks, tmp_path, before=FAILING)
    measured, _ = ran(warm_ranks, tmp_path / "run", "stock", before=FAILING)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert sum(isinstance(row[0], str) for row in plain[0]["values"]) == 6 * 5


OVER_OURS = """
one = torch.full((500,), rank + 1.0)
dist.all_reduce(one)
other = torch.full((7,), rank + 1.0)
work = dist.all_reduce(other, async_op=True)
work.wait()
work.wait()
notes["values"].append([one.tolist(), other.tolist(), type(work).__name__])
"""


def test_calls_over_our_backend_end_when_they_were_waited_for(warm_ranks: Ranks, tmp_path: Path) -> None:
    plain, _ = ran(warm_ranks, tmp_path, before=OVER_OURS, backend="nb")
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", before=OVER_OURS, backend="nb")
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert trace is not None
    rows = [c for c in trace.collectives if c.rank == 0 and c.step == 3 and c.by_script and c.phase == "other"]
    assert [(c.kind, c.tensor_bytes, c.finished) for c in rows] == [("allreduce", 2000, True), ("allreduce", 28, True)]


BY_KEYWORD = """
def hook(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


dist._register_comm_hook(reducer=model.reducer, state=None, comm_hook=hook)
other = DistributedDataParallel(torch.nn.Linear(2, 2))
dist._register_builtin_comm_hook(reducer=other.reducer, comm_hook_type=dist.BuiltinCommHookType.ALLREDUCE)
"""
BROADCAST_BY_KEYWORD = """
shared = torch.full((5,), float(rank))
dist._broadcast_coalesced(buffer_size=1 << 20, tensors=[shared], src=1, process_group=dist.group.WORLD)
notes["values"].append(shared.tolist())
"""


def test_torchs_functions_have_the_names_of_their_arguments(warm_ranks: Ranks, tmp_path: Path) -> None:
    plain, _ = ran(warm_ranks, tmp_path, made=BY_KEYWORD, before=BROADCAST_BY_KEYWORD)
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", made=BY_KEYWORD, before=BROADCAST_BY_KEYWORD)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert trace is not None
    rows = [
        c for c in trace.collectives if c.rank == 0 and c.step == 3 and c.kind == "broadcast" and c.phase == "other"
    ]
    assert [c.tensor_bytes for c in rows] == [20]


HOOKED = """
def hook(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


model.register_comm_hook(None, hook)
"""


def test_what_a_communication_hook_calls_belongs_to_its_bucket(warm_ranks: Ranks, tmp_path: Path) -> None:
    _, trace = ran(warm_ranks, tmp_path / "run", "stock", made=HOOKED)
    assert trace is not None
    rows = [c for c in trace.collectives if c.rank == 0 and c.step == 3 and c.kind == "allreduce"]
    assert [c.by_script for c in rows] == [False]


COMPRESSED = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def gathers(state, bucket):
    whole = bucket.buffer()
    part = whole[: whole.numel() // 4].clone()
    found = [torch.empty_like(part) for _ in range(2)]
    return dist.all_gather(found, part, async_op=True).get_future().then(lambda future: whole)


def sharded(state, bucket):
    whole = bucket.buffer()
    part = whole.new_empty(whole.numel() // 2)
    dist.reduce_scatter_tensor(part, whole)
    dist.all_gather_into_tensor(whole, part)
    return silent(state, bucket)


def silent(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


model.register_comm_hook(None, %s)
"""


@pytest.mark.parametrize(
    ("hook", "part", "backend"),
    [
        ("default_hooks.fp16_compress_hook", 0.5, "gloo"),
        ("gathers", 0.25, "gloo"),
        ("silent", None, "gloo"),
        ("sharded", 1.0, "nb"),  # whose methods call each other
    ],
)
def test_a_bucket_has_the_bytes_that_its_hook_moves(
    hook: str, part: float | None, backend: str, warm_ranks: Ranks, tmp_path: Path
) -> None:
    """Those of an all-reduce: gathering a quarter of each of two ranks moves as much as reducing a quarter."""
    _, trace = ran(warm_ranks, tmp_path / "run", "stock", made=COMPRESSED % hook, backend=backend)
    assert trace is not None
    rows = [c for c in trace.collectives if c.step == 3 and not c.by_script]
    assert rows
    assert [c.kind for c in rows] == ["allreduce"] * len(rows)
    whole = sum(p.bytes for p in trace.parameters)
    for rank in range(2):
        moved = [c.tensor_bytes for c in rows if c.rank == rank]
        if part is None:
            assert moved == [None] * len(moved)
        else:
            assert sum(filter(None, moved)) == pytest.approx(part * whole, rel=0.05)
            assert sum(travelling_bytes(trace)) == pytest.approx(part * whole, rel=0.05)
    assert sum(bucket.bytes for bucket in trace.buckets) == whole


GOING_ON = """
import threading
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook


def late(state, bucket):
    whole, returned, first = bucket.buffer(), threading.Event(), torch.futures.Future()

    def go_on(future):
        dist.all_reduce(whole)
        return whole

    dist.all_reduce(whole[:4].clone())
    torch.autograd.Variable._execution_engine.queue_callback(returned.set)
    threading.Thread(target=lambda: returned.wait() and first.set_result(None)).start()
    return first.then(go_on)


def power(state, bucket):
    return powerSGD_hook.powerSGD_hook(compression, bucket)


compression = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
model.register_comm_hook(None, %s)
"""


@pytest.mark.parametrize(("hook", "floats"), [("late", 0), ("power", 8 + 8 + 3 * 8)])
def test_what_a_callback_of_a_hook_calls_belongs_to_its_bucket(
    hook: str, floats: int, warm_ranks: Ranks, tmp_path: Path
) -> None:
    """The bytes are those of all calls of the hook and of its callbacks, or unknown if these run after it."""
    _, trace = ran(warm_ranks, tmp_path / "run", "stock", made=GOING_ON % hook)
    assert trace is not None
    rows = [c for c in trace.collectives if c.step is not None and c.step >= 2 and c.kind == "allreduce"]
    assert rows
    assert not any(c.by_script for c in rows)
    assert {c.tensor_bytes for c in rows} <= {None, 4 * floats}


BLOCKING = """
import time


def hook(state, bucket):
    time.sleep(0.02 * rank)
    dist.all_reduce(bucket.buffer())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


model.register_comm_hook(None, hook)
"""


def test_a_bucket_is_on_its_way_while_its_hook_blocks(warm_ranks: Ranks, tmp_path: Path) -> None:
    _, trace = ran(warm_ranks, tmp_path / "run", "stock", made=BLOCKING)
    assert trace is not None
    found = [split for _, split, _ in split_steps(trace) if split.rank == 0]
    assert found
    for split in found:
        assert split.exposed_ns >= 15_000_000
        assert split.wait_ns < 5_000_000


DEEP_OPTIMIZER = """
import time

plain = torch.optim.SGD
plain([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # torch now hooks the step of the base class, too


class Slow(plain):
    def step(self, closure=None):
        time.sleep(0.02)
        return super().step(closure)


torch.optim.SGD = Slow
"""


def test_the_work_of_an_optimizer_before_the_step_of_its_base_class_is_its_own(
    warm_ranks: Ranks, tmp_path: Path
) -> None:
    _, trace = ran(warm_ranks, tmp_path / "run", "stock", setting=DEEP_OPTIMIZER)
    assert trace is not None
    found = split_steps(trace)
    assert found
    for step, split, _ in found:
        assert len(step.optimizer) == 1
        assert split.optimizer_ns >= 20_000_000


OTHER_OPTIMIZER = """
class Slow(torch.optim.SGD):
    def step(self, closure=None):
        begin = now()
        while now() < begin + 20_000_000:
            pass
        super().step(closure)
        notes["times"].append([begin, now()])


beside = torch.nn.Linear(2, 2)
second = Slow(beside.parameters(), lr=0.1)
"""


def test_a_second_optimizer_is_optimizer_time_and_not_input(warm_ranks: Ranks, tmp_path: Path) -> None:
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", made=OTHER_OPTIMIZER, after="second.step()", steps=8)
    assert trace is not None
    shift = trace.ranks[0].clock.offset_ns
    spans = [span for step in trace.steps if step.rank == 0 for span in step.optimizer]
    for begin, end in measured[0]["times"][:-1]:
        assert any(low <= begin - shift and end - shift <= high for low, high in spans)
    for step, split, _ in split_steps(trace):
        assert split.optimizer_ns >= 20_000_000
        assert split.input_ns < split.step_ns - split.optimizer_ns
        assert len(step.optimizer) >= 2  # a hook of each level of a step


# A forward and a backward of known parts, and what DDP's logger says of the pass before.
SLEEPING = """
import time
class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.04)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.06)
        return gradient
inside = Sleeping.apply
"""
LOGGED = """
logged = model._get_ddp_logging_data()
notes["times"].append([logged["iteration"]] + [logged.get(f"{what}_compute_time") for what in ("forward", "backward")])
"""


def test_forward_and_backward_last_as_long_as_in_ddps_own_log(warm_ranks: Ranks, tmp_path: Path) -> None:
    """DDP keeps the times of its first 10 passes, each until the forward of the next one."""
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", setting=SLEEPING, after=LOGGED, steps=10)
    assert trace is not None
    for rank, notes in enumerate(measured):
        steps = {step.index: step for step in trace.steps if step.rank == rank}
        ratios = []
        for iteration, *theirs in notes["times"][2:]:  # the first pass also sets DDP up
            step = steps[iteration - 1]
            ours = [sum(end - begin for begin, end in spans) for spans in (step.forward, backward_intervals(step))]
            ratios.append([own / other for own, other in zip(ours, theirs, strict=True)])
        assert len(ratios) == 8
        for of_pass in zip(*ratios, strict=True):
            assert median(of_pass) == pytest.approx(1, abs=0.05)


# Micro-batches from a loader that sleeps; only the last pass reduces gradients.
FETCHING = """
import time
def fetch(batches):
    for _ in range(batches):
        begin = now()
        time.sleep(0.03)
        notes["times"].append([step, begin, now()])
        yield torch.ones(4, 8)
"""
ACCUMULATED = """
with model.no_sync():
    output.square().sum().backward()
    for batch in fetch(2):
        model(batch).square().sum().backward()
dist.all_reduce(torch.ones(3))
output = model(next(fetch(1)))
"""


def test_micro_batches_of_a_step_are_waited_for_in_its_input(warm_ranks: Ranks, tmp_path: Path) -> None:
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", setting=FETCHING, before=ACCUMULATED)
    assert trace is not None
    slept = {step: sum(end - begin for at, begin, end in measured[0]["times"] if at == step) for step in range(6)}
    found = {step.index: split for step, split, _ in split_steps(trace) if step.rank == 0}
    assert len(found) >= 4
    for index, split in found.items():
        assert slept[index] >= 90_000_000
        assert slept[index] <= split.input_ns
        assert sum(split.phases().values()) == split.step_ns


SAVING = """
import io
model.eval()
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(4, 8))
model.train()
torch.save(model.module.state_dict(), io.BytesIO())
"""


def test_evaluation_and_checkpoints_are_parts_of_their_own(warm_ranks: Ranks, tmp_path: Path) -> None:
    setting = 'os.environ["NETBOTTLENECK_SAMPLE_EVERY"] = "1"'
    _, trace = ran(warm_ranks, tmp_path / "run", "stock", setting=setting, after=SAVING, steps=8)
    assert trace is not None
    for step, split, _ in split_steps(trace):
        assert (len(step.forward), len(step.evaluation), len(step.checkpoints)) == (1, 3, 1)
        assert [trace.modules[index] for index, _, _ in step.modules] == ["layer", "norm"]
        assert split.evaluation_ns > 0
        assert split.checkpoint_ns > 0
        assert sum(split.phases().values()) == split.step_ns


SLOW_FILE = """
class Slow(io.BytesIO):
    def flush(self):
        time.sleep(0.02)
"""
SLOW_SAVES = """
torch.save(model.module.state_dict(), Slow())
try:
    torch.save(0, 3)
except AttributeError as error:
    notes["values"].append(str(error))
torch.save(model.module.state_dict(), io.BytesIO(), _use_new_zipfile_serialization=False)
"""


def test_a_checkpoint_lasts_until_its_file_is_complete_in_both_formats(warm_ranks: Ranks, tmp_path: Path) -> None:
    parts: Any = {"setting": "import io\nimport time\n" + SLOW_FILE, "after": SLOW_SAVES, "steps": 8}
    plain, _ = ran(warm_ranks, tmp_path, **parts)
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", **parts)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert trace is not None
    for step, split, _ in split_steps(trace):
        assert len(step.checkpoints) == 2
        assert split.checkpoint_ns >= 20_000_000


# A stand-in for safetensors. In older versions, what converts the tensors has another name.
SAFETENSORS = """
import sys
import time
import types

def converts(tensors, *kept):
    time.sleep(0.02)
    return sorted(tensors)

def serialize_file(tensors, filename, metadata=None):
    time.sleep(0.02)
    if filename == "full":
        raise OSError(filename)

safetensors = sys.modules["safetensors.torch"] = types.ModuleType("safetensors.torch")
vars(safetensors).update(serialize_file=serialize_file, NAME=converts)
exec("def save_file(tensors, filename): return serialize_file(NAME(tensors), filename)", vars(safetensors))
from safetensors.torch import save_file
"""
SAVED_AS_SAFETENSORS = """
save_file(model.module.state_dict(), "file")
try:
    save_file(model.module.state_dict(), "full")
except OSError as error:
    notes["values"].append(str(error))
"""


@pytest.mark.parametrize("name", ["_flatten", "_flatten_as_ptr"])
def test_files_of_safetensors_are_checkpoints(warm_ranks: Ranks, tmp_path: Path, name: str) -> None:
    parts: Any = {"setting": SAFETENSORS.replace("NAME", name), "after": SAVED_AS_SAFETENSORS, "steps": 8}
    plain, _ = ran(warm_ranks, tmp_path, **parts)
    measured, trace = ran(warm_ranks, tmp_path / "run", "stock", **parts)
    assert [one["values"] for one in measured] == [one["values"] for one in plain]
    assert trace is not None
    for _, split, _ in split_steps(trace):
        assert split.checkpoint_ns >= 80_000_000


HOROVOD = """
import time
import torch
import netbottleneck.torch as hvd

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 8), hvd.SyncBatchNorm(8))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())

def comes_late(*_):  # the ranks by turns, so that the other waits
    time.sleep(0.03 * (step % 2 == hvd.rank()))


for step in range(6):
    optimizer.zero_grad()
    comes_late()
    out = model(torch.randn(4, 8))
    out.register_hook(comes_late)
    out.square().sum().backward()
    optimizer.step()
    hvd.allreduce(torch.ones(5), name="metric")
hvd.shutdown()
"""


def test_batch_norm_over_all_ranks_is_communication_and_not_compute(warm_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    env = {"NETBOTTLENECK_DIR": str(folder), "NETBOTTLENECK_TRANSPORT": "tcp", **ENV}
    warm_ranks(2, HOROVOD, env)
    trace = Run(folder).trace
    # The measurement begins in the backward pass of the first step.
    steps = {(step.rank, step.index): step for step in trace.steps if step.index > 0}
    assert len(steps) >= 6
    in_forward = set()  # ranks with a wait there
    for (rank, index), step in steps.items():
        rows = [c for c in trace.collectives if (c.rank, c.step) == (rank, index) and c.by_script and c.finished]
        found = {(c.phase, c.kind) for c in rows}
        assert ("backward", "allreduce") in found
        assert {kind for phase, kind in found if phase == "forward"} >= {"allgather"}
        (forward,) = step.forward
        in_forward |= {rank for key, begin, end in step.waits if key and forward[0] <= begin and end <= forward[1]}
    # Of one that is over before the pass needs it, there is no wait: but it is not so in every step.
    assert in_forward == {0, 1}
    awaited = {(rank, key) for (rank, _), step in steps.items() for key, _, _ in step.waits}
    assert awaited >= {(c.rank, c.key) for c in trace.collectives if c.by_script and c.phase == "backward"}
    sizes = {c.tensor_bytes for c in trace.collectives if c.by_script and c.phase == "other"}
    assert 20 in sizes  # of the metric


# In one process.


class _Recorder:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def put(self, *values: int, host: bool) -> None:
        assert host  # these calls have no tensors of a GPU
        self.rows.append(values)

    def settle(self) -> bool:
        return True


class _Group(dist.ProcessGroup):
    """A process group in Python, without methods of its own."""

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return "own"


def test_a_process_group_in_python_that_inherits_its_methods_fails_as_without_us() -> None:
    errors: list[str] = []
    recorder: Any = _Recorder()
    watched = collectives.Collectives(recorder, lambda error: errors.append(repr(error)))
    messages = []
    for on in (False, True):
        watched.watch(on)
        try:
            with pytest.raises(RuntimeError) as caught:
                _Group(0, 1).allreduce([torch.ones(2)])
            messages.append(str(caught.value).splitlines()[0])
        finally:
            watched.watch(False)
    assert messages[0] == messages[1]
    assert errors == []
    assert len(recorder.rows) == 1


class _Work:
    """An operation that was done at once."""

    def times(self) -> tuple[int, int, int, int, int]:
        return (10, 11, 12, 13, 14)


def test_an_operation_that_is_done_before_its_submission_is_recorded_keeps_its_times(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 16, 0)
    watched = collectives.Collectives(recorder, lambda error: pytest.fail(str(error)))
    watched._job = SimpleNamespace(process_sets={})  # type: ignore[assignment]
    work = _Work()
    watched.submitted(work, "metric", (_core.ALLREDUCE, (0, 20), _core.FLOAT32, 0))
    watched.completed([work])
    recorder.close()
    events = ring_file.read_ring(path).events
    names = ("OP_SUBMIT", "OP_AGREED", "OP_START", "OP_FIRST_BYTE", "OP_DONE")
    kinds = [_core.EVENTS[name] for name in names]
    assert [(event["time_ns"], event["kind"]) for event in events] == list(zip(range(10, 15), kinds, strict=True))


class _Unnamed(dist.ProcessGroup):
    """A group of the script's own, which never set its name."""


def test_a_process_group_without_a_name_is_recorded() -> None:
    errors: list[str] = []
    recorder: Any = _Recorder()
    watched = collectives.Collectives(recorder, lambda error: errors.append(repr(error)))
    group = _Unnamed(0, 1)
    with pytest.raises(RuntimeError):
        _ = group.group_name
    watched.watch(True)
    try:
        with pytest.raises(RuntimeError):  # it inherits the method of a group that has no backend
            group.allreduce([torch.ones(2)])
    finally:
        watched.watch(False)
    assert errors == []
    assert len(recorder.rows) == 1


def test_a_wrapper_that_other_code_adds_stays_when_the_recording_ends() -> None:
    recorder: Any = _Recorder()
    watched = collectives.Collectives(recorder, lambda error: None)
    before: Any = vars(dist.ProcessGroup)["barrier"]
    watched.watch(True)
    ours: Any = dist.ProcessGroup.barrier

    def foreign(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    dist.ProcessGroup.barrier = foreign  # type: ignore[method-assign]
    try:
        watched.watch(False)
        assert dist.ProcessGroup.barrier is foreign
        watched.watch(True)
        assert dist.ProcessGroup.barrier is foreign
        dist.ProcessGroup.barrier = ours  # type: ignore[method-assign]
        watched.watch(False)
        assert vars(dist.ProcessGroup)["barrier"] is before
    finally:
        dist.ProcessGroup.barrier = before  # type: ignore[method-assign]


def test_a_recording_that_cannot_begin_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("cannot set 'wait' attribute of immutable type")

    errors: list[Exception] = []
    recorder: Any = _Recorder()
    before = dict(vars(dist.ProcessGroup))
    watched = collectives.Collectives(recorder, errors.append)
    patch = collectives._put
    monkeypatch.setattr(collectives, "_put", lambda *args: refuse() if args[1] == "wait" else patch(*args))
    watched.watch(True)
    watched.watch(False)
    assert [str(error) for error in errors] == ["cannot set 'wait' attribute of immutable type"]
    assert dict(vars(dist.ProcessGroup)) == before


@pytest.mark.parametrize("known", [True, False])
def test_the_steps_of_other_optimizers_are_told_of(known: bool) -> None:
    def parameter() -> Any:
        made = torch.nn.Parameter(torch.ones(2))
        made.grad = torch.ones(2)
        return made

    mine, other, seen = parameter(), parameter(), []
    first, second = torch.optim.SGD([mine], lr=1.0), torch.optim.Adam([other], lr=1.0)
    updates = Updates(
        [mine], first if known else None, lambda: seen.append("before"), lambda: seen.append("after"), seen.append
    )
    first.step()
    second.step()
    updates.remove()
    second.step()
    assert seen == ["before", "after", True, False]


class Interrupted:
    """A recorder in whose every call a signal arrives."""

    def put(self, *_values: object, **_options: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def settle(self) -> bool:
        """Return True: no thread stamps events."""
        return True


def test_an_exception_of_a_signal_handler_is_not_a_failure_of_the_recording() -> None:
    def late(*_: object) -> None:
        raise TimeoutError("a limit of the script's")

    failures: list[Exception] = []
    before = signal.signal(signal.SIGUSR1, late)
    try:
        with pytest.raises(TimeoutError, match="a limit of the script"):
            collectives.Collectives(cast("_core.Recorder", Interrupted()), failures.append).put(1, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not failures
