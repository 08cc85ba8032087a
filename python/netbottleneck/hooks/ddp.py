"""DistributedDataParallel: its own reducer steps aside while ours moves the gradients.

It takes over again in the arm "bare", which is the user's script as it was.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import env
from netbottleneck.hooks.finish import finish, finish_at_exit
from netbottleneck.hooks.measured import Measured
from netbottleneck.plan import FIRST_BYTES
from netbottleneck.session import Session, open_session
from netbottleneck.torch.gradients import Gradients

MEASURED = "_netbottleneck_measured"  # of a DDP model: what measures it


def attach(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, session: Session | None = None
) -> Measured:
    """Measure a DDP model, and move its gradients by the transports of the environment.

    Every rank calls it, before the first backward pass. A session that measured the model before is finished: two would
    reduce its gradients in each other's hands. Raises ValueError for a model on a device that is not the
    CPU, and for one with a communication hook of the user's or with static_graph=True.
    """
    earlier: Measured | None = ddp.__dict__.pop(MEASURED, None)
    if earlier is not None:
        finish(earlier.session, show=False)
    reducer_off(ddp)
    chosen = session or open_session(env.settings(), group=ddp.process_group, model=type(ddp.module).__name__)
    limit = int(getattr(ddp, "bucket_bytes_cap", 25 << 20))
    gradients = Gradients(
        [(name, p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore],
        recorder=chosen.recorder,
        direct_bytes=chosen.settings.direct_bytes,
        limits=(FIRST_BYTES, max(limit, FIRST_BYTES)),
        agree=lambda mine: chosen.control.exchange(mine)[0],
        label="ddp",
    )
    measured = Measured(
        chosen,
        gradients,
        optimizer,
        model=ddp,
        bare=lambda on: setattr(ddp, "require_backward_grad_sync", on),
        find_unused=ddp.find_unused_parameters,
    )
    ddp.__dict__[MEASURED] = measured
    _replace_no_sync(ddp, measured)
    _keep_buffers_alike(ddp, measured)
    if session is None:
        finish_at_exit(chosen)
    return measured


def reducer_off(ddp: DistributedDataParallel) -> None:
    """Let DDP's own reducer do nothing from the next forward pass on."""
    if getattr(ddp, "_comm_hooks", None):
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


def install() -> None:
    """Make every DDP model that is built from now on a measured one, once an optimizer takes a step with it."""
    if getattr(DistributedDataParallel, "_netbottleneck", False):
        return
    original = DistributedDataParallel.__init__
    waiting: list[DistributedDataParallel] = []

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        waiting.append(self)
        optimizer = _optimizer_of(self)
        if optimizer is not None:
            waiting.remove(self)
            attach(self, optimizer)

    def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        optimizer_init(optimizer, *args, **kwargs)
        for ddp in list(waiting):
            if _has_parameters_of(optimizer, ddp):
                waiting.remove(ddp)
                attach(ddp, optimizer)

    optimizer_init = torch.optim.Optimizer.__init__
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign,assignment]
    DistributedDataParallel._netbottleneck = True  # type: ignore[attr-defined]


def _optimizer_of(ddp: DistributedDataParallel) -> torch.optim.Optimizer | None:
    """Return an optimizer that was made before the model was wrapped, if one is alive."""
    import gc

    found: list[torch.optim.Optimizer] = [
        thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)
    ]
    return next((optimizer for optimizer in found if _has_parameters_of(optimizer, ddp)), None)


def _has_parameters_of(optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel) -> bool:
    own = {id(parameter) for parameter in ddp.module.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
