"""When is a gradient ready? What is called then, and what stamps it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from netbottleneck.recorder import EVENTS

if TYPE_CHECKING:
    from netbottleneck import _core


def on_gradient(parameter: torch.Tensor, call: Callable[[torch.Tensor], None]) -> Any:
    """Have `call` called with the parameter whenever its gradient was added to; return the hook's handle."""
    return cast(Any, parameter).register_post_accumulate_grad_hook(call)


def stamped(parameters: Sequence[torch.Tensor], recorder: "_core.Recorder") -> list[Any]:
    """Have a recorder stamp each gradient that is ready, under its parameter's index; return the hooks' handles."""
    return [
        on_gradient(parameter, recorder.stamper(EVENTS["GRAD_READY"], index))
        for index, parameter in enumerate(parameters)
    ]
