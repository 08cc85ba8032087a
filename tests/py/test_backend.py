"""The torch.distributed backend "nb": the checks in scripts/ on one to four ranks, and how its processes end."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import Ranks, checks

pytest.importorskip("torch")

import torch

from netbottleneck.torch.backend import collectives
from netbottleneck.torch.backend.operations import About, Link, Move, Operation, Touched

SCRIPTS = Path(__file__).parent / "scripts"
# A rank that is missing is named soon.
QUICK = {"NETBOTTLENECK_STALL_S": "1"}


def run(ranks: Ranks, size: int, script: str, names: list[str], env: dict[str, str] | None = None) -> None:
    """Run checks on all ranks; every rank must have passed each."""
    for result in ranks(size, SCRIPTS / script, {**QUICK, **(env or {})}, args=names):
        assert result.stdout.splitlines() == [f"ok {name}" for name in names]


@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_what_torch_distributed_does(warm_ranks: Ranks, size: int) -> None:
    run(warm_ranks, size, "backend_checks.py", checks(SCRIPTS / "backend_checks.py"))


def test_the_name_for_the_cpu_alone_and_shared_memory(warm_ranks: Ranks) -> None:
    names = ["it_is_known_by_its_name", "tensors_are_moved_as_gloo_moves_them", "messages_come_in_order_of_their_tags"]
    run(warm_ranks, 2, "backend_checks.py", names, {"CHECKED_BACKEND": "cpu:nb", "NETBOTTLENECK_SHM": "1"})


@pytest.mark.parametrize("size", [2, 3])
def test_training(warm_ranks: Ranks, size: int, tmp_path: Path) -> None:
    run(
        warm_ranks,
        size,
        "backend_training.py",
        checks(SCRIPTS / "backend_training.py"),
        {"CHECKPOINT": str(tmp_path / "checkpoint")},
    )


AGAIN = """
import threading
from datetime import timedelta
import torch, torch.distributed as dist
import netbottleneck.torch
for turn in range(20):
    dist.init_process_group("nb")
    for group in (None, dist.new_group([0, 1], timeout=timedelta(seconds=20))):
        value = torch.ones(3)
        dist.all_reduce(value, group=group)
        assert value[0] == dist.get_world_size()
    dist.all_reduce(value, async_op=True).get_future().wait()
    dist.destroy_process_group()
    assert threading.active_count() == 1, threading.enumerate()
"""


def test_groups_can_be_created_and_destroyed(warm_ranks: Ranks) -> None:
    warm_ranks(2, AGAIN)


END = """
import sys
import torch, torch.distributed as dist
import netbottleneck.torch
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nb")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
if "others go on" in sys.argv and dist.get_rank() > 0:
    pair = dist.new_group([1, 2], use_local_synchronization=True)
    value = torch.full((2,), float(dist.get_rank()))
    (dist.send if dist.get_rank() == 1 else dist.recv)(value, 3 - dist.get_rank())
    assert value[0] == 1
    dist.all_reduce(value, group=pair)
print("end")
if "destroys" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["destroys", "leaves"])
def test_processes_exit_cleanly(ranks: Ranks, warm_ranks: Ranks, how: str) -> None:
    """Where they leave the group to the end of the process, no part of that process is the tests'."""
    for result in (ranks if how == "leaves" else warm_ranks)(3, END, args=[how, "others go on"]):
        assert result.stdout == "end\n"
        assert "Traceback" not in result.stderr
        assert "terminate" not in result.stderr


KILLED = """
import os, signal
import torch, torch.distributed as dist
import netbottleneck.torch
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nb")
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=0.2)
print("training", flush=True)
try:
    while True:
        model(torch.ones(4, 256)).sum().backward()
except RuntimeError as error:  # a PeerError, or torch's error about one
    print(f"{type(error).__name__}: {error}".splitlines()[0])
try:
    dist.all_reduce(torch.ones(2))
except RuntimeError as error:
    print("peer", error.peer)
"""


def test_a_rank_killed_in_training_is_named_on_the_others(warm_ranks: Ranks) -> None:
    job = warm_ranks.start(3, KILLED)
    for rank in range(3):
        job.wait_for_line(rank, "training")
    job.kill(1)
    results = job.wait(check=False)
    assert results[1].code == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].code == 0, results[rank].stderr
        assert re.search(r"PeerError: .*rank 1 ", results[rank].stdout), results[rank].stdout
        assert "peer 1" in results[rank].stdout.splitlines()


LEFT = """
import torch, torch.distributed as dist
import netbottleneck.torch
dist.init_process_group("nb")
dist.barrier()
if dist.get_rank() == 1:
    raise SystemExit("this rank cannot go on")
dist.all_reduce(torch.ones(2))
"""


def test_a_rank_that_ends_early_is_named_on_the_others(warm_ranks: Ranks) -> None:
    results = warm_ranks(3, LEFT, check=False)
    assert [result.code for result in results] == [1, 1, 1]
    for rank in (0, 2):
        assert "PeerError" in results[rank].stderr
        assert "rank 1 left" in results[rank].stderr


BESIDE = """
import torch, torch.distributed as dist
import netbottleneck.torch as hvd
dist.init_process_group("gloo")
ours = dist.new_group([0, 1], backend="nb")
theirs = dist.new_group([1, 2], backend="nb")
for group in (ours, theirs):
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        value = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(value, group=group)
        assert value.item() == sum(dist.get_process_group_ranks(group))
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3.0, 3.0]
dist.destroy_process_group()
hvd.shutdown()
"""


def test_its_groups_work_together_with_gloo_and_horovods_api(warm_ranks: Ranks) -> None:
    warm_ranks(3, BESIDE)


SUM = """
value = torch.ones(2)
dist.all_reduce(value)
assert value[0] == 2
"""


TIMEOUT = """
from datetime import timedelta
import netbottleneck.torch
import torch
import torch.distributed as dist
from netbottleneck.hooks.ddp import timeout_of

dist.init_process_group("nb", timeout=timedelta(seconds=7))
print("timeout", timeout_of(dist.group.WORLD, torch.device("cpu")))
dist.destroy_process_group()
"""


def test_a_measured_model_over_it_waits_no_longer_than_its_group(warm_ranks: Ranks) -> None:
    assert ["timeout 7.0" in result.stdout for result in warm_ranks(2, TIMEOUT, {})] == [True, True]


def test_the_backend_is_registered_if_the_environment_enables_measuring(ranks: Ranks) -> None:
    script = """
import netbottleneck
import torch, torch.distributed as dist
dist.init_process_group("nb")
"""
    ranks(2, script + SUM, {"NETBOTTLENECK": "1"})


def test_other_devices_have_the_backend_that_was_named(warm_ranks: Ranks) -> None:
    script = f"""
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
import netbottleneck.torch
dist.init_process_group("cpu:nb,meta:fake")
{SUM}
world = dist.group.WORLD
assert world._device_types == [torch.device("cpu"), torch.device("meta")]
dist.all_reduce(torch.ones(2, device="meta"))
assert type(world._get_backend(torch.device("meta"))).__name__ == "FakeProcessGroup"
dist.destroy_process_group()
"""
    warm_ranks(2, script)


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view, lambda tensor: tensor.conj().imag])
def test_values_are_sent_and_received_not_what_a_view_negates(view: Any) -> None:
    tensor = view(torch.tensor([1 + 2j, 3 + 4j]))
    wanted = tensor.tolist()
    touched = Touched()
    sent, into = touched.read(tensor), touched.written(tensor)
    assert not any(one.is_conj() or one.is_neg() for one in (sent, into))
    assert sent.tolist() == wanted
    into.mul_(2)
    touched.settle()
    assert tensor.tolist() == [2 * value for value in wanted]


EXPANDED = """
import torch, torch.distributed as dist
import netbottleneck.torch
dist.init_process_group("nb")
root = dist.get_rank() == 0
value = torch.full((1,), 3.0).expand(4) if root else torch.zeros(4)
dist.broadcast(value, 0)
assert value.tolist() == [3.0] * 4
try:
    dist.all_reduce(torch.ones(1).expand(4))
except ValueError as error:
    print(error)
"""


def test_an_expanded_tensor_can_be_sent_but_is_not_received_into(warm_ranks: Ranks) -> None:
    refusal = "a tensor of shape [4] with expanded dimensions cannot be received into"
    assert [result.stdout.strip() for result in warm_ranks(2, EXPANDED)] == [refusal] * 2


def taken(names: collectives.Names, nbytes: int, operation: Operation, **more: Any) -> str:
    return names.take([Move("ALLREDUCE", [(0, nbytes)], 6, **more)], operation)[0][0]


def begun(*works: Any) -> Operation:
    operation = Operation()
    operation.run(iter([works] if works else []))
    return operation


def test_operations_of_different_signatures_have_their_names_in_any_order() -> None:
    nbytes, kinds = range(4, 40_000, 4), ({}, {"op": 1}, {"root": 1}, {"factor": 0.5})
    one, other = collectives.Names(0), collectives.Names(0)
    operation = begun()
    asked = [(size, more) for size in nbytes for more in kinds]
    found = [taken(one, size, operation, **more) for size, more in asked]
    assert len(set(found)) == len(asked)
    assert found[::-1] == [taken(other, size, operation, **more) for size, more in reversed(asked)]


def test_names_forget_only_what_other_ranks_need_not_remember(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "KEPT_MAX", 4)
    names, pending = collectives.Names(0), begun(SimpleNamespace(test=lambda: False))
    for _ in range(collectives.SLOTS):
        taken(names, 4, begun())
        taken(names, 8, pending)
    taken(names, 12, begun())
    for size in range(100, 200):
        for _ in range(collectives.SLOTS):
            taken(names, size, begun())
    assert len(names._series) <= 2 * 4
    assert taken(names, 4, begun()).endswith(".0")
    assert taken(names, 12, begun()).endswith(".1")
    assert names.take([Move("ALLREDUCE", [(0, 8)], 6)], begun())[1] == [pending]


def test_the_equal_moves_of_an_operation_have_different_names_and_wait_for_none_of_it() -> None:
    names, work = collectives.Names(0), SimpleNamespace(test=lambda: False)
    moves = [Move("ALLREDUCE", [(0, 8)], 6) for _ in range(3 * collectives.SLOTS)]
    pending = [begun(work) for _ in range(collectives.SLOTS)]
    found = [names.take(moves, operation) for operation in pending]
    assert all(busy == [] for _, busy in found)
    assert len({name for some, _ in found for name in some}) == len(moves) * len(pending)
    again, busy = names.take(moves, begun())
    assert (again, busy) == (found[0][0], [pending[0]])


def test_any_number_of_operations_may_wait_for_each_other() -> None:
    before = begun(SimpleNamespace(test=lambda: True, wait=lambda limit_s: True))
    for _ in range(5000):
        before, earlier = begun(before), before
        assert not earlier.is_over
        before.driven = True
    assert not before.over(0.0)
    assert before.over(1.0)
    assert before.is_over
    assert before.failure is None


@pytest.mark.parametrize(
    ("size", "sent", "received", "error", "said"),
    [
        (348, 2, 2, NotImplementedError, "parts of different sizes among 348 ranks"),
        (2, 3, 2, ValueError, "rank 0 sends itself 3 elements, but receives 2"),
    ],
)
def test_an_all_to_all_that_cannot_be_is_refused_before_anything_moves(
    size: int, sent: int, received: int, error: type[Exception], said: str
) -> None:
    pairs = collectives.Pairs(cast(Any, SimpleNamespace(size=size)), cast(Any, SimpleNamespace(rank=0, size=size)))
    inputs, outputs = ([torch.zeros(count)] + [torch.zeros(1)] * (size - 1) for count in (sent, received))
    with pytest.raises(error, match=said):
        next(pairs.all_to_all(outputs, inputs))


@pytest.mark.parametrize(("count", "said"), [(15, "missing: rank 1, 2, "), (16, "missing: at least rank 1, 2, ")])
def test_a_timeout_says_at_least_where_more_ranks_may_be_missing(count: int, said: str) -> None:
    comm = SimpleNamespace(
        rank=0, size=64, notices=list, missing=lambda name, group: list(range(1, 1 + count)) if name == "late" else []
    )
    about = About(Link(cast(Any, comm), None, b"n"), "all-reduce", range(64), 1.0)
    about.names = [("in time", 0), ("late", 0)]
    error = about.late(1.0)
    assert said in str(error)
    assert error.peer == 1
