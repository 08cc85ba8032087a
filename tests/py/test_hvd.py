"""Horovod's API: the checks in scripts/ on two and three ranks with torchrun's variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Ranks, checks, free_port

from netbottleneck.runtime.async_operations import divide_toward_zero
from netbottleneck.runtime.horovod_common import gpu_available

torch = pytest.importorskip("torch")

SCRIPTS = Path(__file__).parent / "scripts"


def run(ranks: Ranks, size: int, script: str, names: list[str]) -> None:
    """Run checks on all ranks; every rank must have passed each."""
    for result in ranks(size, SCRIPTS / script, args=names):
        assert result.stdout.splitlines() == [f"ok {name}" for name in names]


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(warm_ranks: Ranks, size: int) -> None:
    run(warm_ranks, size, "hvd_checks.py", checks(SCRIPTS / "hvd_checks.py"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("size", [2, 49, 98, 300])
def test_sums_of_integers_are_divided_exactly(dtype: Any, size: int) -> None:
    limits = torch.iinfo(dtype)
    sums = [limits.min, limits.max, 0, 1, 49, 98, *([-1, -49, -50] if limits.min < 0 else [])]
    wanted = [(1 if value > 0 else -1) * (abs(value) // size) for value in sums]
    tensor = torch.tensor(sums, dtype=dtype)
    array = tensor.clone().numpy()
    divide_toward_zero(tensor, size)
    divide_toward_zero(array, size)
    assert tensor.tolist() == array.tolist() == wanted


@pytest.mark.parametrize("size", [2, 3])
def test_optimizer(warm_ranks: Ranks, size: int) -> None:
    run(warm_ranks, size, "optimizer_checks.py", checks(SCRIPTS / "optimizer_checks.py"))


def test_gradients_match_those_of_horovod(warm_ranks: Ranks, tmp_path: Path) -> None:
    names = checks(SCRIPTS / "hvd_gradients.py")
    for result in warm_ranks(2, SCRIPTS / "hvd_gradients.py", {"MEET": str(tmp_path)}, args=names):
        assert result.stdout.splitlines() == [f"ok {name}" for name in names]


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_process_sets_joins_and_exchanges(warm_ranks: Ranks, size: int) -> None:
    run(warm_ranks, size, "set_checks.py", checks(SCRIPTS / "set_checks.py"))


SINGLE = """
import torch
import netbottleneck.torch as hvd
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
assert hvd.allreduce(torch.ones(3)).tolist() == [1.0] * 3
assert hvd.allgather(torch.ones(2, 2)).shape == (2, 2)
assert hvd.broadcast_object("x") == "x"
weight = torch.nn.Parameter(torch.ones(2))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
hvd.broadcast_optimizer_state(optimizer, 0)
for _ in range(2):
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
assert weight.tolist() == [-1.0, -1.0]
hvd.shutdown()
"""


def test_one_process_without_a_launcher_is_a_job_of_one_rank(warm_ranks: Ranks) -> None:
    none = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    warm_ranks(1, SINGLE, none)


COMMUNICATORS = """
import os
import re
import pytest
import netbottleneck.torch as hvd
from netbottleneck.runtime import job

RANK = int(os.environ["RANK"])


class Communicator:  # of MPI
    def __init__(self, rank, size):
        self.place = rank, size

    def Get_rank(self):
        return self.place[0]

    def Get_size(self):
        return self.place[1]


def never(*_):
    raise AssertionError("the job was started")


start, job.start = job.start, never
other = re.escape(f"rank {1 - RANK} of 2 in the communicator is rank {RANK} of 2 in the job")
for comm, message in (
    (Communicator(1 - RANK, 2), other),
    (Communicator(0, 1), "rank 0 of 1 in the communicator"),
    ([0], "all 2 ranks"),
):
    with pytest.raises(ValueError, match=message):
        hvd.init(comm=comm)
job.start = start
for comm in (Communicator(RANK, 2), [1, 0], [], None):
    hvd.init(comm=comm)
    assert (hvd.rank(), hvd.size()) == (RANK, 2)
    hvd.shutdown()
"""


def test_init_takes_all_ranks_as_a_list_or_as_an_mpi_communicator(warm_ranks: Ranks) -> None:
    warm_ranks(2, COMMUNICATORS)


@pytest.mark.parametrize("available", [False, True])
def test_gpus_are_available_if_torch_has_cuda(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert gpu_available("torch") == available
    assert not gpu_available("tensorflow")


BESIDE = """
import os
import torch
import torch.distributed as dist
import netbottleneck.torch as hvd
hvd.init()
dist.init_process_group("gloo")
value = torch.ones(2)
dist.all_reduce(value)
assert value.tolist() == hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
hvd.shutdown()
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
dist.destroy_process_group()
hvd.shutdown()
"""


def test_torch_distributed_works_beside_it(warm_ranks: Ranks) -> None:
    warm_ranks(2, BESIDE)


KILLED = """
import torch
import netbottleneck.torch as hvd
hvd.init()
model = torch.nn.Linear(1 << 18, 4)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
print("training", flush=True)
try:
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 1 << 18)).sum().backward()
        optimizer.step()
except hvd.HorovodInternalError as error:
    print("lost", error.peer)
    assert str(error.peer) in str(error)
hvd.shutdown()
"""


def test_a_rank_killed_in_training_is_named_on_the_others(warm_ranks: Ranks) -> None:
    job = warm_ranks.start(3, KILLED)
    for rank in range(3):
        job.wait_for_line(rank, "training")
    job.kill(1)
    results = job.wait(check=False)
    for rank in (0, 2):
        assert results[rank].code == 0, results[rank].stderr
        assert "lost 1" in results[rank].stdout.splitlines()


def test_torchruns_agent_store_is_used_if_it_exists(warm_ranks: Ranks) -> None:
    port = free_port()
    agent = f"""
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
print("listening", flush=True)
for rank in range(2):
    while not store.check([f"done {{rank}}"]):
        time.sleep(0.01)
"""
    worker = """
import os
import torch, torch.distributed as dist
import netbottleneck.torch as hvd
for _ in range(3):
    hvd.init()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
    hvd.shutdown()
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"done {os.environ['RANK']}", "1")
"""
    holder = warm_ranks.start(1, agent)
    holder.wait_for_line(0, "listening")
    warm_ranks(2, worker, {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    holder.wait()


KEPT = """
import pytest
import torch
import netbottleneck.torch as hvd

kinds = {
    "buckets": {},
    "one by one": {"compression": hvd.Compression.fp16},
    "adasum": {"op": hvd.Adasum},
}
weights = {name: torch.nn.Parameter(torch.zeros(3)) for name in kinds}
kept = {}
for turn in range(3):
    hvd.init()
    mean = sum(range(1, hvd.size() + 1)) / hvd.size()
    if turn == 1:  # a number of its own, before the kept ones have theirs
        other = torch.nn.Parameter(torch.zeros(3))
        fresh = hvd.DistributedOptimizer(torch.optim.SGD([other], lr=1.0), [("other", other)])
        (other * (1 + hvd.rank())).sum().backward()
        fresh.step()
        assert other.tolist() == [-mean] * 3
    for name, options in kinds.items():
        if name not in kept:
            optimizer = torch.optim.SGD([weights[name]], lr=1.0)
            kept[name] = hvd.DistributedOptimizer(optimizer, [("weight", weights[name])], **options)
        for step in range(2):
            kept[name].zero_grad()
            (weights[name] * (1 + hvd.rank())).sum().backward()
            kept[name].step()
            if name != "adasum":
                assert weights[name].tolist() == [-mean * (2 * turn + step + 1)] * 3, (name, turn, step)
        seen = hvd.allgather(weights[name].detach().unsqueeze(0))
        assert all(torch.equal(row, seen[0]) for row in seen)
    hvd.shutdown()
    for name in ("buckets", "one by one"):
        kept[name].zero_grad()
        weights[name].sum().backward()  # nothing of ours is called
        assert weights[name].grad.tolist() == [1.0] * 3
        with pytest.raises(ValueError, match="not been initialized"):
            kept[name].step()

print("done")
"""


def test_an_optimizer_serves_the_next_job_after_shutdown_and_init(warm_ranks: Ranks) -> None:
    for result in warm_ranks(2, KEPT):
        assert "done" in result.stdout
