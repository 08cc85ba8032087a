"""Gradients: buckets, views and hooks in one process, with callable sinks or none."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from netbottleneck.torch.gradients import Gradients
from netbottleneck.torch.python_hooks import SparseApart


class Double:
    """A sink that simulates two equal ranks: each bucket is doubled in place when it is waited for."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.sent: list[int] = []
        self.waited: list[int] = []

    def __call__(self, index: int) -> Any:
        self.sent.append(index)
        sink = self

        class Future:
            def wait(self) -> None:
                sink.gradients.flat(index).mul_(2)
                sink.waited.append(index)

        return Future()


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last),
        torch.nn.Flatten(),
        torch.nn.Linear(12, 5),
        torch.nn.Linear(5, 1),
    )
    for number, parameter in enumerate(made.parameters()):
        with torch.no_grad():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) % 5 - number % 3)
    return made


def backward(made: torch.nn.Module) -> None:
    made(torch.arange(18.0).reshape(1, 2, 3, 3) % 4).sum().backward()


def plain_gradients() -> list[Any]:
    made = model()
    backward(made)
    return [parameter.grad for parameter in made.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("direct_bytes", [0, 64, 1 << 20])
def test_a_callable_gets_each_bucket_once_a_step(set_to_none: bool, direct_bytes: int) -> None:
    made = model()
    gradients = Gradients(made.named_parameters(), direct_bytes=direct_bytes, limits=(16, 64))
    sink = Double(gradients)
    gradients.target(sink)
    assert len(gradients.buckets) > 2
    for _ in range(3):
        backward(made)
        assert gradients.pending == len(gradients.buckets)
        gradients.flush()
        gradients.wait()
        assert gradients.pending == 0
        assert sorted(sink.sent) == sink.waited == list(range(len(gradients.buckets)))
        for parameter, plain in zip(made.parameters(), plain_gradients(), strict=True):
            assert torch.equal(parameter.grad, 2 * plain)
        sink.sent.clear()
        sink.waited.clear()
        made.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [3, 3000])
def test_every_numeric_type_is_sent(dtype: torch.dtype, size: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    gradients = Gradients([("parameter", parameter)])
    gradients.target(Double(gradients))
    for _ in range(2):
        parameter.grad = None
        (parameter * 3).sum().backward()
        gradients.wait()
        assert parameter.grad.dtype == dtype
        assert torch.equal(parameter.grad, torch.full((size,), 6.0, dtype=dtype))


def test_without_a_target_gradients_are_unchanged() -> None:
    made = model()
    gradients = Gradients(made.named_parameters())
    gradients.target(None)
    for _ in range(2):
        made.zero_grad()
        backward(made)
        gradients.flush()
        gradients.wait()
        for parameter, plain in zip(made.parameters(), plain_gradients(), strict=True):
            assert torch.equal(parameter.grad, plain)


class Peer:
    """A sink that simulates a rank whose gradients and flags are all `value`."""

    def __init__(self, gradients: Gradients, value: float) -> None:
        self.gradients, self.value = gradients, value

    def __call__(self, index: int) -> Any:
        sink = self

        class Future:
            def wait(self) -> None:
                sink.gradients.flat(index).add_(sink.value)

        return Future()


@pytest.mark.parametrize("direct_bytes", [0, 1 << 20])
def test_with_flags_a_gradient_exists_where_a_rank_has_it(direct_bytes: int) -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2, 3).t()) for _ in range(2))
    gradients = Gradients([("used", used), ("unused", unused)], direct_bytes=direct_bytes, flagged=True)
    found = []
    for value in (0.0, 2.0, 0.0):
        gradients.target(Peer(gradients, value))
        used.grad = unused.grad = None
        (used * 3).sum().backward()
        gradients.flush()
        gradients.wait()
        found.append(None if unused.grad is None else unused.grad.tolist())
        assert used.grad.tolist() == [[3.0 + value] * 2] * 3
    assert found == [None, [[2.0, 2.0]] * 3, None]
    gradients.target(None)
    used.grad = None
    gradients.flush()
    gradients.wait()
    assert used.grad is unused.grad is None


def test_parameters_without_gradient_or_elements_are_left_out() -> None:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    empty = torch.nn.Parameter(torch.ones(0, 3))
    gradients = Gradients([("a", torch.nn.Parameter(torch.ones(2))), ("frozen", frozen), ("empty", empty)])
    assert gradients.names == ("a",)
    assert Gradients([]).buckets == ()


def test_buckets_describe_the_place_of_each_gradient() -> None:
    made = model()
    gradients = Gradients(made.named_parameters(), limits=(64, 128))
    sink = Double(gradients)
    gradients.target(sink)
    backward(made)
    gradients.wait()
    plain = plain_gradients()
    for index, bucket in enumerate(gradients.buckets):
        flat = gradients.flat(index)
        assert flat.nbytes == bucket.nbytes
        for member, offset in zip(bucket.parameters, bucket.parameter_offsets, strict=True):
            parameter = gradients.parameters[member]
            there = flat[offset // 4 :].as_strided(parameter.shape, parameter.stride())
            assert torch.equal(there, parameter.grad)
            assert torch.equal(there, 2 * plain[member])


def test_rank_zeros_order_is_taken_after_the_first_step() -> None:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    named = [("first", first.weight), ("second", second.weight)]
    orders: list[bytes] = []

    def agree(mine: bytes) -> bytes:
        orders.append(mine)
        return mine

    gradients = Gradients(named, limits=(64, 64), agree=agree)
    gradients.target(Double(gradients))
    assert [bucket.parameters for bucket in gradients.buckets] == [(1,), (0,)]
    for step in range(3):
        first(second(torch.ones(1, 4))).sum().backward()
        kept = [parameter.grad.clone() for _, parameter in named]
        gradients.wait()
        assert [torch.equal(p.grad, 2 * k) for (_, p), k in zip(named, kept, strict=True)] == [True, True]
        assert [bucket.parameters for bucket in gradients.buckets] == [(0,), (1,)]
        if step == 1:
            first.zero_grad(set_to_none=False)
            second.zero_grad(set_to_none=False)
        else:
            first.zero_grad()
            second.zero_grad()
    assert len(orders) == 1
    assert gradients.version == 1


def test_the_first_gradient_of_a_pass_is_reported_after_buckets_are_rebuilt() -> None:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    gradients = Gradients([("a", first.weight), ("b", second.weight)], limits=(64, 64), agree=lambda mine: mine)
    gradients.target(Double(gradients))
    calls: list[int] = []
    gradients.on_first = lambda: calls.append(gradients.version)
    for _ in range(3):
        first(second(torch.ones(1, 4))).sum().backward()
        gradients.wait()
    assert calls == [0, 1, 1]
    assert gradients.on_first is not None


def test_gradients_are_ordinary_tensors() -> None:
    made = model()
    gradients = Gradients(made.named_parameters())
    gradients.target(Double(gradients))
    backward(made)
    gradients.wait()
    for parameter in made.parameters():
        assert parameter.grad.stride() == parameter.stride()
        assert not parameter.grad._is_view()
        parameter.grad.detach_()
        assert torch.equal(copy.deepcopy(parameter.grad), parameter.grad)


def test_hooks_go_when_closed() -> None:
    made = model()
    gradients = Gradients(made.named_parameters())
    sink = Double(gradients)
    gradients.target(sink)
    gradients.close()
    backward(made)
    assert sink.sent == []


def test_memory_goes_with_the_last_gradient() -> None:
    made = model()
    gradients = Gradients(made.named_parameters())
    gradients.target(None)
    backward(made)
    gradients.wait()
    gone = weakref.ref(gradients)
    gradients.close()
    del gradients
    gc.collect()
    assert gone() is None
    for parameter, plain in zip(made.parameters(), plain_gradients(), strict=True):
        assert torch.equal(parameter.grad, plain)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)), "complex64 is not supported"),
        (torch.nn.Parameter(torch.ones(2, device="meta")), "on meta: gradients travel from host and CUDA memory only"),
    ],
)
def test_unsupported_parameters_are_refused_by_name(parameter: Any, message: str) -> None:
    with pytest.raises(ValueError, match="odd") as caught:
        Gradients([("odd", parameter)])
    assert message in str(caught.value)


class Watched(tuple[torch.Tensor, ...]):
    """Parameters that count how often they are looked through."""

    looks = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.looks += 1
        return super().__iter__()


def test_sparse_gradients_are_looked_for_until_the_ranks_have_agreed() -> None:
    made, looks = model(), []
    answers = [True, False]  # whether the ranks agree, last step first

    def agree(mine: bytes) -> bytes | None:
        return mine if answers.pop() else None

    gradients = Gradients(made.named_parameters(), agree=agree, drop_sparse=True)
    apart = SparseApart(gradients, cast(Any, None))
    for _ in range(3):
        watched = gradients.parameters = Watched(gradients.parameters)
        backward(made)
        apart.flush()
        before = watched.looks
        apart.wait()
        looks.append(watched.looks - before)
    assert gradients.settled
    assert looks == [1, 1, 0]
