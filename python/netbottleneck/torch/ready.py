"""When is a gradient ready? What is called then, and what stamps it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from netbottleneck.recorder import EVENTS

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


def stamped(parameters: Sequence[torch.Tensor], recorder: "_core.Recorder") -> list[Any]:
    """Have a recorder stamp each gradient that is ready, under its parameter's index; return the hooks' handles."""
    stamps = (recorder.stamper(EVENTS["GRAD_READY"], index) for index in range(len(parameters)))
    return [
        cast(Any, parameter).register_post_accumulate_grad_hook(stamp)
        for parameter, stamp in zip(parameters, stamps, strict=True)
    ]
