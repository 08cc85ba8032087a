"""When is a step over? At an update of the optimizer that has the parameters."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from netbottleneck.hooks.eager import eager
from netbottleneck.torch.functions import makes_state


class Updates:
    """Calls `before` and `after` once each around every update of one optimizer, torch's or what hooks like one.

    optimizer None: the first that makes a step with one of the parameters, and after its end the next such; meanwhile
    others do not count, so that a model with two optimizers has one step for both. Where an optimizer's step calls that
    of a class below it, and torch tells of both, `before` comes with the inner one (Horovod's waits for its gradients
    between the two) and `after` with the outer one.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        optimizer: Any,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._before = before
        self._after = after
        self._own = {id(parameter) for parameter in parameters}
        self._chosen: weakref.ref[torch.optim.Optimizer] | None = None
        self._depth = 0
        self._begun = False
        self._handles: list[Any]
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):  # it says itself when it begins
            self._handles = [
                optimizer.register_step_pre_hook(lambda *_: before()),
                optimizer.register_step_post_hook(lambda *_: after()),
            ]
        elif optimizer is not None:
            self._chosen = weakref.ref(optimizer)
            self._handles = [
                optimizer.register_step_pre_hook(self._begins),
                optimizer.register_step_post_hook(self._ended),
            ]
        else:
            self._handles = [
                register_optimizer_step_pre_hook(self._begins),
                register_optimizer_step_post_hook(self._ended),
            ]

    def begun_by(self, marks: Any) -> None:
        """Have `before` called when `marks` calls its pre-hook, instead of by the optimizer."""
        self._handles.append(marks.register_step_pre_hook(self._before))
        self._before = _nothing

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @eager
    def _begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if makes_state(optimizer):
            return
        chosen = self._chosen() if self._chosen is not None else None
        if chosen is None and shares(optimizer, self._own):
            self._chosen, chosen = weakref.ref(optimizer), optimizer
            self._depth, self._begun = 0, False
        if chosen is not optimizer:
            return
        levels = _levels(optimizer)
        # After a step that raised there is more than there can be.
        self._depth = self._depth + 1 if self._depth < levels else 1
        if not self._begun and self._depth == levels:
            self._begin()

    def _begin(self) -> None:
        self._begun = True
        self._before()

    @eager
    def _ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._chosen is None or self._chosen() is not optimizer or makes_state(optimizer):
            return
        self._depth -= 1
        if self._depth != 0:
            self._depth = max(self._depth, 0)
            return
        if not self._begun:
            self._begin()
        self._begun = False
        self._after()


def _nothing() -> None:
    return


def _levels(optimizer: torch.optim.Optimizer) -> int:
    """Return how many classes of an optimizer have a step that torch tells of, should each call the next."""
    steps = [vars(c).get("step") for c in type(optimizer).__mro__]
    return max(1, sum(bool(getattr(step, "hooked", False)) for step in steps))


def shares(optimizer: torch.optim.Optimizer, own: set[int]) -> bool:
    """Return whether an optimizer has one of the parameters whose ids these are."""
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
