"""DistributedDataParallel: a communication hook on a model, by a call or on every model that a script builds."""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import env, job
from netbottleneck.hooks import bucket_hook, reducer
from netbottleneck.hooks.crosscheck import Crosscheck
from netbottleneck.hooks.finish import finish, finish_at_exit
from netbottleneck.hooks.measured import Measured
from netbottleneck.session import Session, open_session

MEASURED = "_netbottleneck_measured"  # of a DDP model: what measures it


def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *, session: Session | None = None
) -> Measured:
    """Measure a DDP model, and move its buckets by the transports of the environment, as a communication hook.

    model: the DDP model, or what torch.compile made of it. optimizer: whose updates end the steps; None: the first one
    that makes a step with parameters of the model. Every rank calls it, before the first backward pass. A session that
    measured the model before is finished. Raises ValueError for a model on a device that is not the CPU, for one whose
    process group is not of all ranks, and for one with a communication hook of the user's.
    """
    ddp = _ddp_of(model)
    chosen = _session_for(ddp, session)
    hook = bucket_hook.register(ddp, chosen.recorder)
    measured = Measured(chosen, hook, optimizer, model=ddp, own_sync=False, bare=lambda on: setattr(hook, "plain", on))
    check = Crosscheck(ddp, hook, chosen)
    measured.between = check.look
    chosen.on_close += [hook.close, check.compare]
    return _measured(ddp, measured, session)


def stand_in(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None, *, session: Session | None = None
) -> Measured:
    """Measure a DDP model as `attach` does, with gradients that go past its reducer, which is faster.

    A model with static_graph=True keeps its reducer.
    """
    if ddp.static_graph:
        return attach(ddp, optimizer, session=session)
    chosen = _session_for(ddp, session)
    return _measured(ddp, reducer.stand_in(ddp, optimizer, chosen), session)


def _ddp_of(model: torch.nn.Module) -> DistributedDataParallel:
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        raise TypeError(
            f"{type(inner).__name__} is no DistributedDataParallel model: netbottleneck.profile takes others"
        )
    return inner


def _session_for(ddp: DistributedDataParallel, session: Session | None) -> Session:
    earlier: Measured | None = ddp.__dict__.pop(MEASURED, None)
    if earlier is not None:  # two would reduce its gradients in each other's hands
        finish(earlier.session, show=False)
    if getattr(ddp, "_comm_hooks", None) and bucket_hook.hook_of(ddp) is None:
        raise ValueError("this DDP model has a communication hook of its own: netbottleneck cannot stand in for it")
    settings = session.settings if session is not None else env.settings()
    of, ranks = ddp.process_group.size(), job.start(settings).place.size
    if of != ranks:
        raise ValueError(f"this DDP model is of {of} of {ranks} ranks: only one of all ranks can be measured")
    return session or open_session(settings, group=ddp.process_group, model=type(ddp.module).__name__)


def _measured(ddp: DistributedDataParallel, measured: Measured, session: Session | None) -> Measured:
    ddp.__dict__[MEASURED] = measured
    if session is None:
        finish_at_exit(measured.session)
    return measured


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
            stand_in(self, optimizer)

    def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        optimizer_init(optimizer, *args, **kwargs)
        for ddp in list(waiting):
            if _has_parameters_of(optimizer, ddp):
                waiting.remove(ddp)
                stand_in(ddp, optimizer)

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
