"""Ranks that fork at every stage of a job, over each network: a child neither changes nor keeps its parent's state."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path

import ports
import pytest
from conftest import Ranks

from netbottleneck import _core
from netbottleneck.report import Run

NETWORKS = {
    "shm": {"NETBOTTLENECK_SHM": "1", "NETBOTTLENECK_TRANSPORT": "tcp"},
    "tcp": {"NETBOTTLENECK_TRANSPORT": "tcp"},
    "ofi": {"NETBOTTLENECK_TRANSPORT": "ofi"},
}
# No test waits for it: what only the deadline shows is not shown in time.
LONG = {"NETBOTTLENECK_TIMEOUT_S": "600"}


@pytest.fixture(params=list(NETWORKS))
def network(request: pytest.FixtureRequest) -> dict[str, str]:
    """Provide the variables of each network."""
    if request.param == "ofi":
        try:
            _core.providers()
        except OSError as error:
            pytest.skip(str(error))
    return NETWORKS[request.param] | LONG


WORKERS = """
import os, torch
import netbottleneck.torch as hvd
from netbottleneck.runtime import job

hvd.init()
arena = job.core().Arena(1 << 20)
job.current().comm.map(arena)  # memory that the ranks of a host share, where they do
shared = torch.frombuffer(arena, dtype=torch.float32)
model = torch.nn.Linear(256, 256, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
data = torch.utils.data.TensorDataset(torch.arange(16.0).repeat(256, 1).T.contiguous())


def writes(worker):
    # A worker has the model, as it was forked; what it writes is its own.
    assert model.weight.grad is None or model.weight.grad.isfinite().all()
    if model.weight.grad is not None:
        model.weight.grad.fill_(float("nan"))
    model.weight.data.fill_(float("nan"))
    assert shared.isfinite().all()
    shared.fill_(float("nan"))


loader = torch.utils.data.DataLoader(
    data, 2, num_workers=2, multiprocessing_context="fork", worker_init_fn=writes
)
steps = 0
for epoch in range(2):
    for (batch,) in loader:
        optimizer.zero_grad(set_to_none=False)
        model(batch * (1 + hvd.rank())).sum().backward()
        optimizer.synchronize()
        before = model.weight.grad.clone()
        child = os.fork()  # at the moment at which a gradient is whole, and not used yet
        if child == 0:
            model.weight.grad.fill_(-1e9)
            shared.fill_(-1e9)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(model.weight.grad, before)
        assert (shared == steps * 2.0).all()
        shared.add_(1.0)
        job.current().comm.submit("shared", job.core().ALLREDUCE, arena, job.core().FLOAT32).wait()
        shared.copy_(torch.full_like(shared, steps * 2.0 + 2.0))
        with optimizer.skip_synchronize():
            optimizer.step()
        steps += 1
mean = (1 + hvd.size()) / 2
assert steps == 16
assert model.weight.tolist() == [[-2.0 * 120 * mean] * 256] * 256, model.weight
hvd.shutdown()
print("done")
"""


def test_workers_and_children_that_write_gradients_do_not_change_the_parent(
    warm_ranks: Ranks, network: dict[str, str]
) -> None:
    for result in warm_ranks(2, WORKERS, network):
        assert "done" in result.stdout, result.stderr


OUTLIVES = """
import os, signal, sys, torch
import netbottleneck.torch as hvd

hold = os.pipe()  # of the test's: what a child waits for is that this rank, and the other one, are over
hvd.init()
first = hvd.allreduce(torch.ones(1000), name="first", op=hvd.Sum)
assert first.tolist() == [2.0] * 1000
if hvd.rank() == 1:
    child = os.fork()
    if child == 0:
        signal.pause()  # ended with the group of processes that its rank led
    print("child lives", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allreduce(torch.ones(1000), name="second")
    print("no error")
except Exception as error:
    print("raised:", error)
"""


OBSERVED = """
import os, signal, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import netbottleneck

dist.init_process_group("gloo")
model = DDP(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))), bucket_cap_mb=0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(200):
    optimizer.zero_grad(set_to_none=False)
    model(torch.ones(2, 64)).sum().backward()
    child = os.fork()  # gloo's threads may still run callbacks of this pass
    if child == 0:
        os._exit(0)
    signal.alarm(20)  # ends a rank whose child hangs
    assert os.waitpid(child, 0)[1] == 0
    signal.alarm(0)
    optimizer.step()
print("forked", step + 1)
"""


def test_a_child_forked_right_after_a_measured_backward_pass_runs(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, OBSERVED, {"NETBOTTLENECK": "1"}):
        assert "forked 200" in result.stdout, result.stderr


STARTING = """
import os, signal, sys, threading
from netbottleneck.launch import connect
from netbottleneck.runtime import job

starts, forked, connected = threading.Event(), threading.Event(), connect.connect


def connecting(*args, **options):
    starts.set()
    forked.wait()
    return connected(*args, **options)


connect.connect = connecting
thread = threading.Thread(target=job.start)
thread.start()
starts.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    sys.exit(0)  # with all that is to be done at exit
_, status = os.waitpid(child, 0)
forked.set()
thread.join()
assert status == 0, status
assert job.is_started()
"""


def test_a_child_forked_while_a_thread_starts_the_job_ends(warm_ranks: Ranks) -> None:
    warm_ranks(1, STARTING)


def test_the_death_of_a_rank_is_detected_although_its_child_lives(warm_ranks: Ranks, network: dict[str, str]) -> None:
    results = warm_ranks(2, OUTLIVES, network, check=False)
    assert results[1].code == -9
    assert "child lives" in results[1].stdout
    assert re.search(r"^raised: .*rank 1 ", results[0].stdout, re.MULTILINE), results[0]
    assert results[0].code == 0


STAGES = """
import gc, os, signal, sys, torch
import netbottleneck.torch as hvd
from netbottleneck.runtime import job

children = []


def forked(use):
    # A child that uses the API, says what came of it, and lives on.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, use().encode())
        os.close(writer)
        signal.pause()
    os.close(writer)
    children.append(child)
    with os.fdopen(reader) as pipe:
        return pipe.read()


def refusals():
    messages = []
    for call in (
        lambda: hvd.allreduce(torch.ones(2), name="child"),
        lambda: hvd.allgather(torch.ones(2), name="gathered"),
        lambda: hvd.broadcast_object("x"),
        lambda: hvd.barrier(),
        lambda: job.current().comm.close(),
    ):
        try:
            call()
            messages.append("nothing")
        except Exception as error:
            messages.append(str(error))
    hvd.shutdown()  # the parent's job is its own
    gc.collect()
    return "\\n".join(messages)


before = forked(refusals)
assert before.splitlines() == ["Horovod has not been initialized; use hvd.init()."] * 5, before
for round in range(3):
    hvd.init()
    assert hvd.allreduce(torch.ones(1000), name="first", op=hvd.Sum).tolist() == [2.0] * 1000
    during = forked(refusals).splitlines()
    assert len(during) == 5, during
    assert all("used in process" in each and "after fork" in each for each in during), during
    assert hvd.allreduce(torch.ones(1000), name="second", op=hvd.Sum).tolist() == [2.0] * 1000
    hvd.shutdown()
    after = forked(refusals)
    assert after.splitlines() == before.splitlines(), after
print("done")
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.fixture
def few_ports() -> Generator[dict[str, str], None, None]:
    """Provide settings with the fewest ports of a job of two: rank 0's store and listener, and a lane of each rank."""
    with ports.block() as given:
        yield {"NETBOTTLENECK_PORTS": f"{given[0]}-{given[3]}", "NETBOTTLENECK_STREAMS": "1"}


def test_jobs_in_sequence_use_the_same_few_ports_while_children_of_each_stage_live(
    warm_ranks: Ranks, network: dict[str, str], few_ports: dict[str, str]
) -> None:
    for result in warm_ranks(2, STAGES, network | few_ports):
        assert "done" in result.stdout, result.stderr


ELASTIC = """
import os, signal, torch
import netbottleneck.torch as hvd
from netbottleneck.errors import HorovodInternalError

children, failures = [], [1, 3]
hvd.init()
model = torch.nn.Linear(64, 64, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.step < 5:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
        optimizer.zero_grad()
        model(torch.full((1, 64), 1.0 + hvd.rank())).sum().backward()
        optimizer.step()
        if state.step in failures:
            failures.remove(state.step)
            raise HorovodInternalError("made here")  # what this step did is undone
        state.step += 1
        state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
assert not failures and len(children) == 7
assert model.weight.tolist() == [[-1.5 * 5] * 64] * 64, model.weight
hvd.shutdown()
print("done")
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_an_elastic_job_restarts_on_the_same_few_ports_while_children_live(
    warm_ranks: Ranks, network: dict[str, str], few_ports: dict[str, str]
) -> None:
    for result in warm_ranks(2, ELASTIC, network | few_ports):
        assert "done" in result.stdout, result.stderr


STEPS_OF_A_CHILD = """
import os, sys, traceback, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
trained = DistributedDataParallel(model) if sys.argv[1] == "ddp" else model


def train(value):
    optimizer.zero_grad()
    trained(torch.full((1, 4), value)).sum().backward()
    optimizer.step()


def child():
    before = model.weight.clone()
    for _ in range(3):
        if trained is model:
            train(16.0)
        else:  # DDP itself would wait for the other rank
            model.weight.grad = torch.full_like(model.weight, 16.0)
            optimizer.step()
    assert torch.equal(model.weight, before - 48.0), model.weight


with netbottleneck.profile(trained, optimizer, transport="stock,tcp") as session:
    for step in range(6):
        forked = os.fork()
        if forked == 0:
            try:
                child()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        assert os.waitpid(forked, 0)[1] == 0
        train(1.0 + dist.get_rank())
    assert session.stays is None
assert model.weight.tolist() == [[-9.0] * 4] * 2, model.weight
print("done")
"""


@pytest.mark.parametrize("how", ["ddp", "loop"])
def test_a_child_that_steps_the_measured_optimizer_trains_by_itself(warm_ranks: Ranks, how: str) -> None:
    env = LONG | {"NETBOTTLENECK_BLOCK_STEPS": "1"}
    for result in warm_ranks(2, STEPS_OF_A_CHILD, env, args=[how]):
        assert "done" in result.stdout, result.stderr
        assert "measuring has ended" not in result.stderr


FREED_IN_A_CHILD = """
import json, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import netbottleneck
from netbottleneck.hooks import ddp

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
session = ddp.measured_by(model).session
session.joining.settle()
path = session.folder / "ranks" / f"{session.place.rank}.meta.json"
before = path.read_bytes()
forked = os.fork()
if forked == 0:
    del model, optimizer
    os._exit(0 if ddp.measures() is False else 1)
assert os.waitpid(forked, 0)[1] == 0
assert path.read_bytes() == before
assert json.loads(before)["pid"] == os.getpid()
dist.barrier()
print("done")
"""


def test_a_child_that_frees_its_model_leaves_the_record_of_its_parent(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, FREED_IN_A_CHILD, {"NETBOTTLENECK": "1"}):
        assert "done" in result.stdout, result.stderr


RANKS_OF_MULTIPROCESSING = """
import os
import sys
import netbottleneck
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from netbottleneck.runtime import exits
from torch.nn.parallel import DistributedDataParallel


def rank(number, store):
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    exits.register(lambda: print("kept", flush=True))
    dropped = lambda: print("dropped", flush=True)
    exits.register(dropped)
    exits.unregister(dropped)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    if "fails" in sys.argv:
        raise KeyError("mine")


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        processes.start_processes(rank, (os.path.abspath("store"),), nprocs=2, start_method=sys.argv[1])
    except processes.ProcessRaisedException:
        print("raised")
"""


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_ranks_that_multiprocessing_starts_end_as_others_do(warm_ranks: Ranks, tmp_path: Path, how: str) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    (result,) = warm_ranks(1, RANKS_OF_MULTIPROCESSING, env, args=[how])
    assert result.stdout.count("Report: ") == 1, result.stderr
    assert len(Run(tmp_path / "run").trace.steps) == 12
    assert result.stdout.count("kept") == 2
    assert "dropped" not in result.stdout


def test_a_rank_that_multiprocessing_forks_records_that_it_failed(warm_ranks: Ranks, tmp_path: Path) -> None:
    env = {"NETBOTTLENECK": "1", "NETBOTTLENECK_START_STEP": "0", "NETBOTTLENECK_DIR": str(tmp_path / "run")}
    (result,) = warm_ranks(1, RANKS_OF_MULTIPROCESSING, env, args=["fork", "fails"])
    assert "raised" in result.stdout
    metas = [json.loads(path.read_text()) for path in tmp_path.glob("run/**/*.meta.json")]
    assert "SystemExit: 1" in [meta["error"] for meta in metas]  # which torch makes of it
