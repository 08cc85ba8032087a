"""DDP's own reducer steps aside while ours moves the gradients, in buckets and memory of our own.

It takes over again in the arm "bare", which is the user's script as it was.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.hooks.bucket_hook import hook_of
from netbottleneck.hooks.measured import Measured
from netbottleneck.plan import FIRST_BYTES
from netbottleneck.session import Session
from netbottleneck.torch.gradients import Gradients


def stand_in(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None, session: Session) -> Measured:
    """Measure a DDP model, and move its gradients past its reducer.

    Raises ValueError for a model on a device that is not the CPU, and for one with a communication hook of the user's
    or with static_graph=True.
    """
    reducer_off(ddp)
    limit = int(getattr(ddp, "bucket_bytes_cap", 25 << 20))
    gradients = Gradients(
        [(name, p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore],
        recorder=session.recorder,
        direct_bytes=session.settings.direct_bytes,
        limits=(FIRST_BYTES, max(limit, FIRST_BYTES)),
        agree=lambda mine: session.control.exchange(mine)[0],
        label="ddp",
    )
    measured = Measured(
        session,
        gradients,
        optimizer,
        model=ddp,
        bare=lambda on: setattr(ddp, "require_backward_grad_sync", on),
        find_unused=ddp.find_unused_parameters,
    )
    _replace_no_sync(ddp, measured)
    _keep_buffers_alike(ddp, measured)
    return measured


def reducer_off(ddp: DistributedDataParallel) -> None:
    """Let DDP's own reducer do nothing from the next forward pass on."""
    if getattr(ddp, "_comm_hooks", None) and hook_of(ddp) is None:
        raise ValueError("this DDP model has a communication hook of its own: netbottleneck cannot stand in for it")
    if ddp.static_graph:
        raise ValueError("this DDP model has static_graph=True: netbottleneck cannot stand in for its reducer")
    ddp.require_backward_grad_sync = False


def _keep_buffers_alike(ddp: DistributedDataParallel, measured: Measured) -> None:
    """Have rank 0's buffers given to all before the next forward pass, as a DDP model does whose reducer works."""

    def after_forward(*_: Any) -> None:
        ddp.require_forward_param_sync = torch.is_grad_enabled() and not measured.held

    measured.session.on_close.append(ddp.register_forward_hook(after_forward).remove)


def _replace_no_sync(ddp: DistributedDataParallel, measured: Measured) -> None:
    @contextmanager
    def no_sync() -> Generator[None, None, None]:
        before = ddp.require_backward_grad_sync
        ddp.require_backward_grad_sync = False
        measured.hold(True)
        try:
            yield
        finally:
            ddp.require_backward_grad_sync = before
            measured.hold(False)

    ddp.no_sync = no_sync  # type: ignore[method-assign]
    measured.session.on_close.append(lambda: ddp.__dict__.pop("no_sync", None))
