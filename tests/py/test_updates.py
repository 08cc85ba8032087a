"""Definition of one update of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from netbottleneck.hooks.updates import Updates


class Counting:
    """Counts the updates of parameters, and records the order of events."""

    def __init__(self, *parameters: Any, optimizer: Any = None) -> None:
        self.seen: list[str] = []
        before: Callable[[], None] = lambda: self.seen.append("before")  # noqa: E731
        self.updates = Updates(parameters, optimizer, before, lambda: self.seen.append("after"))


class Subclass(torch.optim.SGD):
    """A user's optimizer, whose step extends that of its base class."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError
        return super().step(closure)


def parameter() -> Any:
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


def test_an_optimizer_of_other_parameters_is_not_counted() -> None:
    mine, other = parameter(), parameter()
    counted = Counting(mine)
    torch.optim.SGD([other], lr=1.0).step()
    assert counted.seen == []
    torch.optim.SGD([other, mine], lr=1.0).step()
    counted.updates.remove()
    assert counted.seen == ["before", "after"]


def test_the_first_of_two_optimizers_counts_until_the_second_replaces_it() -> None:
    mine = parameter()
    counted = Counting(mine)
    first, second = torch.optim.SGD([mine], lr=1.0), torch.optim.SGD([mine], lr=1.0)
    for _ in range(2):
        first.step()
        second.step()
    assert len(counted.seen) == 4
    del first
    second.step()
    counted.updates.remove()
    assert len(counted.seen) == 6


@pytest.mark.parametrize("known", [True, False])
def test_a_step_that_calls_another_class_s_step_is_one_update(known: bool) -> None:
    mine = parameter()
    torch.optim.SGD([parameter()], lr=1.0)  # torch calls the hooks of SGD's own step from now on
    optimizer = Subclass([mine], lr=1.0)
    counted = Counting(mine, optimizer=optimizer if known else None)
    optimizer.step()
    optimizer.step()
    counted.updates.remove()
    optimizer.step()
    assert counted.seen == ["before", "after"] * 2


@pytest.mark.parametrize("kind", [torch.optim.SGD, Subclass])
def test_an_update_begins_before_a_weight_changes_and_ends_after(kind: Any) -> None:
    mine = parameter()
    torch.optim.SGD([parameter()], lr=1.0)
    seen: list[float] = []
    look = lambda: seen.append(mine[0].item())  # noqa: E731
    updates = Updates([mine], None, look, look)
    optimizer = kind([mine], lr=1.0)
    optimizer.step()
    optimizer.step()
    updates.remove()
    assert seen == [1.0, 0.0, 0.0, -1.0]


def test_counting_continues_after_a_step_that_raised() -> None:
    mine = parameter()
    torch.optim.SGD([parameter()], lr=1.0)
    optimizer = Subclass([mine], lr=1.0)
    counted = Counting(mine)
    optimizer.fails = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    optimizer.fails = False
    for _ in range(3):
        optimizer.step()
    counted.updates.remove()
    assert counted.seen.count("after") == 3
    assert counted.seen[-2:] == ["before", "after"]


@pytest.mark.parametrize("known", [True, False])
def test_an_update_begins_before_a_weight_changes_if_the_base_class_is_hooked_later(known: bool) -> None:
    class Base(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            mine.data -= 1.0

    class Derived(Base):
        pass

    mine = parameter()
    optimizer = Derived([mine])  # torch wraps the step of this class first
    Base([parameter()])
    seen: list[float] = []
    look = lambda: seen.append(mine[0].item())  # noqa: E731
    updates = Updates([mine], optimizer if known else None, look, look)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 // 0)
    optimizer.step()
    optimizer.step()
    updates.remove()
    assert seen == [1.0, 1.0, 0.0, 0.0, -1.0]


def test_an_optimizer_that_alone_uses_new_gradients_replaces_one_that_is_kept() -> None:
    mine, other = parameter(), parameter()
    counted = Counting(mine)
    kept, used, apart = (torch.optim.SGD([p], lr=1.0) for p in (mine, mine, other))
    kept.step()
    for _ in range(3):  # the gradients are the same: one pass of the loop
        used.step()
        apart.step()
    assert len(counted.seen) == 2
    for _ in range(3):
        mine.grad = torch.ones(2)
        used.step()
        apart.step()
    counted.updates.remove()
    assert len(counted.seen) == 2 + 2 * 3


def test_silenced_hooks_may_be_passed_through_and_removed_later() -> None:
    mine = parameter()
    counted = Counting(mine)
    optimizer = torch.optim.SGD([mine], lr=1.0)
    handle = register_optimizer_step_pre_hook(lambda *_: counted.updates.silence())
    try:
        optimizer.step()  # torch goes through its hooks while they are silenced
    finally:
        handle.remove()
    optimizer.step()
    counted.updates.remove()
    assert counted.seen == ["before"]
