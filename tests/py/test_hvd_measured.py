"""Measured runs of Horovod's API: compressed and sparse gradients are recorded, and failures do not end the job."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Ranks

pytest.importorskip("torch")

from netbottleneck.hooks import horovod
from netbottleneck.report import Run
from netbottleneck.whatif.plan import travelling_bytes

SCRIPT = Path(__file__).parent / "scripts" / "hvd_measured.py"
STEPS = 8  # of the script
BYTES = {"table.weight": 50 * 8 * 4, "line.weight": 3 * 8 * 4, "line.bias": 3 * 4}
ENV = {"NETBOTTLENECK_TIMEOUT_S": "60", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_BLOCK_STEPS": "2"}


def trained(warm_ranks: Ranks, kind: str, transports: str, folder: Path, **env: str) -> str:
    """Run the script, which trains unmeasured and measured; return both ranks' stderr."""
    variables = {**ENV, "NETBOTTLENECK_TRANSPORT": transports, "NETBOTTLENECK_DIR": str(folder), **env}
    results = warm_ranks(2, SCRIPT, variables, args=[kind])
    assert all("alike" in result.stdout.splitlines() for result in results)
    return "".join(result.stderr for result in results)


@pytest.mark.parametrize(
    ("kind", "transports", "travels"),
    [
        ("fp16", "stock", ("float16", 2)),
        ("fp16", "tcp", ("float16", 2)),
        ("fp16", "stock,tcp", ("float16", 2)),
        ("user", "stock,tcp", ("int32", 1)),
        ("dense", "stock,tcp", ("float32", 1)),
    ],
)
def test_gradients_sent_one_by_one_are_recorded_and_moved_by_each_arm(
    warm_ranks: Ranks, tmp_path: Path, kind: str, transports: str, travels: tuple[str, int]
) -> None:
    run, (dtype, parts) = tmp_path / "run", travels
    output = trained(warm_ranks, kind, transports, run)
    assert "left alone" not in output
    trace = Run(run).trace
    assert trace.arms == tuple(transports.split(","))
    for rank in range(2):
        record = json.loads((run / "ranks" / f"{rank}.meta.json").read_text(encoding="utf-8"))
        assert {p["name"]: p["bytes"] for p in record["parameters"]} == BYTES
        assert {(b["name"], b["bytes"], b["dtype"]) for b in record["buckets"]} == {
            (f"allreduce.optimizer.0.{name}", nbytes // parts, dtype) for name, nbytes in BYTES.items()
        }
    steps = [step for step in trace.steps if step.index > 0]
    assert len(trace.steps) == 2 * STEPS
    for step in steps:
        assert len(step.grad_ready) == len(BYTES)
        assert step.waits
        mine = [c for c in trace.collectives if (c.rank, c.step) == (step.rank, step.index) and c.bucket is not None]
        assert sorted(c.tensor_bytes for c in mine) == sorted(nbytes // parts for nbytes in BYTES.values())
        for c in mine:
            assert c.done_ns is not None
            assert c.submit_ns <= c.done_ns
    moved = {c.arm for c in trace.collectives if c.bucket is not None}
    assert moved == set(trace.arms)
    assert list(travelling_bytes(trace)) == [p.bytes // parts for p in trace.parameters]


@pytest.mark.parametrize("kind", ["orders", "orders-fp16"])
@pytest.mark.parametrize("transports", ["stock", "stock,tcp"])
def test_gradients_that_are_ready_in_different_orders_are_not_mixed(
    warm_ranks: Ranks, tmp_path: Path, kind: str, transports: str
) -> None:
    """Over stock, whose operations match by their order, all ranks start them in rank 0's order of readiness."""
    output = trained(warm_ranks, kind, transports, tmp_path / "run", NETBOTTLENECK_BUCKET_BYTES="256")
    assert "left alone" not in output
    trace = Run(tmp_path / "run").trace
    starts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for c in trace.collectives:
        if c.bucket is not None and c.arm == "stock":
            starts[c.rank, c.step].append((c.start_ns, c.bucket))
    orders = {at: [bucket for _, bucket in sorted(each)] for at, each in starts.items()}
    assert all(len(order) >= 4 for order in orders.values())  # one for each layer, or more
    assert {step for _, step in orders} >= set(range(2))
    assert all(orders[0, step] == orders[1, step] for _, step in orders)
    later = next(step for step in trace.steps if (step.rank, step.index) == (0, 1))
    sent = [index for bucket in orders[0, 1] for index in trace.buckets[bucket].parameters]
    assert sent == [index for index, _ in later.grad_ready]


@pytest.mark.parametrize(
    ("kind", "transports", "steps"),
    [
        ("joins", "stock", (9, 8)),  # steps of each rank over stock, the first with a joined rank among them
        ("joins", "stock,tcp", (9, 8)),
        ("joins", "tcp,stock", (10, 8)),  # until the arm changes
        ("joins-fp16", "stock,tcp", (9, 8)),
        ("joins-first", "stock", (0, 0)),
        ("joins-first-fp16", "stock", (0, 0)),
    ],
)
def test_a_rank_that_joins_ends_the_use_of_stock_on_all_ranks(
    warm_ranks: Ranks, tmp_path: Path, kind: str, transports: str, steps: tuple[int, int]
) -> None:
    output = trained(warm_ranks, kind, transports, tmp_path / "run")
    assert output.count("WARNING: all further steps use tcp") == 2  # on two ranks
    assert "a rank has joined (hvd.join())" in output
    trace = Run(tmp_path / "run").trace
    assert not [note for note in trace.notes if "cannot be read" in note]
    assert {(step.rank, step.index) for step in trace.steps} == {
        (rank, index) for rank, count in enumerate(steps) for index in range(count)
    }


@pytest.mark.parametrize(("kind", "transports"), [("joins", "tcp"), ("joins-fp16", "tcp"), ("joins", "")])
def test_a_run_over_one_transport_of_ours_goes_on_after_a_join(
    warm_ranks: Ranks, tmp_path: Path, kind: str, transports: str
) -> None:
    output = trained(warm_ranks, kind, transports, tmp_path / "run")
    assert "all further steps" not in output
    trace = Run(tmp_path / "run").trace
    assert trace.arms == ("tcp",)  # over which an unmeasured run sends its gradients, too
    assert not any(rank.steps_unfinished for rank in trace.ranks)
    first, second = ({step.index for step in trace.steps if step.rank == rank} for rank in range(2))
    assert first == set(range(13))  # 4, 7 and 2 steps
    assert second == {*range(8), *range(11, 16)}  # 4 and 4, and 5 from the step on that rank 0 had reached
    own = [c for c in trace.collectives if c.bucket is not None]
    steps: dict[tuple[object, ...], set[int | None]] = defaultdict(set)
    for c in own:
        steps[c.match].add(c.step)
    assert all(len(found) == 1 for found in steps.values()), "an operation is in the same step on all ranks"
    ends = {(step.rank, step.index): step.end_ns for step in trace.steps}
    assert all(c.done_ns is not None and c.done_ns <= ends[c.rank, c.step or 0] for c in own)


@pytest.mark.parametrize(("steps", "last", "found"), [((5, 5, 4), 1, 1), ((5, 5, 4), 2, 0), ((3, 4, 3), 0, 1)])
def test_the_last_rank_to_join_is_one_with_the_most_steps(steps: tuple[int, ...], last: int, found: int) -> None:
    from netbottleneck.hooks.joins import Joins

    sent = [step.to_bytes(8, "little") + b"\0" for step in steps]
    control = SimpleNamespace(exchange=lambda mine: sent if mine == sent[0] else [])
    place = SimpleNamespace(size=len(steps))
    session: Any = SimpleNamespace(arms={}, closed=False, control=control, on_close=[], place=place, step=steps[0])
    joins = Joins(session, SimpleNamespace())  # type: ignore[arg-type]
    begun: list[int] = []
    joins.measured = SimpleNamespace(resume=begun.append)  # type: ignore[assignment]
    assert joins.end(last) == found
    assert begun == [max(steps)]


def test_ranks_join_in_a_run_that_chooses_its_transport(warm_ranks: Ranks, tmp_path: Path) -> None:
    trained(warm_ranks, "joins", "auto", tmp_path / "run")


def test_sparse_gradients_bypass_the_arms_with_one_log_line(warm_ranks: Ranks, tmp_path: Path) -> None:
    output = trained(warm_ranks, "sparse", "tcp", tmp_path / "run")
    assert output.count("gradients of table.weight are sparse") == 2  # on two ranks
    trace = Run(tmp_path / "run").trace
    assert {c.name for c in trace.collectives if c.bucket is not None} == {
        f"allreduce.optimizer.0.line.{name}" for name in ("weight", "bias")
    }


@pytest.mark.parametrize(("broken", "kind"), [("open:0:1", "plain"), ("open:1:1", "fp16"), ("open:1:2", "plain")])
def test_a_run_that_one_rank_cannot_open_leaves_the_training_alone(
    warm_ranks: Ranks, tmp_path: Path, broken: str, kind: str
) -> None:
    output = trained(warm_ranks, kind, "tcp", tmp_path / "run", BREAK=broken, OPENING_S="3")
    assert output.count("the training is left alone: no run can be measured on all ranks") == 2
    assert "No space left on device" in output


def test_a_run_that_cannot_be_opened_is_an_error_in_strict_mode(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {"NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run"), "BREAK": "open:1:1"}
    strict = {"NETBOTTLENECK_STRICT": "1", "OPENING_S": "3"}
    job = warm_ranks.start(2, SCRIPT, env={**ENV, **env, **strict}, args=["plain"])
    results = job.wait(check=False)
    assert all(result.code not in {0, None} for result in results)
    assert "No space left on device" in results[1].stderr


@pytest.mark.parametrize("kind", ["plain", "fp16"])
def test_a_failure_of_the_recording_ends_it_and_not_the_training(warm_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    output = trained(warm_ranks, kind, "tcp", tmp_path / "run", BREAK="step:1")
    assert output.count("measuring has ended, the training goes on: OSError: [Errno 28] No space left on device") == 1


@pytest.mark.parametrize("strict", [False, True])
def test_invalid_variables_of_a_launcher_leave_an_installed_horovod_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NETBOTTLENECK_STRICT", str(int(strict)))
    library = SimpleNamespace(horovod_torch_allreduce_async_torch_FloatTensor=lambda *_: 5)
    attached = horovod.Attached(SimpleNamespace(mpi_lib=library, rank=lambda: 0, size=lambda: 2))

    def reduced() -> Any:
        allreduce = attached.between.horovod_torch_allreduce_async_torch_FloatTensor
        return allreduce(None, None, 1, b"allreduce.x", horovod.async_operations.Sum, 1.0, 1.0, 0)

    with pytest.raises(ValueError, match="LOCAL_RANK=7") if strict else nullcontext():
        assert reduced() == 5
    assert strict or "the training is left alone: LOCAL_RANK=7, LOCAL_WORLD_SIZE=2" in caplog.text


GONE = """
import gc, warnings, weakref, torch
import netbottleneck.torch as hvd

hvd.init()
warnings.filterwarnings("error", message="Using `torch.compile")
for options in ({}, {"compression": hvd.Compression.fp16}):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.125), model.named_parameters(), **options
    )
    called = torch.compile(model, backend="eager")
    for _ in range(5):
        optimizer.zero_grad()
        called(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    alive = [weakref.ref(p) for p in model.parameters()]
    del model, called, optimizer
    torch._dynamo.reset()
    gc.collect()
    print("alive", sum(reference() is not None for reference in alive))
    if not options:
        other = torch.nn.Linear(4, 4)
        torch.optim.SGD(other.parameters(), lr=0.125).step()  # goes through hooks that are left
    hvd.join()
    hvd.shutdown()
    hvd.init()
hvd.shutdown()
"""


@pytest.mark.parametrize("transports", ["stock,tcp", "tcp"])
def test_an_optimizer_that_is_gone_takes_its_memory_along(warm_ranks: Ranks, tmp_path: Path, transports: str) -> None:
    env = {**ENV, "NETBOTTLENECK_TRANSPORT": transports, "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    for result in warm_ranks(2, GONE, env):
        lines = [line for line in result.stdout.splitlines() if line.startswith("alive")]
        assert lines == ["alive 0"] * 2, result.stdout + result.stderr
    assert Run(tmp_path / "run").trace.steps


TWO = """
import hashlib, torch
import netbottleneck.torch as hvd

hvd.init()
torch.manual_seed(1)
torch.set_num_threads(1)
kept = {kept}
table, line = torch.nn.Linear(4, 8), torch.nn.Linear(8, 400)
model = torch.nn.Sequential(table, line)


def made(part):
    return hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.01), part.named_parameters())


def train(*optimizers):
    for _ in range(12):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.randn(4, 4) + hvd.rank()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


optimizer = made(table)
if kept:
    train(optimizer, made(line))
else:
    train(optimizer)
    optimizer = made(line)
    train(optimizer)
print("weights", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
hvd.shutdown()
"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_second_optimizer_is_left_alone_and_named(warm_ranks: Ranks, tmp_path: Path, kept: bool) -> None:
    source = TWO.format(kept=kept)
    plain = {result.stdout.splitlines()[0] for result in warm_ranks(2, source)}
    env = {**ENV, "NETBOTTLENECK_TRANSPORT": "stock,tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    results = warm_ranks(2, source, env)
    assert {result.stdout.splitlines()[0] for result in results} == plain
    line = "the distributed optimizer SGD, 2 parameters, 14.1 KiB is left alone: another one is or was measured"
    assert all(result.stderr.count(line) == 1 for result in results)
    found = Run(tmp_path / "run").findings
    left = "a distributed optimizer (SGD, 2 parameters, 14.1 KiB) was left alone: what it communicates is not in this"
    assert found.not_recorded.startswith(left) == kept
    assert bool(found.not_recorded) == kept


def test_a_second_optimizer_is_an_error_in_strict_mode(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**ENV, "NETBOTTLENECK_TRANSPORT": "tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    job = warm_ranks.start(2, TWO.format(kept=True), env={**env, "NETBOTTLENECK_STRICT": "1"})
    for result in job.wait(check=False):
        assert result.code not in {0, None}
        assert "ValueError: NETBOTTLENECK_STRICT=1, and the distributed optimizer SGD" in result.stderr


LATE = """
import time
import torch
import netbottleneck.torch as hvd

hvd.init()
model = torch.nn.Linear(8, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

train(2)
hvd.shutdown()
hvd.init()
train(3 - 3 * hvd.rank())
hvd.join()
train(3)
print("trained")
"""


def test_a_rank_that_joins_before_a_run_begins_leaves_it_alone_on_all_ranks(warm_ranks: Ranks, tmp_path: Path) -> None:
    """The others cannot open the run without it, and it must not wait for them later."""
    long = {"NETBOTTLENECK_START_TIMEOUT_S": "1000"}
    env = {**ENV, "NETBOTTLENECK": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run"), **long}
    first, second = warm_ranks(2, LATE, env)
    assert "the training is left alone: no run can be measured on all ranks" in first.stderr
    assert "the training is left alone: hvd.join() came before its run had begun" in second.stderr


def test_a_list_with_the_untouched_path_is_refused_before_a_run_begins(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {**ENV, "NETBOTTLENECK_TRANSPORT": "stock,bare", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    for result in warm_ranks.start(2, TWO.format(kept=False), env=env).wait(check=False):
        assert result.code not in {0, None}
        assert (
            "ValueError: NETBOTTLENECK_TRANSPORT=stock,bare: netbottleneck alone moves the gradients" in result.stderr
        )
        assert "no step was recorded" not in result.stderr
    assert not (tmp_path / "run").exists()


UNREDUCED = """
import torch
import netbottleneck.torch as hvd

hvd.init(process_sets="dynamic")
torch.manual_seed(1)
among = hvd.global_process_set if hvd.size() == 1 else hvd.add_process_set([0])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=among)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
hvd.shutdown()
"""


@pytest.mark.parametrize(
    ("size", "why"), [(1, "one rank: no gradient is"), (2, "its optimizer reduces gradients over")]
)
def test_why_a_distributed_optimizer_is_not_measured(warm_ranks: Ranks, size: int, why: str) -> None:
    for result in warm_ranks(size, UNREDUCED, {**ENV, "NETBOTTLENECK_TRANSPORT": "stock"}):
        assert f"the training is left alone: {why}" in result.stderr


STATES = """
import torch
import netbottleneck.torch as hvd

hvd.init()
models = [torch.nn.Linear(4, 4) for _ in range(3)]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
for optimizer in optimizers:
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizers[0], models[0].named_parameters())
for _ in range(4):
    optimizer.zero_grad()
    models[0](torch.ones(4, 4)).sum().backward()
    optimizer.step()
hvd.shutdown()
print("trained")
"""


def test_a_step_that_only_makes_an_optimizers_state_is_no_training(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {"NETBOTTLENECK_TRANSPORT": "stock", "NETBOTTLENECK_STRICT": "1", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    for result in warm_ranks(2, STATES, {**ENV, **env}):
        assert "trained" in result.stdout.splitlines()
        assert "left alone" not in result.stderr


TINY = """
import hashlib, torch
import netbottleneck.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
compression = hvd.Compression.fp16 if {fp16} else hvd.Compression.none
weight = torch.nn.Parameter(torch.zeros(1000))
optimizer = torch.optim.SGD([weight], lr=1.0)
optimizer = hvd.DistributedOptimizer(
    optimizer, [("w", weight)], compression=compression, gradient_predivide_factor={predivide}
)
for _ in range(12):
    optimizer.zero_grad()
    (weight * torch.rand(1000) * {size}).sum().backward()
    optimizer.step()
print("weights", hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest())
hvd.shutdown()
"""


@pytest.mark.parametrize("predivide", [1.0, 3.0])
@pytest.mark.parametrize("fp16", [False, True])
def test_an_average_over_stock_has_the_bits_of_ours_where_gradients_are_tiny(
    warm_ranks: Ranks, tmp_path: Path, fp16: bool, predivide: float
) -> None:
    """Half of a float16 below 6e-5, or of a float32 below 1e-38, is rounded: before the sum or behind it."""
    source = TINY.format(fp16=fp16, predivide=predivide, size=1e-6 if fp16 else 1e-43)
    compared = {**ENV, "NETBOTTLENECK_TRANSPORT": "stock,tcp", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    results = [result for env in ({}, compared) for result in warm_ranks(2, source, env)]
    weights = [line for result in results for line in result.stdout.splitlines() if line.startswith("weights")]
    assert len(weights) == 4
    assert len(set(weights)) == 1
    assert {step.arm for step in Run(tmp_path / "run").trace.steps} == {"stock", "tcp"}
