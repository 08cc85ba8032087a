"""Gradients whose memory is replaced, resized, written to or freed while they are in flight. Ranks are threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from netbottleneck import _core
from netbottleneck.torch.gradients import OnAccumulated
from test_gradhook import LARGE, WAYS, Plan, on_two_ranks

COUNT = 1 << 18  # elements: 1 MiB, which the allocator gives back to the system at once
LIMIT_S = 60.0
OTHER = 9.0
JUNK = 777.0


def of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, which must exist."""
    assert parameter.grad is not None
    return parameter.grad


def replace(parameter: nn.Parameter) -> None:
    of(parameter).data = torch.full((COUNT,), OTHER)


def set_to_another(parameter: nn.Parameter) -> None:
    of(parameter).set_(torch.full((COUNT,), OTHER))  # type: ignore[call-overload]


def overwrite(gradient: torch.Tensor) -> None:
    """Write to a gradient that was resized under way, where torch allows that: 2.13 does not until it has its sum."""
    with contextlib.suppress(RuntimeError):
        gradient.fill_(OTHER)


def grow(parameter: nn.Parameter) -> None:
    overwrite(of(parameter).resize_(2 * COUNT))


def grow_the_storage(parameter: nn.Parameter) -> None:
    of(parameter).untyped_storage().resize_(8 * COUNT)
    overwrite(of(parameter))


def shrink_the_storage(parameter: nn.Parameter) -> None:
    of(parameter).untyped_storage().resize_(4)


def free_the_storage(parameter: nn.Parameter) -> None:
    of(parameter).untyped_storage().resize_(0)


def free_and_allocate_again(parameter: nn.Parameter) -> None:
    of(parameter).untyped_storage().resize_(0)
    of(parameter).untyped_storage().resize_(4 * COUNT)
    overwrite(of(parameter))


def edit(parameter: nn.Parameter) -> None:
    of(parameter).mul_(OTHER)


def swap(parameter: nn.Parameter) -> None:
    gradient, other = of(parameter), torch.full((COUNT,), OTHER)
    parameter.grad = None  # swap_tensors() takes no tensor that another has
    torch.utils.swap_tensors(gradient, other)
    parameter.grad = gradient


CHANGES = [
    replace,
    set_to_another,
    grow,
    grow_the_storage,
    shrink_the_storage,
    free_the_storage,
    free_and_allocate_again,
    edit,
    swap,
]


def sent(comm: _core.Comm, direct_bytes: int) -> Plan:
    plan = Plan([nn.Parameter(torch.zeros(COUNT)) for _ in range(2)], buckets=1, direct_bytes=direct_bytes)
    plan.hook.target(comm, postscale=0.5)
    return plan


def backward(plan: Plan, rank: int) -> None:
    torch.stack([(2.0 * (rank + 1) * (i + 1) * p).sum() for i, p in enumerate(plan.parameters)]).sum().backward()


def distinct_values(tensor: torch.Tensor | None) -> list[float]:
    """Return the distinct values of a tensor."""
    return [] if tensor is None else [float(value) for value in tensor.unique()]


def values(plan: Plan) -> list[list[float]]:
    return [distinct_values(parameter.grad) for parameter in plan.parameters]


def on_one_rank(change: Callable[[Plan], None], direct_bytes: int, finish: Callable[[Plan], Any]) -> list[Any]:
    """Have rank 0's gradients changed after they were sent and before rank 1 sends: nothing has moved by then.

    Returns what finish returned on each rank; what rank 0 allocated meanwhile must hold what it put there.
    """
    changed = threading.Event()

    def train(comm: _core.Comm) -> Any:
        plan = sent(comm, direct_bytes)
        if comm.rank == 1:
            assert changed.wait(LIMIT_S)
            backward(plan, 1)
            return finish(plan)
        try:
            change(plan)
        finally:
            changed.set()
        others = [torch.full((COUNT,), JUNK) for _ in range(8)]  # what was freed, if anything, is given out here
        result = finish(plan)
        assert [distinct_values(each) for each in others] == [[JUNK]] * 8
        return result

    return on_two_ranks(train)


def in_hook(change: Callable[[nn.Parameter], None]) -> Callable[[Plan], None]:
    def run(plan: Plan) -> None:
        handles = [OnAccumulated(p, lambda *_, p=p: change(p)) for p in plan.parameters]  # after our own hooks
        backward(plan, 0)
        for handle in handles:
            handle.remove()

    return run


def in_thread(change: Callable[[nn.Parameter], None]) -> Callable[[Plan], None]:
    def change_all(plan: Plan) -> None:
        for parameter in plan.parameters:
            change(parameter)

    def run(plan: Plan) -> None:
        backward(plan, 0)
        thread = threading.Thread(target=change_all, args=(plan,))
        thread.start()
        thread.join(LIMIT_S)
        assert not thread.is_alive()

    return run


def whole(plan: Plan) -> Any:
    plan.finish()
    return values(plan)


@pytest.mark.parametrize("direct_bytes", WAYS)
@pytest.mark.parametrize("place", [in_hook, in_thread])
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_changes_in_flight_gets_the_sum_of_the_sent_values(
    change: Callable[[nn.Parameter], None], place: Any, direct_bytes: int
) -> None:
    def finish(plan: Plan) -> Any:
        result = whole(plan)
        for parameter in plan.parameters:
            of(parameter).resize_(2 * COUNT).mul_(2)  # it is whole again
        return result

    first, second = on_one_rank(place(change), direct_bytes, finish)
    assert first == second == [[3.0], [6.0]]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_the_tensor_that_was_swapped_out_has_the_memory_and_grad_has_the_sum(direct_bytes: int) -> None:
    kept: list[torch.Tensor] = []

    def swap_all(plan: Plan) -> None:
        backward(plan, 0)
        for parameter in plan.parameters:
            gradient, other = of(parameter), torch.full((COUNT,), OTHER)
            parameter.grad = None
            torch.utils.swap_tensors(gradient, other)
            parameter.grad = gradient
            kept.append(other)

    first, second = on_one_rank(swap_all, direct_bytes, whole)
    assert first == second == [[3.0], [6.0]]
    assert [distinct_values(each) for each in kept] == ([[3.0], [6.0]] if direct_bytes == LARGE else [[2.0], [4.0]])


@pytest.mark.parametrize("direct_bytes", WAYS)
@pytest.mark.parametrize("place", [in_hook, in_thread])
def test_a_gradient_that_is_freed_in_flight_is_an_error_and_other_memory_is_intact(
    place: Any, direct_bytes: int
) -> None:
    def free(parameter: nn.Parameter) -> None:
        parameter.grad = None

    def finish(plan: Plan) -> Any:
        if plan.parameters[0].grad is not None:
            return whole(plan)
        with pytest.raises(RuntimeError, match="was deleted while bucket bucket0 was on its way"):
            plan.hook.wait()
        return values(plan)

    first, second = on_one_rank(place(free), direct_bytes, finish)
    assert first == [[], []]
    assert second == [[3.0], [6.0]]


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_an_array_over_a_gradient_in_flight_sees_the_sum(direct_bytes: int) -> None:
    arrays: list[Any] = []

    def look(plan: Plan) -> None:
        backward(plan, 0)
        arrays.extend(of(parameter).numpy() for parameter in plan.parameters)

    first, second = on_one_rank(look, direct_bytes, whole)
    assert first == second == [[3.0], [6.0]]
    assert [distinct_values(torch.from_numpy(array)) for array in arrays] == first


@pytest.mark.parametrize("direct_bytes", WAYS)
def test_after_its_sum_a_gradient_has_its_original_storage(direct_bytes: int) -> None:
    def twice(plan: Plan) -> Any:
        plan.finish()
        before = [of(parameter).data_ptr() for parameter in plan.parameters]
        for parameter in plan.parameters:
            of(parameter).mul_(2)
            assert of(parameter).untyped_storage().resizable()
        return values(plan), [of(parameter).data_ptr() for parameter in plan.parameters] == before

    assert on_one_rank(lambda plan: backward(plan, 0), direct_bytes, twice) == [([[6.0], [12.0]], True)] * 2
