"""Updates: the end of a step, which is an update by the optimizer that holds the parameters."""

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from netbottleneck.hooks.calls import eager
from netbottleneck.hooks.left_alone import held
from netbottleneck.torch.functions import makes_state


class _Other(NamedTuple):
    """Another optimizer of the parameters, and one of its gradients at the end of its last step."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    gradient: weakref.ref[torch.Tensor] | None
    version: int


def unfit(optimizer: Any) -> str:
    """Return why the steps of an optimizer cannot be followed, with the remedy; "" if they can be. None is fit."""
    if optimizer is None:
        return ""
    try:
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *_: None).remove()
    except Exception:  # such a wrapper may have torch's methods, but not what they need
        return (
            f"optimizer: {type(optimizer).__name__} takes no step hooks (register_step_pre_hook and "
            "register_step_post_hook): pass the torch.optim.Optimizer whose step() updates the weights"
        )
    return ""


def check_fit(optimizer: Any) -> None:
    """Raise TypeError if the steps of an optimizer cannot be followed."""
    if reason := unfit(optimizer):
        raise TypeError(reason)


class Updates:
    """Calls `before` and `after` once each around every update of one optimizer.

    optimizer: a torch optimizer, or an object with the same step hooks around the optimizer `wraps`. None: the first
    optimizer that steps one of the parameters. When it is freed, the next one; another one also at its second step with
    new gradients, if the first one made none in between. Other optimizers end no step, so a model with two optimizers
    has one step for both. `beside` is called with True and False around each of their steps.

    An optimizer's step may call the step of its base class, and torch then calls the hooks for both. `before` and
    `after` run with the outermost step. waits: that step may wait for gradients, as Horovod's does. `before` then runs
    with the deepest step of the last update, and at the latest with `after`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        optimizer: Any,
        before: Callable[[], None],
        after: Callable[[], None],
        beside: Callable[[bool], None] = lambda _: None,
        *,
        waits: bool = False,
    ) -> None:
        self._before = before
        self._after = after
        self._marked = _nothing  # called in place of `before`, see begun_by
        self._beside = beside
        self._waits = waits
        self._own = {id(parameter) for parameter in parameters}
        self._chosen: weakref.ref[torch.optim.Optimizer] | None = None
        self._others: dict[int, _Other] = {}  # that have stepped since the chosen one
        self._outermost = 0  # id of the frame of the outermost step
        self._depth = self._deepest = 0
        self._levels = 1  # depth of the step with which `before` runs
        self._begun = False
        self._handles: list[Any]
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):  # it calls its hooks itself
            self._handles = [
                optimizer.register_step_pre_hook(lambda *_: self._before()),
                optimizer.register_step_post_hook(lambda *_: self._after()),
                *self._hook_others(getattr(optimizer, "wraps", None)),
            ]
        elif optimizer is not None:
            self._chosen = weakref.ref(optimizer)
            self._handles = [
                optimizer.register_step_pre_hook(self._begins),
                optimizer.register_step_post_hook(self._ended),
                *self._hook_others(optimizer),
            ]
        else:
            self._handles = [
                register_optimizer_step_pre_hook(self._begins),
                register_optimizer_step_post_hook(self._ended),
            ]

    def _hook_others(self, chosen: Any) -> list[Any]:
        """Hook the steps of all optimizers but one."""
        one = None if chosen is None else weakref.ref(chosen)

        def other(begins: bool) -> Callable[..., None]:
            @eager
            def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                if not makes_state(optimizer) and (one is None or one() is not optimizer):
                    self._beside(begins)

            return hook

        return [register_optimizer_step_pre_hook(other(True)), register_optimizer_step_post_hook(other(False))]

    def begun_by(self, marks: Any) -> None:
        """Call `before` from the pre-hook of `marks` instead of the optimizer's."""
        self._marked, self._before = self._before, _nothing
        self._handles.append(marks.register_step_pre_hook(lambda *_: self._marked()))

    def silence(self) -> None:
        """Let the hooks do nothing. A finalizer calls it: torch may be going through them, so they must stay."""
        self._before = self._after = self._marked = _nothing
        self._beside = lambda _: None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @eager
    def _begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if makes_state(optimizer):
            return
        chosen = self._chosen() if self._chosen is not None else None
        if chosen is not optimizer and self._replaces(optimizer, chosen):
            self._chosen, chosen = weakref.ref(optimizer), optimizer
            self._depth, self._levels = 0, 1
        if chosen is not optimizer:
            self._beside(True)
            return
        self._others.clear()
        steps = step_frames()
        if self._depth == 0 or self._outermost not in steps[1:]:  # the last step may have raised
            self._outermost = steps[0] if steps else 0
            self._depth = self._deepest = 0
            self._begun = False
        self._depth += 1
        self._deepest = max(self._deepest, self._depth)
        if not self._begun and self._depth == self._levels:
            self._begin()

    def _replaces(self, optimizer: torch.optim.Optimizer, chosen: torch.optim.Optimizer | None) -> bool:
        """Return whether another optimizer is the chosen one from now on."""
        if chosen is None:
            return any(id(parameter) in self._own for parameter in held(optimizer))
        last = self._others.get(id(optimizer))
        if last is None or last.optimizer() is not optimizer:
            return False
        gradient = self._gradient(optimizer)
        before = None if last.gradient is None else last.gradient()
        return gradient is not None and (gradient is not before or _version(gradient) != last.version)

    def _gradient(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return an optimizer's first gradient of the parameters."""
        gradients = (parameter.grad for parameter in held(optimizer) if id(parameter) in self._own)
        return next((gradient for gradient in gradients if gradient is not None), None)

    def _begin(self) -> None:
        self._begun = True
        self._before()

    @eager
    def _ended(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if makes_state(optimizer):
            return
        if self._chosen is None or self._chosen() is not optimizer:
            self._note_other(optimizer)
            self._beside(False)
            return
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        if not self._begun:
            self._begin()
        self._begun = False
        self._levels = self._deepest if self._waits else 1
        self._after()

    def _note_other(self, optimizer: torch.optim.Optimizer) -> None:
        if any(id(parameter) in self._own for parameter in held(optimizer)):
            gradient = self._gradient(optimizer)
            reference = None if gradient is None else weakref.ref(gradient)
            self._others[id(optimizer)] = _Other(weakref.ref(optimizer), reference, _version(gradient))


def _nothing() -> None:
    return


def _version(gradient: torch.Tensor | None) -> int:
    """Return a number that changes when a gradient is written."""
    return 0 if gradient is None or gradient.is_inference() else gradient._version


_STEPS = torch.optim.Optimizer.__module__


def step_frames() -> list[int]:
    """Return the ids of the frames of torch's optimizers' steps on the stack, the innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _STEPS:
            found.append(id(frame))
        frame = frame.f_back
    return found
