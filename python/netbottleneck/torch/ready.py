"""When is a gradient ready? What is called then, and what stamps it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from netbottleneck.trace.recorder import EVENTS

if TYPE_CHECKING:
    from netbottleneck import _core


class OnAccumulated:
    """Calls `call` each time autograd has added to a parameter's gradient, after all post-accumulate hooks.

    It is a hook of the parameter's AccumulateGrad node, as Horovod's and DDP's are, so that hooks of the user's own
    (clipping, masking) see a gradient before it is sent. call: gets what torch gives to hooks of a node.
    """

    def __init__(self, parameter: torch.Tensor, call: Callable[..., None]) -> None:
        with torch.enable_grad():
            function = cast(Any, parameter.expand_as(parameter).grad_fn)
        self._node = function.next_functions[0][0]  # the parameter holds it weakly
        self._handle = self._node.register_hook(call)

    def remove(self) -> None:
        """Take the hook away."""
        self._handle.remove()
        self._node = None


class _Hooks(dict[Any, Any]):
    """The hooks of one parameter, slimmer than torch's: half of what a hook costs is memory that is not in a cache.

    Weak references to it must be possible: torch's handles of a user's own hooks have one.
    """

    __slots__ = ("__weakref__",)


class Stamps:
    """Has a recorder stamp each gradient that is ready, under its parameter's index, until `remove`."""

    def __init__(self, parameters: Sequence[torch.Tensor], recorder: "_core.Recorder") -> None:
        self._hooks: list[dict[Any, Any]] = []
        for index, parameter in enumerate(cast("Sequence[Any]", parameters)):
            if parameter._post_accumulate_grad_hooks is None:
                parameter._post_accumulate_grad_hooks = _Hooks()
            hooks = parameter._post_accumulate_grad_hooks
            hooks[self] = recorder.stamper(EVENTS["GRAD_READY"], index)  # torch's keys are numbers
            self._hooks.append(hooks)

    def remove(self) -> None:
        """Stamp nothing any more."""
        for hooks in self._hooks:
            hooks.pop(self, None)
        self._hooks.clear()
