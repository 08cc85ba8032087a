"""One rank of the checks of process sets, joins and exchanges: runs the named ones and prints "ok NAME" after each."""

from __future__ import annotations

import itertools
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from named_checks import check, run_named

os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"

import netbottleneck.torch as hvd
from netbottleneck.runtime import job


def raises(kind: type[BaseException], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def halves() -> tuple[hvd.ProcessSet, hvd.ProcessSet]:
    """Register the even and the odd ranks."""
    return hvd.add_process_set(range(0, hvd.size(), 2)), hvd.add_process_set(range(1, hvd.size(), 2))


def mine(sets: Sequence[hvd.ProcessSet]) -> hvd.ProcessSet:
    return next(one for one in sets if one.included())


def forget(sets: Sequence[hvd.ProcessSet]) -> None:
    for one in sets:
        assert hvd.remove_process_set(one)
        assert one.process_set_id is None
        assert not hvd.remove_process_set(one)


@check
def sets_know_their_ranks() -> None:
    everybody = hvd.global_process_set
    assert (everybody.process_set_id, everybody.ranks) == (0, list(range(hvd.size())))
    assert (everybody.size(), everybody.rank(), everybody.included()) == (hvd.size(), hvd.rank(), True)
    loose = hvd.ProcessSet([1, 0])
    assert (loose.ranks, loose.process_set_id, loose.size(), loose.rank()) == ([0, 1], None, None, None)
    sets = halves()
    even, odd = sets
    assert [one.process_set_id for one in sets] == sorted({one.process_set_id for one in sets})
    assert (even.included(), odd.included()) == (hvd.rank() % 2 == 0, hvd.rank() % 2 == 1)
    assert mine(sets).rank() == hvd.rank() // 2
    other = odd if even.included() else even
    raises(ValueError, "is not part of", other.rank)
    raises(ValueError, "is not part of", lambda: hvd.allreduce(torch.ones(1), process_set=other))
    forget(sets)
    raises(ValueError, "is not registered", lambda: hvd.allreduce(torch.ones(1), process_set=even))
    assert not hvd.remove_process_set(everybody)


@check
def impossible_sets_are_refused_by_all() -> None:
    raises(ValueError, "a list of distinct ranks", lambda: hvd.ProcessSet([0, 0]))
    raises(ValueError, "a list of distinct ranks", lambda: hvd.ProcessSet([]))
    raises(ValueError, f"ranks from 0 to {hvd.size() - 1}", lambda: hvd.add_process_set([0, hvd.size()]))
    raises(ValueError, "already exists", lambda: hvd.add_process_set(range(hvd.size())))
    sets = halves()
    raises(ValueError, "already exists", lambda: hvd.add_process_set(sets[0].ranks))
    raises(ValueError, "all ranks must name the same", lambda: hvd.add_process_set([hvd.rank()]))
    forget(sets)
    again = hvd.add_process_set([0])
    forget([again])


@check
def a_set_that_ranks_do_not_take_back_together_stays() -> None:
    sets = halves()
    which = sets[hvd.rank() % 2]
    raises(ValueError, "rank 0 requests remove", lambda: hvd.remove_process_set(which))
    raises(ValueError, "all ranks must name the same", lambda: _add_or_remove(sets[0]))
    here = mine(sets)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=here).item() == here.size()
    forget(sets)


def _add_or_remove(process_set: hvd.ProcessSet) -> None:
    if hvd.rank() == 0:
        hvd.add_process_set([0])
    else:
        hvd.remove_process_set(process_set)


@check
def each_set_counts_for_itself() -> None:
    sets = halves()
    here = mine(sets)
    ranks = here.ranks or []
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float64):
        given = torch.arange(5).to(dtype) + hvd.rank()
        total = torch.arange(5) * len(ranks) + sum(ranks)
        assert hvd.allreduce(given, op=hvd.Sum, process_set=here).tolist() == total.tolist()
        assert hvd.allreduce(given, op=hvd.Max, process_set=here).tolist() == (torch.arange(5) + ranks[-1]).tolist()
    average = hvd.allreduce(torch.tensor([float(hvd.rank())]), process_set=here)
    assert average.item() == pytest.approx(sum(ranks) / len(ranks))
    # The same name, at the same time, in all sets.
    handles = [
        hvd.allreduce_async(torch.ones(3), name="same", op=hvd.Sum, process_set=one)
        for one in (hvd.global_process_set, here)
    ]
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == [hvd.size(), len(ranks)]
    for _ in range(hvd.rank() % 2 * 3):  # unnamed ones of one set do not disturb the count of others
        hvd.allreduce(torch.ones(1), process_set=here)
    hvd.allreduce(torch.ones(1))
    forget(sets)


@check
def joining_spreading_and_exchanging_in_a_set() -> None:
    sets = halves()
    here = mine(sets)
    ranks = here.ranks or []
    place = here.rank()
    assert place is not None
    rows = hvd.allgather(torch.full((place + 1, 2), hvd.rank()), process_set=here)
    assert rows[:, 0].tolist() == [rank for at, rank in enumerate(ranks) for _ in range(at + 1)]
    for root in ranks:
        assert hvd.broadcast(torch.tensor([hvd.rank()]), root, process_set=here).item() == root
    stranger = next(rank for rank in range(hvd.size()) if rank not in ranks)
    raises(ValueError, f"root_rank={stranger}", lambda: hvd.broadcast(torch.ones(1), stranger, process_set=here))
    parts = hvd.reducescatter(torch.arange(2.0 * len(ranks) + 1), op=hvd.Sum, process_set=here)
    shares = np.array_split(np.arange(2.0 * len(ranks) + 1) * len(ranks), len(ranks))
    assert parts.tolist() == shares[place].tolist()
    swapped = hvd.alltoall(torch.arange(len(ranks)) + 10 * hvd.rank(), process_set=here)
    assert swapped.tolist() == [10 * rank + place for rank in ranks]
    assert hvd.broadcast_object(("x", hvd.rank()), ranks[-1], None, here) == ("x", ranks[-1])
    hvd.barrier(process_set=here)
    forget(sets)


@check
def rows_go_where_splits_say() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.uint8, torch.int16, torch.bfloat16, torch.float32):
        splits = torch.tensor([(rank + other) % 3 for other in range(size)], dtype=torch.int32)
        given = torch.full((int(splits.sum()) + 1, 2), rank).to(dtype)  # the last row goes nowhere
        found, received = hvd.alltoall(given, splits=splits)
        wanted = [(other + rank) % 3 for other in range(size)]
        assert received.tolist() == wanted
        assert received.dtype == torch.int32
        assert found.dtype == dtype
        assert found[:, 1].tolist() == [other for other in range(size) for _ in range(wanted[other])]
    nothing, none = hvd.alltoall(torch.zeros(0, 3), splits=[0] * size)
    assert none.dtype == torch.int32
    assert (nothing.shape, none.tolist()) == ((0, 3), [0] * size)
    raises(ValueError, f"one for each of {size} ranks", lambda: hvd.alltoall(torch.ones(4), splits=[1] * (size + 1)))
    raises(ValueError, "a sum of at most 4", lambda: hvd.alltoall(torch.ones(4), splits=[4] * size))
    raises(ValueError, "whole numbers", lambda: hvd.alltoall(torch.ones(4), splits=torch.ones(size)))
    raises(ValueError, "equal parts", lambda: hvd.alltoall(torch.ones(size + 1)))
    tensor = torch.ones(size, requires_grad=True)
    (hvd.alltoall(tensor) * (rank + 1)).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [other + 1 for other in range(size)]


@check
def ragged_rows_are_joined_and_others_refused_by_all() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.bool, torch.int8, torch.int16, torch.bfloat16, torch.float64):
        mine = torch.full((rank % 2 * (rank + 1), 2), rank % 2).to(dtype)  # nothing of even ranks
        rows = hvd.allgather(mine, name="ragged")
        assert rows.dtype == dtype
        assert rows.shape == (sum(other % 2 * (other + 1) for other in range(size)), 2)
        assert bool((rows == 1).all())
    unlike = [
        torch.ones(2, 3 + rank),
        torch.ones(2, *([1] * rank)),
        torch.ones(2, dtype=(torch.int32, torch.int64)[rank > 0]),
    ]
    for number, tensor in enumerate(unlike):
        name = f"unlike.{number}"
        with pytest.raises(hvd.HorovodInternalError, match="dimensions but the first must be the same"):
            hvd.allgather(tensor, name=name)
        with pytest.raises(hvd.HorovodInternalError, match="dimensions but the first must be the same"):
            hvd.alltoall(tensor, [0] * size, name=name)
        assert hvd.allgather(torch.ones(1), name=name).shape == (size,)


@check
def other_shapes_of_as_many_numbers_are_refused_by_all() -> None:
    rank = hvd.rank()
    shape = (2, 6) if rank == 0 else (3, 4)
    calls: dict[str, Callable[[str, torch.Tensor], Any]] = {
        "allreduce": lambda name, tensor: hvd.allreduce(tensor, name=name),
        "broadcast": lambda name, tensor: hvd.broadcast(tensor, 0, name=name),
        "reducescatter": lambda name, tensor: hvd.reducescatter(tensor, name=name),
        "grouped": lambda name, tensor: hvd.grouped_allreduce([torch.ones(2), tensor], name=name),
    }
    for kind, call in calls.items():
        with pytest.raises(hvd.HorovodInternalError, match="mismatched"):
            call(f"shapes.{kind}", torch.ones(shape))
        call(f"shapes.{kind}", torch.ones(3, 4))


@check
def names_of_pending_operations_are_refused() -> None:
    calls: list[Callable[[], int]] = [
        lambda: hvd.allgather_async(torch.ones(2), name="twice"),
        lambda: hvd.alltoall_async(torch.ones(hvd.size()), name="twice"),
        lambda: hvd.reducescatter_async(torch.ones(hvd.size()), name="twice"),
        lambda: hvd.grouped_allreduce_async([torch.ones(1), torch.ones(2)], name="twice"),
        lambda: hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Adasum),
    ]
    for call in calls:
        if hvd.rank() == 0:
            handle = call()
            raises(ValueError, "still under way", call)
        hvd.barrier()
        if hvd.rank() != 0:
            handle = call()
        hvd.synchronize(handle)


@check
def a_name_is_taken_until_somebody_has_waited_for_it_however_fast_the_operation_was() -> None:
    before, job.TAKEN_NS = job.TAKEN_NS, 60 * 10**9

    def call() -> int:
        return hvd.allreduce_async(torch.ones(1), name="fast", op=hvd.Sum)

    for turn in range(20):
        handle = call()
        if turn % hvd.size() == hvd.rank() and turn < hvd.size():
            time.sleep(10 * job.OTHERS_S)  # the others look at pending operations while they wait for this rank
        hvd.barrier()  # all have submitted it: it is over, or nearly
        raises(ValueError, "fast: an operation of this name is still under way", call)
        assert hvd.synchronize(handle).item() == hvd.size()
    handle = call()
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(call()).item() == hvd.size()
    job.TAKEN_NS = 0
    for _ in range(20):
        handle = call()
        hvd.barrier()
        while job.current().handles[handle].works[0].times()[4] == 0:
            pass
        assert hvd.synchronize(call()).item() == hvd.size()
        hvd.synchronize(handle)
    job.TAKEN_NS = before


@check
def a_group_with_one_bad_tensor_does_not_start() -> None:
    good, bad = torch.ones(hvd.size(), 2), torch.ones(2, hvd.size()).t()
    for _ in range(2):
        for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            raises(ValueError, "contiguous", lambda call=call: call([good, bad], name="bad"))
    raises(ValueError, "not supported", lambda: hvd.grouped_allreduce([good, good.to(torch.complex64)], name="bad"))
    for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        assert len(call([good, good], name="bad")) == 2


@check
def groups_of_tensors_go_together() -> None:
    size, rank = hvd.size(), hvd.rank()
    several = [torch.full((rank + 1,), float(rank)), torch.full((2, 3), float(rank))]
    joined = hvd.grouped_allgather(several)
    assert joined[0].tolist() == [float(other) for other in range(size) for _ in range(other + 1)]
    assert joined[1].shape == (2 * size, 3)
    reduced = hvd.grouped_reducescatter([torch.ones(size * 2), torch.ones(size + 1, 4)], op=hvd.Sum)
    assert reduced[0].tolist() == [float(size)] * 2
    assert reduced[1].shape == ((2 if rank == 0 else 1), 4)
    raises(ValueError, "at least one", lambda: hvd.grouped_allgather_async([]))
    raises(hvd.HorovodInternalError, "Average or Sum", lambda: hvd.reducescatter(torch.ones(size), op=hvd.Max))
    raises(ValueError, "at least one dimension", lambda: hvd.reducescatter(torch.tensor(1.0)))
    tensor = torch.ones(size * 2, requires_grad=True)
    hvd.reducescatter(tensor, op=hvd.Average).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [1.0] * (size * 2)


@check
def sparse_tensors_add_up() -> None:
    dense = torch.zeros(7, 3)
    dense[hvd.rank()] = 1 + hvd.rank()
    dense[6] = 2
    sparse = dense.to_sparse()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)()
    torch.set_warn_always(False)
    assert torch.equal(total.to_dense(), hvd.allreduce(dense, op=hvd.Sum))
    mean = hvd.sparse_allreduce_async(dense.to_sparse(), "sparse", hvd.Average)()
    assert torch.allclose(mean.to_dense(), hvd.allreduce(dense))


@check
def ranks_without_data_join() -> None:
    size, rank = hvd.size(), hvd.rank()
    for round_ in range(3):
        order = [(other + round_) % size for other in range(size)]  # who has how many batches
        for batch in range(2 * order[rank]):
            total = hvd.allreduce(torch.ones(5), name=f"batch.{batch}", op=hvd.Sum)
            assert total[0].item() == sum(2 * count > batch for count in order)
        assert order[hvd.join()] == size - 1
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    if rank > 0:
        with pytest.raises(hvd.HorovodInternalError, match="after rank 0 has joined"):
            hvd.allgather(torch.ones(1), name="needs all")
    assert hvd.join() > 0
    assert hvd.allgather(torch.ones(1)).shape == (size,)


def _sparse_sum() -> torch.Tensor:
    return hvd.sparse_allreduce_async(torch.eye(hvd.size()).to_sparse(), "sparse", hvd.Sum)()


@check
def only_sums_and_barriers_go_on_without_ranks_that_have_joined() -> None:
    size, rank = hvd.size(), hvd.rank()
    if rank > 0:
        refused: list[Callable[[], Any]] = [
            lambda: hvd.broadcast(torch.ones(1), 1),
            lambda: hvd.alltoall(torch.ones(size)),
            lambda: hvd.reducescatter(torch.ones(size)),
            _sparse_sum,
            lambda: hvd.allreduce(torch.ones(size), op=hvd.Adasum),
            lambda: hvd.allgather_object("x"),
        ]
        for call in refused:
            with pytest.raises(hvd.HorovodInternalError, match="after rank 0 has joined"):
                call()
        for op, wanted in ((hvd.Sum, size - 1), (hvd.Average, (size - 1) / size), (hvd.Max, 1), (hvd.Min, 0)):
            assert hvd.allreduce(torch.ones(2), op=op).tolist() == pytest.approx([wanted] * 2)
        several = hvd.grouped_allreduce([torch.ones(1), torch.ones(2, dtype=torch.int32)], op=hvd.Sum)
        assert [one[0].item() for one in several] == [size - 1] * 2
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, prescale_factor=2.0)[0].item() == 2 * (size - 1)
        hvd.barrier()
    hvd.join()
    assert hvd.broadcast(torch.tensor([rank]), size - 1).item() == size - 1


def _adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Adasum by its definition."""
    if len(vectors) == 1:
        return vectors[0]
    odd = len(vectors) % 2
    pairs = [vectors[at : at + 2] for at in range(0, len(vectors) - odd, 2)]
    joined = []
    for one, other in pairs:
        dot = float(one @ other)
        first, second = float(one @ one), float(other @ other)
        of_one = 1 - dot / (2 * first) if first > 0 else 1.0
        of_other = 1 - dot / (2 * second) if second > 0 else 1.0
        joined.append(of_one * one + of_other * other)
    return _adasum(joined + vectors[len(vectors) - odd :])


@check
def adasum_is_what_it_is_by_definition() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        for count in (1, 2, 1001):
            everyone = [torch.from_numpy(np.random.default_rng(at).normal(size=count)).to(dtype) for at in range(size)]
            found = hvd.allreduce(everyone[rank], op=hvd.Adasum, name=f"{dtype}.{count}")
            wanted = _adasum([one.double().numpy() for one in everyone])
            assert found.dtype == dtype
            assert np.allclose(found.double().numpy(), wanted, rtol=close, atol=close)
    alike = hvd.allreduce(torch.full((4,), 3.0), op=hvd.Adasum)
    assert alike.tolist() == pytest.approx([3.0] * 4)
    apart = torch.zeros(size)
    apart[rank] = 2.0
    assert hvd.allreduce(apart, op=hvd.Adasum).tolist() == pytest.approx([2.0] * size)
    raises(ValueError, "floating-point", lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32), op=hvd.Adasum))
    pair = hvd.grouped_allreduce([torch.ones(3), torch.zeros(2)], op=hvd.Adasum)
    assert [one.tolist() for one in pair] == [pytest.approx([1.0] * 3), [0.0, 0.0]]


def _trained(optimizer: Any, model: torch.nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@check
def an_optimizer_of_a_set_leaves_others_alone() -> None:
    sets = halves()
    even = sets[0]
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    alone = torch.nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), process_set=even)
    found = _trained(optimizer, model, hvd.rank())
    by_itself = _trained(torch.optim.SGD(alone.parameters(), lr=0.01), alone, hvd.rank())
    everyone = hvd.allgather(found.reshape(1, -1))
    ranks = even.ranks or []
    assert all(torch.equal(everyone[rank], everyone[ranks[0]]) for rank in ranks)
    if not even.included():
        assert torch.equal(found, by_itself)
    elif len(ranks) > 1:
        assert not torch.equal(found, by_itself)
    forget(sets)


@check
def gradients_of_a_set_match_by_name() -> None:
    sets = halves()
    even = sets[0]
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    order = [a, b] if hvd.rank() == 0 else [b, a]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(order, lr=1.0), [("a", a), ("b", b)], process_set=even)
    for _ in range(2):
        optimizer.zero_grad()
        (a.sum() + 10 * b.sum()).backward()
        optimizer.step()
    assert (a.tolist(), b.tolist()) == ([-2.0, -2.0], [-20.0, -20.0])
    forget(sets)


@check
def steps_are_joined_by_adasum() -> None:
    size, rank = hvd.size(), hvd.rank()
    weights = [torch.nn.Parameter(torch.full((3,), 1.0)) for _ in range(2)]
    sgd = torch.optim.SGD(weights, lr=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Adasum)
    grads = [np.random.default_rng(at).normal(size=(2, 3)) for at in range(size)]
    optimizer.zero_grad()
    for weight, grad in zip(weights, grads[rank], strict=True):
        (weight * torch.from_numpy(grad).float()).sum().backward()
    optimizer.step()
    for index, weight in enumerate(weights):
        wanted = 1 + _adasum([-0.5 * each[index] for each in grads])
        assert np.allclose(weight.detach().numpy(), wanted, rtol=1e-5)
    raises(AssertionError, "Adasum", lambda: optimizer.skip_synchronize().__enter__())


def _sparse_training(kind: type[torch.optim.Optimizer], as_dense: bool) -> None:
    """Train a table with a layer on it, of which each rank looks up other rows; compare with all of it in one place."""

    def model() -> torch.nn.Sequential:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 2))

    def optimizers(of: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
        table, layer = list(of[0].parameters()), list(of[1].parameters())
        if kind is torch.optim.SparseAdam:
            return [kind(table, lr=0.1), torch.optim.SGD(layer, lr=0.1)]
        return [kind([*table, *layer], lr=0.1)]

    def loss(of: torch.nn.Sequential, step: int, rank: int) -> torch.Tensor:
        found: torch.Tensor = of(torch.tensor([rank, 7, 7, (rank + step) % 10])).square().sum()
        return found

    here, alone = model(), model()
    mine = [hvd.DistributedOptimizer(one, sparse_as_dense=as_dense) for one in optimizers(here)]
    reference = optimizers(alone)
    for step in range(4):
        for one in (*mine, *reference):
            one.zero_grad()
        loss(here, step, hvd.rank()).backward()
        (sum(loss(alone, step, rank) for rank in range(hvd.size())) / hvd.size()).backward()
        for one in (*mine, *reference):
            one.step()
        table, layer = here[0].weight, here[1].weight
        assert table.grad.is_sparse
        assert not layer.grad.is_sparse
        for found, wanted in zip(here.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(found, wanted, atol=1e-6)
    everyone = hvd.allgather(here[0].weight.detach().reshape(1, -1))
    assert all(torch.equal(row, everyone[0]) for row in everyone)


@check
def sparse_gradients_stay_sparse() -> None:
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam):
        for as_dense in (False, True):
            _sparse_training(kind, as_dense)


@check
def a_table_that_a_rank_does_not_look_into_counts_all_the_same() -> None:
    for kind in (torch.optim.SGD, torch.optim.SparseAdam):
        table = torch.nn.Embedding(5, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(kind(list(table.parameters()), lr=1.0), op=hvd.Sum)
        for step in range(3):
            optimizer.zero_grad()
            if step == 0 or hvd.rank() == 0:
                table(torch.tensor([step])).sum().backward()
            optimizer.step()
        moved = table.weight[:, 0] != 0
        assert moved.tolist() == [True] * 3 + [False] * 2
        if kind is torch.optim.SGD:
            assert table.weight[:, 0].tolist() == [-float(hvd.size()), -1.0, -1.0, 0.0, 0.0]


@check
def sparse_gradients_add_up_over_passes() -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Sum, backward_passes_per_step=2
    )
    for _ in range(3):
        optimizer.zero_grad()
        for row in range(2):
            table(torch.tensor([row, 4])).sum().backward()
        optimizer.step()
    size = float(hvd.size())
    assert table.weight[:, 0].tolist() == [-3 * size, -3 * size, 0.0, 0.0, -6 * size]


@check
def a_set_is_not_held_up_by_others() -> None:
    sets = halves()
    odd = sets[1]
    if hvd.rank() == 0:
        hvd.allreduce_async(torch.ones(1), name="late")  # of all: the others come when the odd ranks are through
    if odd.included():
        for _ in itertools.repeat(None, 5):
            hvd.barrier(process_set=odd)
    hvd.barrier()
    if hvd.rank() != 0:
        hvd.allreduce(torch.ones(1), name="late")
    forget(sets)


def main() -> None:
    hvd.init()
    run_named()
    hvd.shutdown()


if __name__ == "__main__":
    main()
