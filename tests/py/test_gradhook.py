"""The gradient hook backend on real torch models. Two ranks are two threads of this process."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RANKS_LIMIT_S
from torch import nn

from netbottleneck import _core, errors
from netbottleneck.torch.gradients import OnAccumulated

SECRET = b"sixteen bytes..."
LIMIT_S = RANKS_LIMIT_S
SMALL, LARGE = 1 << 40, 0  # direct_bytes: every gradient is small, or large
# direct_bytes: a gradient that is copied and copied back, and one that travels from its own memory
WAYS = [pytest.param(SMALL, id="copied"), pytest.param(LARGE, id="direct")]


class Plan:
    """The parameters of a model in buckets, with arena, views and a GradHook on every parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], buckets: int = 2, **options: Any) -> None:
        self.parameters = list(parameters)
        count = len(self.parameters)
        self.bucket_of = [i * buckets // count for i in range(count)]
        self.offset, sizes = [], [0] * buckets
        for parameter, bucket in zip(self.parameters, self.bucket_of, strict=True):
            self.offset.append(sizes[bucket])
            sizes[bucket] += (parameter.nbytes + 63) // 64 * 64
        self.starts = [sum(sizes[:b]) for b in range(buckets)]
        self.arena = _core.Arena(sum(sizes))
        self.views = [
            torch.frombuffer(self.arena, dtype=torch.float32, count=p.numel(), offset=self.starts[b] + o).view(p.shape)
            if p.numel() > 0
            else torch.empty(0)
            for p, b, o in zip(self.parameters, self.bucket_of, self.offset, strict=True)
        ]
        self.buckets = [
            (f"bucket{b}", _core.FLOAT32, self.arena.address + self.starts[b], sizes[b], -b) for b in range(buckets)
        ]
        options.setdefault("direct_bytes", SMALL)
        self.hook = _core.GradHook(
            self.parameters, self.views, self.bucket_of, self.offset, self.buckets, keep=self.arena, **options
        )
        self.handles = [OnAccumulated(parameter, self.hook.hook(i)) for i, parameter in enumerate(self.parameters)]

    def finish(self) -> None:
        self.hook.flush()
        self.hook.wait()

    def grads(self) -> list[list[float]]:
        return [p.grad.flatten().tolist() if p.grad is not None else [] for p in self.parameters]


class Sink:
    """A callable target that records its calls, adds 1 to the bucket when it is waited for, and may fail."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.waited: list[int] = []
        self.fail: Exception | None = None
        self.plan: Plan | None = None
        self.memory: list[list[float]] = []

    def __call__(self, bucket: int) -> Sink.Future:
        self.seen.append(bucket)
        if self.plan is not None:
            members = [i for i, b in enumerate(self.plan.bucket_of) if b == bucket]
            self.memory.append([self.plan.views[i].sum().item() for i in members])
        return Sink.Future(self, bucket)

    class Future:
        def __init__(self, sink: Sink, bucket: int) -> None:
            self.sink, self.bucket = sink, bucket

        def wait(self) -> None:
            self.sink.waited.append(self.bucket)
            if self.sink.fail is not None:
                raise self.sink.fail


class Doubling:
    """A callable target that simulates two equal ranks: doubles each view of a bucket when it is waited for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, bucket: int) -> Doubling.Future:
        return Doubling.Future([v for v, b in zip(self.plan.views, self.plan.bucket_of, strict=True) if b == bucket])

    class Future:
        def __init__(self, views: list[torch.Tensor]) -> None:
            self.views = views

        def wait(self) -> None:
            for view in self.views:
                view.mul_(2)


def chain(count: int, size: int = 4) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.full((4,), float(i + 1))) for i in range(count)])


def weighted_sum(parameters: Iterable[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """Return a loss with gradient factor × (i + 1) for parameter i."""
    return sum(((i + 1) * factor * p).sum() for i, p in enumerate(parameters))  # type: ignore[return-value]


@pytest.fixture
def alone() -> Iterable[_core.Comm]:
    comm = _core.Comm(0, 1, secret=b"")
    yield comm
    comm.close()


def on_two_ranks(work: Callable[[_core.Comm], Any]) -> list[Any]:
    """Run work on two ranks concurrently and return the results; the first exception is raised."""
    listener = _core.Listener(ifname="lo")
    results: list[Any] = [None, None]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        door: dict[str, Any] = {"listener": listener} if rank == 0 else {"address": listener.address}
        try:
            comm = _core.Comm(rank, 2, secret=SECRET, ifname="lo", streams=2, timeout_s=LIMIT_S, **door)
            try:
                results[rank] = work(comm)
                comm.exchange(b"done")
            finally:
                comm.close()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    listener.close()
    if failures:
        raise failures[0]
    return results


# where gradients lie


def test_a_small_gradient_keeps_its_memory_and_gets_the_sum(alone: _core.Comm) -> None:
    plan = Plan(chain(4))
    plan.hook.target(alone, postscale=0.5)
    weighted_sum(plan.parameters).backward()
    before = [parameter.grad for parameter in plan.parameters]
    assert plan.hook.pending == 2
    assert plan.grads() == [[float(i + 1)] * 4 for i in range(4)]
    plan.finish()
    assert plan.hook.pending == 0
    assert [parameter.grad is grad for parameter, grad in zip(plan.parameters, before, strict=True)] == [True] * 4
    assert plan.grads() == [view.tolist() for view in plan.views] == [[0.5 * (i + 1)] * 4 for i in range(4)]


def test_a_large_gradient_is_reduced_in_autograds_memory(alone: _core.Comm) -> None:
    plan = Plan(chain(4), direct_bytes=LARGE)
    plan.hook.target(alone, prescale=2.0)
    weighted_sum(plan.parameters).backward()
    before = [parameter.grad for parameter in plan.parameters]
    plan.finish()
    assert [parameter.grad is grad for parameter, grad in zip(plan.parameters, before, strict=True)] == [True] * 4
    assert plan.grads() == [[2.0 * (i + 1)] * 4 for i in range(4)]
    assert [view.abs().sum().item() for view in plan.views] == [0.0] * 4


def test_the_size_decides_between_copy_and_direct(alone: _core.Comm) -> None:
    plan = Plan([nn.Parameter(torch.ones(n)) for n in (255, 256, 257, 3)], 1, direct_bytes=1024)
    plan.hook.target(alone, postscale=3.0)
    weighted_sum(plan.parameters).backward()
    before = [parameter.grad for parameter in plan.parameters]
    plan.finish()
    assert [parameter.grad is grad for parameter, grad in zip(plan.parameters, before, strict=True)] == [True] * 4
    assert [view.any().item() for view in plan.views] == [True, False, False, True]
    assert [set(grad) for grad in plan.grads()] == [{3.0 * (i + 1)} for i in range(4)]


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(8, 4), (3, 8)),
    (lambda: nn.Conv2d(2, 3, 2), (1, 2, 4, 4)),
    (lambda: nn.LayerNorm(8), (3, 8)),
    (lambda: nn.BatchNorm1d(8), (3, 8)),
    (lambda: nn.GRU(4, 4), (3, 4)),
]


@pytest.mark.parametrize("again", [False, True], ids=["new", "added"])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=["linear", "conv", "layer-norm", "batch-norm", "gru"])
def test_gradients_of_common_layers_are_reduced_in_place(
    alone: _core.Comm, layer: Callable[[], nn.Module], shape: tuple[int, ...], again: bool
) -> None:
    made = layer()
    plan = Plan(made.parameters(), buckets=1, direct_bytes=LARGE)
    plan.hook.target(alone, postscale=2.0)
    for _ in range(1 + again):
        out = made(torch.ones(shape))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        plan.finish()
    assert not any(view.any() for view in plan.views)


def test_more_direct_gradients_than_segments_of_an_operation(alone: _core.Comm) -> None:
    plan = Plan(chain(600), buckets=1, direct_bytes=LARGE)
    plan.hook.target(alone, postscale=2.0)
    weighted_sum(plan.parameters).backward()
    plan.finish()
    direct = sum(not view.any() for view in plan.views)
    assert 0 < direct < 600
    assert plan.grads() == [[2.0 * (i + 1)] * 4 for i in range(600)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("direct_bytes", WAYS)
def test_zero_grad_of_either_kind(alone: _core.Comm, set_to_none: bool, direct_bytes: int) -> None:
    plan = Plan(chain(5), direct_bytes=direct_bytes)
    optimizer = torch.optim.SGD(plan.parameters, lr=1.0)
    plan.hook.target(alone)
    for step in range(1, 4):
        optimizer.zero_grad(set_to_none=set_to_none)
        weighted_sum(plan.parameters, step).backward()
        plan.finish()
        assert plan.grads() == [[float(step * (i + 1))] * 4 for i in range(5)]
        optimizer.step()
    assert [p[0].item() for p in plan.parameters] == [(i + 1) * (1.0 - 6) for i in range(5)]


def test_a_gradient_that_is_not_contiguous_keeps_its_layout(alone: _core.Comm) -> None:
    weight = nn.Parameter(torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last))
    plan = Plan([weight], buckets=1, direct_bytes=LARGE)
    plan.hook.target(alone, postscale=2.0)
    factor = torch.arange(24.0).view(2, 3, 2, 2)
    (weight * factor).sum().backward()
    gradient = weight.grad
    plan.finish()
    assert weight.grad is gradient
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight.grad, 2 * factor)
    assert torch.equal(plan.views[0], 2 * factor)


def test_a_graph_of_the_gradient_does_not_reach_the_view(alone: _core.Comm) -> None:
    plan = Plan(chain(1), buckets=1)
    plan.hook.target(alone)
    (plan.parameters[0] ** 2).sum().backward(create_graph=True)
    plan.finish()
    assert plan.grads() == [plan.views[0].tolist()] == [[2.0] * 4]
    assert not plan.views[0].requires_grad


def test_a_sparse_gradient_is_sent_dense_stays_sparse_and_is_reported(alone: _core.Comm) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    plan = Plan([nn.Parameter(torch.ones(3)), *table.parameters()], buckets=1)
    plan.hook.target(alone, postscale=2.0)
    assert plan.hook.sparse() == []
    (table(torch.tensor([1, 1, 3])).sum() + plan.parameters[0].sum()).backward()
    gradient = table.weight.grad
    plan.finish()
    assert plan.hook.sparse() == [1]
    assert plan.views[1].tolist() == [[0.0, 0.0], [4.0, 4.0], [0.0, 0.0], [2.0, 2.0]]
    assert table.weight.grad is gradient
    assert gradient.is_sparse
    assert gradient.coalesce().indices().tolist() == [[1, 3]]
    assert gradient.to_dense().tolist() == plan.views[1].tolist()


def test_an_empty_parameter_counts(alone: _core.Comm) -> None:
    plan = Plan([nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(3))], buckets=1)
    plan.hook.target(alone)
    weighted_sum(plan.parameters).backward()
    assert plan.hook.pending == 1
    plan.finish()
    assert plan.grads() == [[], [2.0] * 3]


# which gradients there are


def test_unused_parameters_contribute_zeros_of_their_own(alone: _core.Comm) -> None:
    plan = Plan(chain(4))
    plan.views[3].fill_(99)
    plan.hook.target(alone)
    weighted_sum(plan.parameters[:3]).backward()
    assert plan.hook.pending == 1
    plan.finish()
    assert plan.grads()[3] == [0.0] * 4
    assert plan.parameters[3].grad.data_ptr() != plan.views[3].data_ptr()
    assert not plan.parameters[3].grad.requires_grad
    assert sorted(plan.hook.ready_order()) == [0, 1, 2]


def test_a_shared_parameter_is_one_gradient(alone: _core.Comm) -> None:
    shared = nn.Parameter(torch.ones(4))
    plan = Plan([shared, nn.Parameter(torch.ones(4))], buckets=1)
    plan.hook.target(alone)
    (shared.sum() + (2 * shared * plan.parameters[1]).sum()).backward()
    plan.finish()
    assert plan.grads() == [[3.0] * 4, [2.0] * 4]


def test_gradients_that_the_user_replaced_are_reduced(alone: _core.Comm) -> None:
    plan = Plan(chain(2), buckets=1)
    plan.hook.target(alone)
    plan.parameters[0].grad = torch.full((4,), 10.0)
    weighted_sum(plan.parameters).backward()
    plan.finish()
    assert plan.grads() == [[11.0] * 4, [2.0] * 4]
    plan.parameters[0].grad = torch.full((4,), 7.0)
    plan.parameters[1].grad = torch.full((4,), 8.0)
    plan.finish()
    assert plan.grads() == [[7.0] * 4, [8.0] * 4]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_gradient_that_is_replaced_in_flight_gets_the_sum_too(alone: _core.Comm, direct_bytes: int) -> None:
    plan = Plan(chain(2), buckets=1, direct_bytes=direct_bytes)
    plan.hook.target(alone, postscale=2.0)
    weighted_sum(plan.parameters).backward()
    first, mine = plan.parameters[0].grad, torch.full((4,), 9.0)
    kept = mine.view(2, 2)
    plan.parameters[0].grad = mine
    plan.hook.wait()
    assert plan.parameters[0].grad is mine
    assert plan.grads() == [first.tolist(), [4.0] * 4] == [[2.0] * 4, [4.0] * 4]
    assert mine.data_ptr() == first.data_ptr()  # Horovod's set_()
    assert kept.tolist() == [[9.0] * 2] * 2


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_gradient_that_is_deleted_in_flight_is_an_error(alone: _core.Comm, direct_bytes: int) -> None:
    plan = Plan(chain(3), buckets=1, direct_bytes=direct_bytes)
    plan.hook.target(alone, postscale=2.0)
    weighted_sum(plan.parameters).backward()
    plan.parameters[1].grad = None
    with pytest.raises(RuntimeError, match="gradient of parameter 1 was deleted while bucket bucket0 was on its way"):
        plan.hook.wait()
    assert plan.hook.pending == 0
    assert plan.grads() == [[2.0] * 4, [], [6.0] * 4]
    weighted_sum(plan.parameters).backward()
    plan.finish()
    assert plan.grads() == [[6.0] * 4, [4.0] * 4, [18.0] * 4]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_gradient_that_is_given_other_memory_gets_the_sum(direct_bytes: int) -> None:
    def train(comm: _core.Comm) -> list[Any]:
        plan = Plan(chain(2, 1 << 16), buckets=1, direct_bytes=direct_bytes)
        plan.hook.target(comm, postscale=0.5)
        for parameter in plan.parameters:  # after our own hook
            OnAccumulated(parameter, lambda *_, p=parameter: setattr(p.grad, "data", p.grad.data * 0.5))
        weighted_sum(plan.parameters, 2.0 * (comm.rank + 1)).backward()
        first = plan.parameters[0].grad
        others = [torch.full((1 << 16,), 777.0) for _ in range(8)]  # what was freed, if anything, is given out here
        plan.finish()
        assert plan.parameters[0].grad is first
        return [sorted(set(grad)) for grad in plan.grads()] + [sorted(set(each.tolist())) for each in others]

    first, second = on_two_ranks(train)
    assert first == second == [[3.0], [6.0]] + [[777.0]] * 8


def test_memory_that_a_gradient_no_longer_has_is_not_written() -> None:
    plan = Plan(chain(3), buckets=1)
    plan.hook.target(Doubling(plan))
    weighted_sum(plan.parameters).backward()
    old, grown, same = [parameter.grad for parameter in plan.parameters]
    seen, more = old.detach(), torch.full((4,), 9.0)
    old.data = more
    grown.resize_(1000).fill_(5)
    plan.hook.wait()
    assert seen.tolist() == [1.0] * 4
    assert more.tolist() == [9.0] * 4
    assert plan.grads() == [[2.0] * 4, [4.0] * 4, [6.0] * 4]
    assert plan.parameters[1].grad is grown
    assert plan.parameters[2].grad is same
    assert plan.views[0].data_ptr() != old.data_ptr()


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_gradient_is_held_until_it_has_its_sum_and_no_longer(alone: _core.Comm, direct_bytes: int) -> None:
    plan = Plan(chain(1), buckets=1, direct_bytes=direct_bytes)
    plan.hook.target(alone, postscale=2.0)
    weighted_sum(plan.parameters).backward()
    watch = weakref.ref(plan.parameters[0].grad)
    plan.parameters[0].grad = torch.zeros(4)
    gradient = watch()
    assert gradient is not None
    plan.hook.wait()
    assert gradient.tolist() == [2.0] * 4
    del gradient
    assert watch() is None


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_gradient_that_is_kept_never_changes(alone: _core.Comm, direct_bytes: int, set_to_none: bool) -> None:
    plan = Plan(chain(3), direct_bytes=direct_bytes)
    optimizer = torch.optim.SGD(plan.parameters)
    plan.hook.target(alone, postscale=2.0)
    kept: list[list[torch.Tensor]] = []
    for step in range(1, 4):
        weighted_sum(plan.parameters, step).backward()
        plan.finish()
        kept.append([parameter.grad.clone() if not set_to_none else parameter.grad for parameter in plan.parameters])
        optimizer.zero_grad(set_to_none=set_to_none)
        if not set_to_none:
            assert plan.grads() == [[0.0] * 4] * 3
    assert [[grad.tolist() for grad in each] for each in kept] == [
        [[2.0 * step * (i + 1)] * 4 for i in range(3)] for step in range(1, 4)
    ]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_two_parameters_with_one_gradient_get_its_last_sum(direct_bytes: int) -> None:
    def train(comm: _core.Comm) -> list[list[float]]:
        plan = Plan(chain(4), buckets=2, direct_bytes=direct_bytes)
        plan.hook.target(comm, postscale=0.5)
        first, _, _, last = plan.parameters
        for _ in range(2):
            first.grad = last.grad = torch.zeros(4)
            weighted_sum(plan.parameters, 2.0 * (comm.rank + 1)).backward()
            plan.finish()
            assert first.grad is last.grad
        return plan.grads()

    shared = [3.0 * (1 + 4)] * 4
    one, two = on_two_ranks(train)
    assert one == two == [shared, [2 * 3.0 * 2] * 4, [2 * 3.0 * 3] * 4, shared]


def test_overlapping_gradients_are_sent_separately(alone: _core.Comm) -> None:
    plan = Plan([nn.Parameter(torch.ones(n)) for n in (2, 6, 8)], buckets=3, direct_bytes=LARGE)
    plan.hook.target(alone, postscale=2.0)
    first, second, third = plan.parameters
    factor = torch.arange(8.0)
    ((torch.cat([first, second]) + third.view(2, 4).view(-1)) * factor).sum().backward()
    plan.finish()
    assert plan.grads() == [[0.0, 2.0], [4.0, 6.0, 8.0, 10.0, 12.0, 14.0], [2.0 * i for i in range(8)]]


def test_gradients_that_share_memory_each_get_their_sum() -> None:
    plan = Plan([nn.Parameter(torch.ones(n)) for n in (2, 6, 8)], buckets=1)
    plan.hook.target(Doubling(plan))
    first, second, third = plan.parameters
    factor = torch.arange(8.0)
    ((torch.cat([first, second]) + third.view(2, 4).view(-1)) * factor).sum().backward()
    plan.finish()
    assert plan.grads() == [[0.0, 2.0], [4.0, 6.0, 8.0, 10.0, 12.0, 14.0], [2.0 * i for i in range(8)]]


def test_a_gradient_of_a_user_defined_class_is_reduced() -> None:
    class Marked(torch.Tensor):
        pass

    plan = Plan(chain(2), buckets=1)
    plan.hook.target(Doubling(plan))
    plan.parameters[0].grad = torch.full((4,), 3.0).as_subclass(Marked)
    plan.finish()
    assert type(plan.parameters[0].grad) is Marked
    assert plan.grads() == [[6.0] * 4, [0.0] * 4]


def test_a_parameter_of_no_dimension_is_one_number() -> None:
    plan = Plan([nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(1, 3, 1))], buckets=1)
    plan.hook.target(Doubling(plan))
    weighted_sum(plan.parameters).backward()
    plan.finish()
    assert plan.grads() == [[2.0], [4.0] * 3]


def test_a_frozen_parameter_contributes_zeros(alone: _core.Comm) -> None:
    plan = Plan(chain(2), buckets=1)
    plan.hook.target(alone)
    plan.parameters[1].requires_grad_(False)
    weighted_sum(plan.parameters).backward()
    plan.finish()
    assert plan.grads() == [[1.0] * 4, [0.0] * 4]


# several backward passes


def test_passes_are_counted_for_each_parameter(alone: _core.Comm) -> None:
    plan = Plan(chain(3), passes=3)
    plan.hook.target(alone)
    for count in range(1, 4):
        weighted_sum(plan.parameters).backward()
        assert plan.hook.pending == (2 if count == 3 else 0)
        if count < 3:
            plan.hook.wait()
    plan.finish()
    assert plan.grads() == [[3.0 * (i + 1)] * 4 for i in range(3)]
    plan.hook.passes = 1
    assert plan.hook.passes == 1
    for parameter in plan.parameters:
        parameter.grad = None
    weighted_sum(plan.parameters).backward()
    assert plan.hook.pending == 2
    plan.finish()
    assert plan.grads() == [[float(i + 1)] * 4 for i in range(3)]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_gradient_accumulated_again_before_its_bucket_is_sent(alone: _core.Comm, direct_bytes: int) -> None:
    plan = Plan(chain(2), buckets=1, direct_bytes=direct_bytes)
    plan.hook.target(alone)
    for _ in range(2):
        weighted_sum(plan.parameters[:1]).backward()
    assert plan.hook.pending == 0
    (2 * plan.parameters[1]).sum().backward()
    assert plan.hook.pending == 1
    plan.finish()
    assert plan.grads() == [[2.0] * 4, [2.0] * 4]
    assert plan.hook.ready_order() == [0, 1]


@pytest.mark.parametrize("direct_bytes", WAYS)
@pytest.mark.parametrize("all_at_last", [True, False])
def test_after_wait_a_bucket_that_was_not_sent_needs_all_its_gradients(
    alone: _core.Comm, direct_bytes: int, all_at_last: bool
) -> None:
    plan = Plan(chain(2), buckets=1, direct_bytes=direct_bytes)
    plan.hook.target(alone)
    weighted_sum(plan.parameters[:1]).backward()
    plan.hook.wait()
    (2 * plan.parameters[1]).sum().backward()
    assert plan.hook.pending == 0
    plan.hook.wait()
    if all_at_last:
        weighted_sum(plan.parameters).backward()
        assert plan.hook.pending == 1
    plan.finish()
    factor = 2.0 if all_at_last else 1.0
    assert plan.grads() == [[factor] * 4, [2.0 * factor] * 4]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_second_backward_averages_the_average_and_what_is_new(direct_bytes: int) -> None:
    def train(comm: _core.Comm) -> list[list[float]]:
        plan = Plan(chain(3), direct_bytes=direct_bytes)
        plan.hook.target(comm, postscale=0.5)
        weighted_sum(plan.parameters, 2.0 * (1 + 2 * comm.rank)).backward()
        plan.hook.wait()
        weighted_sum(plan.parameters, 2.0 * comm.rank).backward()
        plan.finish()
        return plan.grads()

    first, second = on_two_ranks(train)
    assert first == second == [[5.0 * (i + 1)] * 4 for i in range(3)]


def test_adding_to_a_gradient_in_flight_is_an_error() -> None:
    plan = Plan(chain(2), buckets=1)
    sink = Sink()
    plan.hook.target(sink)
    weighted_sum(plan.parameters).backward()
    with pytest.raises(RuntimeError, match="on its way"):
        weighted_sum(plan.parameters[:1]).backward()
    plan.hook.wait()
    weighted_sum(plan.parameters[:1]).backward()  # after a wait it is a contribution like any other
    plan.finish()
    assert sink.seen == sink.waited == [0, 0]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_pass_that_failed_is_discarded_on_all_ranks(direct_bytes: int) -> None:
    def work(comm: _core.Comm) -> list[list[float]]:
        plan = Plan(chain(4), direct_bytes=direct_bytes)
        plan.hook.target(comm, postscale=0.5)
        weighted_sum(plan.parameters[comm.rank :][:3], factor=7.0).backward()  # one rank has sent one bucket
        for parameter in plan.parameters:
            parameter.grad = None
        plan.hook.discard()
        assert plan.hook.pending == 0
        for parameter in plan.parameters:
            parameter.grad = None
        weighted_sum(plan.parameters, factor=2.0 * comm.rank).backward()
        plan.finish()
        return plan.grads()

    assert on_two_ranks(work) == [[[i + 1.0] * 4 for i in range(4)]] * 2


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_a_held_pass_is_sent_by_flush_alone(alone: _core.Comm, direct_bytes: int) -> None:
    plan = Plan(chain(4), direct_bytes=direct_bytes)
    plan.hook.target(alone, postscale=2.0)
    plan.hook.on_first = plan.hook.hold
    for _ in range(2):  # autograd adds to each gradient twice
        weighted_sum(plan.parameters).backward()
        assert plan.hook.pending == 0
    plan.finish()
    assert plan.grads() == [[4.0 * (i + 1)] * 4 for i in range(4)]
    assert sorted(plan.hook.ready_order()) == [0, 1, 2, 3]
    plan.hook.on_first = None
    weighted_sum(plan.parameters).backward()
    assert plan.hook.pending == 2
    plan.finish()


def test_the_first_gradient_of_each_pass_is_reported() -> None:
    plan = Plan(chain(3), passes=2)
    calls: list[int] = []
    plan.hook.target(Doubling(plan))
    assert plan.hook.on_first is None
    plan.hook.on_first = call = lambda: calls.append(plan.hook.pending)
    assert plan.hook.on_first is call
    for _ in range(2):
        weighted_sum(plan.parameters).backward()
        weighted_sum(plan.parameters).backward()
        plan.finish()
    assert calls == [0, 0]
    plan.hook.paused = True
    weighted_sum(plan.parameters).backward()
    assert calls == [0, 0]
    plan.hook.paused = False
    plan.hook.passes = 1
    weighted_sum(plan.parameters[:1]).backward()
    plan.hook.wait()
    weighted_sum(plan.parameters).backward()
    plan.finish()
    assert calls == [0] * 4
    plan.hook.on_first = None
    weighted_sum(plan.parameters).backward()
    plan.finish()
    assert calls == [0] * 4


def test_a_failure_of_on_first_is_raised_by_backward() -> None:
    plan = Plan(chain(2), buckets=1)
    plan.hook.target(Doubling(plan))

    def fail() -> None:
        raise LookupError("not today")

    plan.hook.on_first = fail
    with pytest.raises(LookupError, match="not today"):
        weighted_sum(plan.parameters).backward()
    plan.hook.on_first = None
    weighted_sum(plan.parameters).backward()
    plan.finish()
    with pytest.raises(TypeError, match="on_first must be a callable or None, not 5"):
        plan.hook.on_first = 5  # type: ignore[assignment]


# targets


def test_a_callable_gets_whole_buckets_and_is_waited_for() -> None:
    plan = Plan(chain(4), direct_bytes=LARGE)
    sink = Sink()
    sink.plan = plan
    plan.hook.target(sink)
    weighted_sum(plan.parameters).backward()
    assert plan.hook.pending == 2
    assert sink.waited == []
    plan.finish()
    assert sorted(sink.seen) == sorted(sink.waited) == [0, 1]
    assert sorted(sink.memory) == [[4.0, 8.0], [12.0, 16.0]]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_a_callable_gets_buckets_by_their_index_whatever_is_ready_first(order: tuple[int, ...]) -> None:
    """Its ranks do not negotiate, and gradients may be ready in another order on each."""
    plan = Plan(chain(4), buckets=4)
    sink = Sink()
    plan.hook.target(sink)
    for step in range(2):
        sink.seen.clear()
        for place, index in enumerate(order):
            plan.parameters[index].sum().backward()
            done = set(order[: place + 1])
            assert sink.seen == [b for b in range(4) if set(range(b + 1)) <= done], step
        plan.finish()
        assert sink.seen == [0, 1, 2, 3]
    sink.seen.clear()
    plan.parameters[2].sum().backward()  # the only one of this pass
    assert sink.seen == []
    plan.finish()
    assert sink.seen == [0, 1, 2, 3]


@pytest.mark.parametrize("call", ["flush", "wait", "discard"])
def test_a_callable_cannot_send_or_wait_in_its_turn(call: str) -> None:
    """A handler of a signal may run in it."""
    plan = Plan(chain(3), buckets=3)
    sink = Sink()

    def send(bucket: int) -> Sink.Future:
        with pytest.raises(RuntimeError, match="is sending buckets or waiting for them"):
            getattr(plan.hook, call)()
        return sink(bucket)

    plan.hook.target(send)
    for _ in range(2):
        weighted_sum(plan.parameters).backward()
        plan.finish()
        assert plan.hook.pending == 0
    assert sink.seen == [0, 1, 2] * 2
    assert sink.waited == [0, 1, 2] * 2


def test_a_step_has_begun_with_its_first_complete_gradient_though_nothing_is_sent() -> None:
    plan = Plan(chain(4), passes=2)
    plan.hook.target(Sink())
    assert not plan.hook.begun
    plan.parameters[3].sum().backward()
    assert not plan.hook.begun  # one of two passes
    plan.hook.passes = 2
    for _ in range(2):
        plan.parameters[3].sum().backward()
    assert plan.hook.begun
    assert plan.hook.pending == 0
    with pytest.raises(RuntimeError, match="gradients of a step are complete"):
        plan.hook.passes = 1
    plan.finish()
    assert not plan.hook.begun


def test_none_moves_nothing() -> None:
    plan = Plan(chain(4), direct_bytes=LARGE)
    plan.hook.target(None, postscale=0.5)
    weighted_sum(plan.parameters).backward()
    before = [parameter.grad for parameter in plan.parameters]
    assert plan.hook.pending == 2
    plan.finish()
    assert plan.hook.pending == 0
    assert all(p.grad is grad for p, grad in zip(plan.parameters, before, strict=True))
    assert plan.grads() == [[float(i + 1)] * 4 for i in range(4)]


def test_targets_alternate_between_steps(alone: _core.Comm) -> None:
    plan = Plan(chain(4), direct_bytes=32)
    sink = Sink()
    for step in range(6):
        target: Any = [alone, sink, None][step % 3]
        plan.hook.target(target)
        weighted_sum(plan.parameters, step + 1.0).backward()
        plan.finish()
        assert plan.grads() == [[(step + 1.0) * (i + 1)] * 4 for i in range(4)]
        for parameter in plan.parameters:
            parameter.grad = None
    assert len(sink.seen) == len(sink.waited) == 4


def test_calls_for_between_steps_are_refused_inside_a_step(alone: _core.Comm) -> None:
    plan = Plan(chain(2))
    plan.hook.target(alone)
    weighted_sum(plan.parameters).backward()
    with pytest.raises(RuntimeError, match="2 buckets are pending"):
        plan.hook.target(None)
    with pytest.raises(RuntimeError, match="2 buckets are pending"):
        plan.hook.passes = 2
    plan.hook.wait()
    plan.hook.target(None)
    plan.hook.passes = 2


def test_a_failure_of_wait_is_raised_and_the_hook_is_armed_again() -> None:
    plan = Plan(chain(2))
    sink = Sink()
    plan.hook.target(sink)
    weighted_sum(plan.parameters).backward()
    for view in plan.views:
        view.fill_(77)  # what a transfer leaves that was broken off
    sink.fail = errors.WireError("broken")
    with pytest.raises(errors.WireError, match="broken"):
        plan.hook.wait()
    assert plan.grads() == [[1.0] * 4, [2.0] * 4]
    assert sink.waited == [0, 1]
    assert plan.hook.pending == 0
    sink.fail = None
    weighted_sum(plan.parameters).backward()
    assert plan.hook.pending == 2
    plan.hook.wait()


def test_a_failure_to_submit_is_raised_by_backward() -> None:
    comm = _core.Comm(0, 1, secret=b"")
    plan = Plan(chain(2), buckets=1)
    plan.hook.target(comm)
    comm.close()
    with pytest.raises(errors.ClosedError):
        weighted_sum(plan.parameters).backward()
    assert plan.hook.pending == 0
    plan.hook.target(None)
    weighted_sum(plan.parameters).backward()
    plan.finish()


def test_a_lost_peer_is_raised_by_wait() -> None:
    lost = threading.Event()

    def train(comm: _core.Comm) -> None:
        if comm.rank == 1:
            lost.wait(LIMIT_S)
            comm.abort("requested")
            raise InterruptedError
        plan = Plan(chain(2))
        plan.hook.target(comm)
        weighted_sum(plan.parameters).backward()
        lost.set()
        with pytest.raises(errors.PeerError) as caught:
            plan.hook.wait()
        assert caught.value.peer == 1
        assert plan.hook.pending == 0
        raise InterruptedError

    with pytest.raises(InterruptedError):
        on_two_ranks(train)


@pytest.mark.parametrize("direct_bytes", [SMALL, 64, LARGE])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_ranks_get_the_average(direct_bytes: int, set_to_none: bool) -> None:
    def train(comm: _core.Comm) -> list[list[list[float]]]:
        plan = Plan([nn.Parameter(torch.ones(n)) for n in (3, 1000, 16, 70000, 5)], direct_bytes=direct_bytes)
        optimizer = torch.optim.SGD(plan.parameters, lr=1.0)
        plan.hook.target(comm, postscale=0.5)
        seen = []
        for step in range(1, 4):
            optimizer.zero_grad(set_to_none=set_to_none)
            used = plan.parameters if comm.rank == 0 or step != 2 else plan.parameters[:-2]
            weighted_sum(used, 2.0 * step * (1 + comm.rank)).backward()
            plan.finish()
            seen.append([sorted(set(grad)) for grad in plan.grads()])
        return seen

    first, second = on_two_ranks(train)
    expected = [[[3.0 * step * (i + 1)] for i in range(5)] for step in range(1, 4)]
    expected[1][3:] = [[2.0 * 4], [2.0 * 5]]
    assert first == second == expected


# what is recorded


def test_stamps_and_order_of_readiness(alone: _core.Comm, tmp_path: Path) -> None:
    path = tmp_path / "ring"
    recorder = _core.Recorder(str(path), 64, 0)
    plan = Plan(chain(3), recorder=recorder)
    plan.hook.target(alone)
    assert plan.hook.ready_order() == []
    first, second, third = plan.parameters
    (first * (second * third)).sum().backward()
    assert plan.hook.ready_order() == []
    plan.hook.wait()
    order = plan.hook.ready_order()
    recorder.close()
    events = list(struct.iter_unpack("=qII6Q", path.read_bytes()[4096:]))
    ready = [event[3] for event in events if event[1] == _core.EVENTS["GRAD_READY"]]
    assert sorted(order) == [0, 1, 2]
    assert ready == order
    assert [event[1] for event in events[-2:]] == [_core.EVENTS["WAIT_BEGIN"], _core.EVENTS["WAIT_END"]]


@pytest.mark.parametrize("direct_bytes", WAYS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_python_runs_for_a_gradient(alone: _core.Comm, direct_bytes: int, set_to_none: bool) -> None:
    def python_calls(count: int, target: _core.Comm | None) -> int:
        plan = Plan(chain(count), direct_bytes=direct_bytes)
        plan.hook.target(target)
        calls = 0

        def note(_frame: object, event: str, _arg: object) -> None:
            nonlocal calls
            calls += event == "call"

        for _ in range(2):
            for parameter in plan.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
            loss = torch.cat([p * 2 for p in plan.parameters]).sum()
            calls = 0
            gc.disable()  # others' callbacks of the collector are no calls for a gradient
            threading.setprofile(note)
            sys.setprofile(note)
            try:
                loss.backward()
                plan.hook.flush()
                plan.hook.wait()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
                gc.enable()
        assert plan.grads() == [[2.0] * 4] * count
        return calls

    for target in (None, alone):
        assert python_calls(10, target) == python_calls(1000, target) > 0


# lifetimes


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_model_and_hook_are_collected_together(alone: _core.Comm, direct_bytes: int) -> None:
    plan = Plan(chain(3), direct_bytes=direct_bytes)
    plan.hook.target(alone)
    weighted_sum(plan.parameters).backward()
    watches: Sequence[weakref.ref[Any]] = [weakref.ref(plan.parameters[0]), weakref.ref(plan.views[0])]
    del plan
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


def test_a_parameter_that_is_gone_counts_as_zeros() -> None:
    plan = Plan(chain(2), buckets=1)
    sink = Sink()
    plan.hook.target(sink)
    weighted_sum(plan.parameters).backward()
    plan.finish()
    plan.parameters.pop()
    plan.handles.pop()  # autograd's node has the parameter
    gc.collect()
    plan.hook.flush()
    plan.hook.wait()
    assert sink.seen == [0, 0]
    assert [view.tolist() for view in plan.views] == [[1.0] * 4, [0.0] * 4]


DROPPED_MEANWHILE = """
import torch
from netbottleneck import _core


class Gradient(torch.Tensor):
    @property
    def dtype(self):
        if waiting:
            parameters.clear()
        return torch.float32


waiting = False
parameters = [torch.nn.Parameter(torch.ones(4))]
memory = _core.Arena(16)
view = torch.frombuffer(memory, dtype=torch.float32, count=4)
buckets = [("bucket", _core.FLOAT32, memory.address, 16, 0)]
hook = _core.GradHook(parameters, [view], [0], [0], buckets, keep=memory)
comm = _core.Comm(0, 1, secret=b"")
hook.target(comm, postscale=2.0)
gradient = parameters[0].grad = torch.ones(4).as_subclass(Gradient)
hook.flush()
waiting = True
hook.wait()
assert not parameters
print(gradient.tolist())
"""


def test_a_parameter_may_go_while_its_gradient_gets_the_sum() -> None:
    """Python overwrites what it frees, so that a use of the parameter shows."""
    env = {**os.environ, "PYTHONMALLOC": "debug"}
    command = [sys.executable, "-c", DROPPED_MEANWHILE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.stdout == "[2.0, 2.0, 2.0, 2.0]\n", (done.returncode, done.stderr)


class Memory(bytearray):
    """Memory that records its deallocation."""


def test_gradients_in_flight_outlive_their_hook() -> None:
    def train(comm: _core.Comm) -> bool:
        if comm.rank == 1:
            comm.exchange(b"dropped")
            sent = Plan(chain(2), direct_bytes=LARGE)
            sent.hook.target(comm)
            weighted_sum(sent.parameters).backward()
            sent.finish()
            return sent.grads() == [[2.0] * 4, [4.0] * 4]
        plan = Plan(chain(2), direct_bytes=LARGE)
        plan.hook.target(comm)
        memory = Memory(16)
        plan.parameters[0].grad = torch.frombuffer(memory, dtype=torch.float32)
        watch = weakref.ref(memory)
        del memory
        weighted_sum(plan.parameters).backward()
        assert not plan.views[0].any()
        del plan
        gc.collect()
        kept = watch() is not None
        for i in range(2):
            comm.exchange(b"dropped" if i == 0 else b"done")
            comm.notices()
        return kept and watch() is None

    def both(comm: _core.Comm) -> bool:
        right = train(comm)
        if comm.rank == 1:
            comm.exchange(b"done")
        return right

    assert on_two_ranks(both) == [True, True]


class Late:
    """Waits for a hook when the collector finds both."""

    def __init__(self, hook: _core.GradHook, seen: list[str]) -> None:
        self.hook, self.seen = hook, seen

    def __del__(self) -> None:
        try:
            self.hook.wait()
        except RuntimeError as refusal:
            self.seen.append(str(refusal))


def test_a_collected_cycle_keeps_the_memory_of_buckets_in_flight() -> None:
    def train(comm: _core.Comm) -> list[Any]:
        if comm.rank == 1:
            comm.exchange(b"dropped")
            comm.submit("bucket", _core.ALLREDUCE, bytearray(16), _core.FLOAT32).wait()
            comm.exchange(b"summed")
            return []
        memory = Memory(16)
        watch, box, parameter = weakref.ref(memory), [memory], nn.Parameter(torch.ones(4))
        seen: list[Any] = []
        view = torch.frombuffer(memory, dtype=torch.float32)
        buckets = [("bucket", _core.FLOAT32, view.data_ptr(), 16, 0)]
        hook = _core.GradHook([parameter], [view], [0], [0], buckets, keep=box)
        box += [hook, Late(hook, seen)]
        hook.target(comm)
        hook.flush()
        del memory, box, view, hook
        gc.collect()
        seen.append(watch() is not None)
        comm.exchange(b"dropped")
        comm.exchange(b"summed")
        comm.notices()
        gc.collect()
        return [*seen, watch() is None]

    assert on_two_ranks(train) == [["the GradHook was cleared", True, True], []]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_nothing_grows_over_many_steps(alone: _core.Comm, direct_bytes: int) -> None:
    plan = Plan(chain(4), direct_bytes=direct_bytes)
    plan.hook.target(alone)

    def steps(count: int) -> None:
        for _ in range(count):
            for parameter in plan.parameters:
                parameter.grad = None
            weighted_sum(plan.parameters).backward()
            plan.finish()

    def counts() -> list[int]:
        gc.collect()
        things = (plan.hook, plan.views[0], plan.parameters[0], alone, torch.float32, plan.arena)
        return [sys.getrefcount(thing) for thing in things]

    steps(10)
    before = counts()
    steps(500)
    assert counts() == before


# bad input


def arguments(**changed: Any) -> dict[str, Any]:
    plan = Plan(chain(2), buckets=1)
    good = {
        "parameters": plan.parameters,
        "views": plan.views,
        "bucket_of": plan.bucket_of,
        "offset": plan.offset,
        "buckets": plan.buckets,
        "keep": plan,
    }
    return {**good, **{name: change(plan) for name, change in changed.items()}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"views": lambda p: p.views[:1]}, r"2 parameters .* views \(1\)"),
        ({"parameters": lambda p: p.parameters[:1] * 2}, r"parameters\[1\] occurs twice"),
        ({"bucket_of": lambda _: [0, 1]}, "bucket_of .* not 1"),
        ({"offset": lambda _: [0, -4]}, "offset .* not -4"),
        ({"offset": lambda _: [0, 2]}, r"views\[1\] .* offset 2"),
        ({"offset": lambda _: [0, 4096]}, r"views\[1\] .* offset 4096"),
        ({"views": lambda p: [p.views[0], p.views[0]]}, r"views\[1\]"),
        ({"views": lambda p: [p.views[0], p.views[1].view(torch.uint8)]}, r"views\[1\] has elements of 1 bytes"),
        ({"buckets": lambda p: [*p.buckets, p.buckets[0]]}, r'buckets\[1\] has the name of another bucket, "bucket0"'),
        ({"buckets": lambda p: [*p.buckets, ("b", *p.buckets[0][1:])]}, r'buckets\[1\], "b", has no parameter'),
        ({"buckets": lambda p: [("", *p.buckets[0][1:])]}, r"buckets\[0\] must have a name"),
        ({"buckets": lambda p: [("n" * 96, *p.buckets[0][1:])]}, r"buckets\[0\] must have a name .* 95"),
        ({"buckets": lambda p: [("b", 42, *p.buckets[0][2:])]}, "dtype .* not 42"),
        ({"buckets": lambda p: [(*p.buckets[0][:3], 63, 0)]}, r"buckets\[0\] .*63"),
        ({"buckets": lambda p: [("b", _core.FLOAT32, 0, 64, 0)]}, r"buckets\[0\] must have an address"),
        ({"passes": lambda _: 0}, "passes .* not 0"),
        ({"direct_bytes": lambda _: -1}, "direct_bytes .* not -1"),
    ],
)
def test_a_bad_plan_is_named(changed: dict[str, Callable[[Plan], Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.GradHook(**arguments(**changed))


def test_bad_calls_are_named() -> None:
    hook = _core.GradHook(**arguments())
    with pytest.raises(ValueError, match=r"index .* not 2"):
        hook.hook(2)
    with pytest.raises(ValueError, match=r"passes .* not 0"):
        hook.passes = 0
    with pytest.raises(ValueError, match=r"postscale .* not nan"):
        hook.target(None, postscale=float("nan"))
    with pytest.raises(ValueError, match=r"op .* not 9"):
        hook.target(None, op=9)
    with pytest.raises(TypeError, match=r"sink .* not 5"):
        hook.target(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"recorder .* not 5"):
        _core.GradHook(**arguments(recorder=lambda _: 5))
    with pytest.raises(TypeError, match=r"buckets\[0\] .*name, dtype, address, bytes, priority"):
        _core.GradHook(**arguments(buckets=lambda _: [5]))
