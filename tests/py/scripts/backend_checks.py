"""One rank of the checks of the backend "nb": runs the named ones and prints "ok NAME" after each.

The reference is gloo, in a group of the same ranks in the same process.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from named_checks import check, run_named

import netbottleneck
import netbottleneck.torch

# Torch's later names, and its earlier ones.
gather_whole = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_whole = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

TYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZES = (1, 7, 1000, 70_000)


def raises(kind: type[BaseException], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


class Both:
    """A group of nb and one of gloo, of the same ranks."""

    def __init__(self) -> None:
        self._gloo: Any = None

    def __iter__(self) -> Any:
        self._gloo = self._gloo or dist.new_group(backend="gloo")
        yield from (None, self._gloo)


BOTH = Both()


def same(work: Callable[[Any], Any]) -> Any:
    """Return the result of `work` for nb; it must equal that for gloo."""
    ours, theirs = (work(group) for group in BOTH)
    assert flat(ours) == flat(theirs), (ours, theirs)
    return ours


def flat(value: Any) -> Any:
    """Return tensors in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.is_sparse else value
        return (str(value.dtype), list(value.shape), dense.reshape(-1).tolist())
    return [flat(one) for one in value] if isinstance(value, list | tuple) else value


def numbers(count: int, dtype: torch.dtype = torch.float32, of: int | None = None) -> torch.Tensor:
    """Return small integers, different on each rank."""
    seed = rank() if of is None else of
    return ((torch.arange(count) * (seed + 3) + seed) % 5).to(dtype)


@check
def it_is_known_by_its_name() -> None:
    assert dist.get_backend() == os.environ.get("CHECKED_BACKEND", "nb")
    world = dist.group.WORLD
    assert world is not None
    assert (world.rank(), world.size(), world.name()) == (rank(), size(), "nb")
    assert [device.type for device in world._device_types] == (
        ["cpu"] if ":" in dist.get_backend() else ["cpu", "cuda"]
    )
    assert dist.get_process_group_ranks(world) == list(range(size()))
    assert "nb" in repr(world)


@check
def reductions_are_gloos() -> None:
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    bits = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
    for dtype in TYPES:
        whole = not dtype.is_floating_point
        for op in (*ops, *(bits if whole and dtype != torch.int8 else ())):
            for count in SIZES if op == dist.ReduceOp.SUM else SIZES[:2]:

                def reduced(group: Any, op: Any = op, count: int = count, dtype: torch.dtype = dtype) -> torch.Tensor:
                    given = numbers(count, dtype)
                    assert dist.all_reduce(given, op, group=group) is None
                    return given

                same(reduced)


@check
def what_gloo_cannot_reduce() -> None:
    parts = [numbers(9, torch.int32, other) for other in range(size())]
    mean = parts[rank()].double()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert torch.allclose(mean, sum(part.double() for part in parts) / size(), rtol=1e-15)  # type: ignore[union-attr]
    wide = torch.tensor([2**60 + 3, 0], dtype=torch.int64) // size()
    wide[1] = -1 if rank() == 0 else -2 * size()
    wanted = [wide[0].item(), -((2 * size() * (size() - 1) + 1) // size())]
    into = torch.zeros(2, dtype=torch.int64)
    dist.reduce_scatter(into, [wide] * size(), dist.ReduceOp.AVG)
    dist.all_reduce(wide, dist.ReduceOp.AVG)
    assert wide.tolist() == into.tolist() == wanted
    narrow = parts[rank()].to(torch.int16)
    dist.all_reduce(narrow)
    assert narrow.tolist() == sum(parts).tolist()  # type: ignore[union-attr]
    flags = parts[rank()] > 1
    dist.all_reduce(flags, dist.ReduceOp.BAND)
    assert flags.tolist() == [all(column) for column in zip(*[(part > 1).tolist() for part in parts], strict=True)]
    turned = torch.complex(parts[rank()].float(), torch.ones(9))
    dist.all_reduce(turned)
    assert turned.tolist() == torch.complex(sum(parts).float(), torch.full((9,), float(size()))).tolist()  # type: ignore[union-attr]
    bits = torch.zeros(3, dtype=torch.int16)
    dist.reduce_scatter(bits, [numbers(3, torch.int16) * (at + 1) for at in range(size())], dist.ReduceOp.BOR)
    expected = torch.zeros(3, dtype=torch.int16)
    for other in range(size()):
        expected |= numbers(3, torch.int16, other) * (rank() + 1)
    assert bits.tolist() == expected.tolist()
    raises(NotImplementedError, "PREMUL_SUM", lambda: dist.all_reduce(mean, dist._make_nccl_premul_sum(2.0)))
    for dtype, op in (
        (torch.bool, dist.ReduceOp.AVG),
        (torch.uint16, dist.ReduceOp.SUM),
        (torch.float8_e5m2, dist.ReduceOp.MAX),
        (torch.float32, dist.ReduceOp.BOR),
    ):
        some, part = torch.ones(size()).to(dtype), torch.ones(1).to(dtype)
        raises(ValueError, f"of {dtype} is not supported", lambda: dist.all_reduce(some, op))  # noqa: B023
        raises(ValueError, f"of {dtype} is not", lambda: scatter_whole(part, some, op))  # noqa: B023
    raises(ValueError, "complex", lambda: dist.all_reduce(turned, dist.ReduceOp.MAX))


@check
def a_reduction_to_one_is_gloos() -> None:
    for root in range(size()):

        def reduced(group: Any, root: int = root) -> Any:
            given = numbers(40)
            dist.reduce(given, root, group=group)
            return given if rank() == root else None

        same(reduced)


@check
def sparse_sums_are_gloos() -> None:
    def reduced(group: Any) -> torch.Tensor:
        places = torch.tensor([[rank(), 7, rank() + 1]])
        given = torch.sparse_coo_tensor(places, torch.ones(3, 2) * (rank() + 1), (9, 2), check_invariants=True)
        given = given.coalesce()
        work = dist.all_reduce(given, group=group, async_op=True)
        assert work is not None
        work.wait()
        return given

    same(reduced)


@check
def tensors_are_moved_as_gloo_moves_them() -> None:
    for dtype in (*TYPES, torch.complex64):

        def moved(group: Any, dtype: torch.dtype = dtype) -> Any:
            given = numbers(6, dtype).reshape(3, 2)
            parts = [torch.zeros(3, 2, dtype=dtype) for _ in range(size())]
            dist.all_gather(parts, given, group=group)
            spread = given.clone()
            dist.broadcast(spread, size() - 1, group=group)
            return parts, spread

        same(moved)
    for dtype in (torch.int16, torch.bool, torch.float8_e4m3fn):
        parts = [torch.zeros(4).to(dtype) for _ in range(size())]
        dist.all_gather(parts, numbers(4, dtype))
        assert [part.float().tolist() for part in parts] == [
            numbers(4, dtype, other).float().tolist() for other in range(size())
        ]


@check
def gathers_and_scatters_are_gloos() -> None:
    for root in range(size()):

        def moved(group: Any, root: int = root) -> Any:
            mine = numbers(5)
            parts = [torch.zeros(5) for _ in range(size())] if rank() == root else None
            dist.gather(mine, parts, root, group=group)
            given = [numbers(4) + at for at in range(size())] if rank() == root else None
            into = torch.zeros(4)
            dist.scatter(into, given, root, group=group)
            return parts, into

        same(moved)


@check
def whole_tensors_are_gathered_and_scattered_as_by_gloo() -> None:
    for count in SIZES:

        def moved(group: Any, count: int = count) -> Any:
            line = torch.zeros(size() * count)
            gather_whole(line, numbers(count), group=group)
            given = numbers(size() * count)
            kept = given.clone()
            into = torch.zeros(count)
            scatter_whole(into, given, group=group)
            assert torch.equal(given, kept)
            listed = torch.zeros(count)
            dist.reduce_scatter(listed, list(given.split(count)), group=group)
            assert torch.equal(given, kept)
            return line, into, listed

        same(moved)
    unequal = [torch.ones(2 + at) for at in range(size())]
    with pytest.raises(ValueError, match="reduce_scatter: tensors of one size"):
        dist.reduce_scatter(torch.empty(2 + size()), unequal)
    with pytest.raises(ValueError, match="all_to_all_single: tensors of one size"):
        dist.all_to_all_single(torch.empty(2 * size()), torch.ones(size()))
    line = torch.zeros(size() * 3)
    line[3 * rank() : 3 * rank() + 3] = rank() + 1
    gather_whole(line, line[3 * rank() : 3 * rank() + 3])
    assert line.tolist() == [float(other + 1) for other in range(size()) for _ in range(3)]
    mean = torch.zeros(2)
    scatter_whole(mean, torch.ones(2 * size()) * (rank() + 1), dist.ReduceOp.AVG)
    assert mean.tolist() == [(size() + 1) / 2] * 2


@check
def exchanges_are_gloos() -> None:
    def even(group: Any) -> torch.Tensor:
        into = torch.zeros(2 * size(), 3)
        dist.all_to_all_single(into, numbers(6 * size()).reshape(2 * size(), 3), group=group)
        return into

    def uneven(group: Any) -> torch.Tensor:
        out = [(rank() + other) % 3 for other in range(size())]
        came = [(other + rank()) % 3 for other in range(size())]
        into = torch.zeros(sum(came), 2)
        dist.all_to_all_single(into, numbers(2 * sum(out)).reshape(sum(out), 2), came, out, group=group)
        return into

    same(even)
    same(uneven)
    into = [torch.zeros(other + 1) for _ in range(1) for other in range(size())]
    dist.all_to_all(into, [torch.full((rank() + 1,), float(10 * rank() + other)) for other in range(size())])
    assert [part.tolist() for part in into] == [[10.0 * other + rank()] * (other + 1) for other in range(size())]


@check
def objects_are_gloos() -> None:
    def moved(group: Any) -> Any:
        mine = {"rank": rank(), "more": "x" * 1000 * rank()}
        everybody: list[Any] = [None] * size()
        dist.all_gather_object(everybody, mine, group=group)
        spread = [mine, rank()] if rank() == 0 else [None, None]
        dist.broadcast_object_list(spread, 0, group=group)
        at_root: list[Any] | None = [None] * size() if rank() == size() - 1 else None
        dist.gather_object(mine, at_root, size() - 1, group=group)
        part: list[Any] = [None]
        dist.scatter_object_list(part, [("for", other) for other in range(size())], 0, group=group)
        return everybody, spread, at_root, part

    same(moved)
    if size() > 1 and rank() < 2:
        given = ["a", {"b": 1}] if rank() == 0 else [None, None]
        (dist.send_object_list if rank() == 0 else dist.recv_object_list)(given, 1 - rank())
        assert given == ["a", {"b": 1}]


@check
def messages_come_in_order_of_their_tags() -> None:
    after, before = (rank() + 1) % size(), (rank() - 1) % size()
    if size() == 1:
        raises(ValueError, "another rank of the group", lambda: dist.isend(torch.ones(1), 0))
        return
    # More at the same time than there are names for.
    count = 40
    out = [torch.full((at % 7,), float(100 * rank() + at)) for at in range(count)]
    sent = [dist.isend(tensor, after, tag=at % 2) for at, tensor in enumerate(out)]
    came = [torch.zeros(at % 7) for at in range(count)]
    received = [dist.irecv(came[at], before, tag=at % 2) for at in (*range(1, count, 2), *range(0, count, 2))]
    for work in (*reversed(received), *sent):
        assert work is not None
        assert work.wait()
    assert [part.tolist() for part in came] == [[float(100 * before + at)] * (at % 7) for at in range(count)]
    value = torch.tensor([float(rank())])
    if rank() == 0:
        dist.send(value, 1)
        assert dist.recv(value, size() - 1) == size() - 1
    else:
        dist.recv(value, before)
        value += rank()
        dist.send(value, after)
    assert value.item() == (sum(range(size())) if rank() == 0 else sum(range(rank() + 1)))
    ring = torch.zeros(5)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, numbers(5), after), dist.P2POp(dist.irecv, ring, before)])
    for work in works:
        work.wait()
    assert ring.tolist() == numbers(5, of=before).tolist()
    raises(NotImplementedError, "name the source", lambda: dist.recv(ring))


@check
def operations_go_on_side_by_side() -> None:
    # More at the same time than there are names for, waited for in another order, on some ranks not at once.
    tensors = [torch.full((64,), float(rank() + at)) for at in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if rank() % 2:
        dist.barrier()
    for work in reversed(works):
        assert work is not None
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    if not rank() % 2:
        dist.barrier()
    total = sum(range(size()))
    assert [tensor[0].item() for tensor in tensors] == [float(total + size() * at) for at in range(50)]
    same_again = torch.ones(3)
    for _ in range(100):
        dist.all_reduce(same_again, dist.ReduceOp.AVG)
    assert same_again.tolist() == [1.0] * 3


@check
def negated_views_have_their_values() -> None:
    def negated(value: float) -> torch.Tensor:
        made = torch.full((2,), -value if rank() == 0 else value)
        return torch._neg_view(made) if rank() == 0 else made

    total = negated(rank() + 1.0)
    dist.all_reduce(total)
    assert total.tolist() == [float(sum(range(size() + 1)))] * 2
    first = negated(rank() + 1.0)
    dist.broadcast(first, 0)
    assert first.tolist() == [1.0, 1.0]
    found = [negated(-1.0) for _ in range(size())]
    dist.all_gather(found, negated(float(rank())))
    assert [one.tolist() for one in found] == [[float(at)] * 2 for at in range(size())]


@check
def operations_of_different_sizes_begin_in_any_order() -> None:
    tensors = [torch.full((size,), float(rank())) for size in (172_032, 37)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (tensors if rank() else tensors[::-1])]
    for work in works:
        assert work is not None
        work.wait()
    assert all(torch.equal(tensor, torch.full_like(tensor, sum(range(size())))) for tensor in tensors)


@check
def futures_hold_what_was_written() -> None:
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future = work.get_future()
    assert future.then(lambda done: done.value()[0] * 2).wait().tolist() == [2.0 * size()] * 4
    assert work.get_future() is future
    assert work.result()[0] is tensor

    # A callback may wait for another operation's future.
    def again(_: Any) -> torch.Tensor:
        inner = dist.all_reduce(torch.ones(2), async_op=True)
        assert inner is not None
        result: torch.Tensor = inner.get_future().wait()[0]
        return result

    first = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    assert first is not None
    assert first.get_future().then(again).wait().tolist() == [float(size())] * 2
    works = [dist.all_reduce(torch.ones(8), async_op=True) for _ in range(40)]
    all_of_them = torch.futures.collect_all([work.get_future() for work in works if work is not None]).wait()
    assert [done.value()[0][0].item() for done in all_of_them] == [float(size())] * 40


@check
def a_callback_may_wait_for_an_earlier_future() -> None:
    # The last rank starts each sum late: the callback runs in the thread that completes futures, and then waits.
    store = dist.distributed_c10d._get_default_store()
    others = range(size() - 1)
    is_late = rank() not in others
    waited = threading.Event()

    def wait_for_second(_: Any) -> None:
        store.set(f"called {rank()}", "1")
        second.get_future().wait()
        waited.set()

    def started(*late_after: str) -> Any:
        if is_late and late_after:
            store.wait(list(late_after), timedelta(seconds=60))
        return dist.all_reduce(torch.ones(8), async_op=True)

    first = started(*(f"ready {other}" for other in others))
    second = started(*(f"called {other}" for other in others))
    assert second.get_future() is not None
    first.get_future().then(wait_for_second)
    store.set(f"ready {rank()}", "1")
    assert waited.wait(60)


@check
def groups_overlap() -> None:
    n = size()
    even = dist.new_group(list(range(0, n, 2)))
    late = dist.new_group(list(range(n // 2, n)))
    turned = dist.new_group(list(reversed(range(n))), sort_ranks=False) if "sort_ranks" in new_group_takes() else None
    everybody = dist.new_group()
    groups = [group for group in (even, late, everybody) if group != dist.GroupMember.NON_GROUP_MEMBER]
    # Each rank begins them in a different order.
    values = {}
    for at in range(len(groups)):
        group = groups[(at + rank()) % len(groups)]
        values[group] = torch.full((5,), float(rank() + 1))
        values[group, "work"] = dist.all_reduce(values[group], group=group, async_op=True)
    for group in groups:
        values[group, "work"].wait()
        members = dist.get_process_group_ranks(group)
        assert values[group].tolist() == [float(sum(members) + len(members))] * 5
        parts = [torch.zeros(2) for _ in members]
        dist.all_gather(parts, torch.full((2,), float(rank())), group=group)
        assert [part[0].item() for part in parts] == [float(other) for other in members]
        spread = torch.tensor([float(rank())])
        dist.broadcast(spread, members[-1], group=group)
        assert spread.item() == members[-1]
    if turned is not None:
        check_turned(turned)
    for group in groups:
        dist.destroy_process_group(group)
    dist.barrier()


def new_group_takes() -> Sequence[str]:
    return dist.distributed_c10d._new_group_with_tag.__code__.co_varnames


def check_turned(group: Any) -> None:
    """A group with descending ranks."""
    assert dist.get_group_rank(group, rank()) == size() - 1 - rank()
    line = torch.zeros(size())
    gather_whole(line, torch.tensor([float(rank())]), group=group)
    assert line.tolist() == [float(other) for other in reversed(range(size()))]
    into = torch.zeros(1)
    scatter_whole(into, torch.arange(float(size())), group=group)
    assert into.item() == size() * (size() - 1 - rank())
    came = torch.zeros(size())
    dist.all_to_all_single(came, torch.arange(float(size())) + 10 * rank(), group=group)
    assert came.tolist() == [10.0 * other + size() - 1 - rank() for other in reversed(range(size()))]
    spread = torch.tensor([float(rank())])
    dist.broadcast(spread, 0, group=group)
    assert spread.item() == 0
    dist.destroy_process_group(group)


@check
def a_destroyed_group_can_be_created_again() -> None:
    members = list(range(min(2, size())))
    for _ in range(10 if rank() in members else 0):
        group = dist.new_group(members, timeout=timedelta(seconds=20), **alone())
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == len(members)
        dist.destroy_process_group(group)


@check
def tensors_of_other_shapes() -> None:
    wide = torch.arange(12.0).reshape(3, 4) + rank()
    expected = sum(torch.arange(12.0).reshape(3, 4).t() + other for other in range(size()))
    turned = wide.t()
    dist.all_reduce(turned)
    assert torch.equal(turned, expected)  # type: ignore[arg-type]
    columns = torch.zeros(4, size() * 2)
    dist.all_gather(list(columns.split(2, 1)), torch.full((4, 2), float(rank())))
    assert columns[0].tolist() == [float(other) for other in range(size()) for _ in range(2)]
    nothing = torch.zeros(0)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather([torch.zeros(0) for _ in range(size())], nothing)
    weight = torch.ones(3, requires_grad=True)
    dist.all_reduce(weight)
    assert weight.tolist() == [float(size())] * 3
    with dist._coalescing_manager():
        several = [torch.full((at + 1,), float(rank())) for at in range(3)]
        for one in several:
            dist.all_reduce(one)
    assert [one[0].item() for one in several] == [float(sum(range(size())))] * 3


@check
def the_names_of_earlier_torch_work() -> None:
    group: Any = dist.group.WORLD
    lines, mine = torch.zeros(2, size()), torch.tensor([float(rank())])
    group._allgather_base(lines[0], mine).wait()
    group.allgather_into_tensor_coalesced([lines[1]], [mine]).wait()
    assert lines.tolist() == [[float(other) for other in range(size())]] * 2
    sums, parts = torch.zeros(2, 1), torch.arange(float(size()))
    group._reduce_scatter_base(sums[0], parts).wait()
    group.reduce_scatter_tensor_coalesced([sums[1]], [parts]).wait()
    assert sums.tolist() == [[float(size() * rank())]] * 2
    came = torch.zeros(size())
    group.alltoall_base(came, parts + 10 * rank(), [], []).wait()
    assert came.tolist() == [10.0 * other + rank() for other in range(size())]


@check
def wrong_calls_raise() -> None:
    group: Any = dist.group.WORLD
    meta = torch.ones(2, device="meta")
    raises(ValueError, 'init_process_group("cpu:nb,meta:', lambda: dist.all_reduce(meta))
    raises(ValueError, "size and type", lambda: dist.all_gather([torch.ones(3)] * size(), torch.ones(2)))
    parts = [torch.ones(2)] * (size() + 1)
    said = f"{size() + 1} tensors for {size()} ranks"
    raises(ValueError, said, lambda: dist.all_gather(parts, torch.ones(2)))
    raises(ValueError, said, lambda: dist.all_to_all(parts, parts))
    raises(ValueError, f"9 is not a rank of a group of {size()}", lambda: dist.broadcast(parts[0], 9))
    raises(ValueError, "not 1 times" if size() == 1 else "times", lambda: odd_whole(group))
    raises(ValueError, "monitored_barrier is only", dist.monitored_barrier)
    raises(NotImplementedError, "names the missing ranks", group.monitored_barrier)
    raises(NotImplementedError, "device_ids", lambda: dist.barrier(device_ids=[0]))
    raises(NotImplementedError, "new_group()", lambda: group.split_group([0]))
    raises(ValueError, "takes no pg_options", lambda: dist.new_group([rank()], pg_options=object(), **alone()))
    dist.barrier()


def alone() -> dict[str, Any]:
    return {"use_local_synchronization": True}


def odd_whole(group: Any) -> None:
    gather_whole(torch.zeros(3 * size() + 1), torch.ones(3))


@check
def a_timeout_names_who_is_missing() -> None:
    if size() == 1:
        return
    late = size() - 1
    group = dist.new_group(timeout=timedelta(seconds=10))
    dist.barrier(group)
    if rank() == late:
        store = dist.distributed_c10d._get_default_store()
        store.wait([f"arrived {other}" for other in range(late)], timedelta(seconds=100))
    else:
        with pytest.raises(netbottleneck.DeadlineError, match=f"missing: rank {late}$") as caught:
            dist.all_reduce(torch.ones(2), group=group)
        assert caught.value.peer == late
        assert isinstance(caught.value, RuntimeError)
        dist.distributed_c10d._get_default_store().set(f"arrived {rank()}", "1")
    # Others that come later still find it, and the group works on.
    dist.all_reduce(torch.ones(2), group=group) if rank() == late else None
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    assert value.item() == size()


@check
def any_number_of_equal_tensors_is_reduced_together() -> None:
    flags = [torch.tensor([rank() == 0]) for _ in range(40)]
    dist.all_reduce_coalesced(flags)
    assert all(flag.item() for flag in flags)
    parts = [torch.full((2,), float(rank())) for _ in range(40)]
    world: Any = dist.group.WORLD
    wholes = [torch.zeros(2 * size()) for _ in parts]
    world.allgather_into_tensor_coalesced(wholes, parts).wait()
    assert [whole.tolist() for whole in wholes] == [[float(other) for other in range(size()) for _ in range(2)]] * 40


@check
def tensors_of_inference_mode_may_be_awaited_outside_it() -> None:
    with torch.inference_mode():
        flags = torch.tensor([rank() == 0, False])
        parts = [torch.zeros(3, 4)[:, :2] for _ in range(size())]
        works = [
            dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True),
            dist.all_gather(parts, torch.full((3, 2), float(rank())), async_op=True),
        ]
    for work in works:
        assert work is not None
        work.get_future().wait()
    assert flags.tolist() == [True, False]
    assert [part[0, 0].item() for part in parts] == list(range(size()))
    average = torch.full((2,), 3, dtype=torch.int32)
    with torch.inference_mode():
        inside = average.clone()
    dist.all_reduce(inside, dist.ReduceOp.AVG)
    assert inside.tolist() == [3, 3]


@check
def a_future_fails_at_the_timeout() -> None:
    if size() == 1:
        return
    late = size() - 1
    group = dist.new_group(timeout=timedelta(seconds=3))
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank() == late:
        store.wait([f"gave up {other}" for other in range(late)], timedelta(seconds=100))
        dist.all_reduce(torch.ones(2), group=group)
    else:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        with pytest.raises(Exception, match=f"after 3 s; missing: rank {late}"):
            work.get_future().wait()
        store.set(f"gave up {rank()}", "1")
        assert work.wait(timedelta(seconds=60))
    dist.barrier()


def main() -> None:
    dist.init_process_group(os.environ.get("CHECKED_BACKEND", "nb"), timeout=timedelta(seconds=60))
    run_named()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
