"""DistributedDataParallel: measured models, by a call or each one that a script builds."""

import logging
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import config
from netbottleneck.config import Settings
from netbottleneck.hooks import comm_hooks
from netbottleneck.hooks.crosscheck import Crosscheck
from netbottleneck.hooks.finish import finish, finish_at_exit
from netbottleneck.hooks.left_alone import left_alone
from netbottleneck.hooks.measured import Measured
from netbottleneck.hooks.reducer_group import OwnGroup, ReducerGroup, reduced_parameters, reducer_of
from netbottleneck.launch import connect
from netbottleneck.runtime import job, run_folder
from netbottleneck.runtime.session import Session, observe, open_together, same_ranks
from netbottleneck.trace.model import BARE, NOT_RECORDED

LONGEST_S = 86400.0  # of a process group's timeout

logger = logging.getLogger("netbottleneck")

# What measures each model. Not an attribute of the model: copies and pickles take those along.
_measured: "weakref.WeakKeyDictionary[DistributedDataParallel, Measured]" = weakref.WeakKeyDictionary()


_sessions_of_gone: list[Session] = []


class LeftAlone(ValueError):
    """A model that cannot be measured, or whose gradients cannot be moved: it runs as without us."""


def attach(
    model: torch.nn.Module, optimizer: Any = None, *, session: Session | None = None, settings: Settings | None = None
) -> Measured | None:
    """Measure a DDP model, and move its buckets by the transports of the settings.

    model: the DDP model, or what torch.compile made of it. optimizer: whose updates end the steps; None: the first one
    that makes a step with parameters of the model. Every rank calls it, between two steps. What measured the model
    before ends. A model that must be left alone gives None and one line in the log that says why; ValueError with
    NETBOTTLENECK_STRICT=1. Raises TypeError for a model that DDP does not wrap.
    """
    ddp = _ddp_of(model)
    chosen = session.settings if session is not None else settings or config.settings()
    try:
        job.set_up_log(chosen, connect.Place(dist.get_rank(), dist.get_world_size()))
        return _attach(ddp, optimizer, session, chosen, called=model)
    except Exception as error:
        if chosen.strict:
            raise
        left_alone(_name(ddp), str(error))
        for other in {measured.session for measured in _measured.values() if not measured.closed}:
            other.notes.append(f"{_name(ddp)} was left alone: {NOT_RECORDED}.")
        logger.debug("left alone", exc_info=error)
        return None


def measured_by(model: torch.nn.Module) -> Measured | None:
    """Return what measures a DDP model, if anything does."""
    found: Measured | None = _measured.get(model) if isinstance(model, DistributedDataParallel) else None
    return found


def _attach(
    ddp: DistributedDataParallel,
    optimizer: Any,
    session: Session | None,
    settings: Settings,
    called: torch.nn.Module,
) -> Measured:
    _close_sessions_of_gone()
    earlier = _measured.pop(ddp, None)
    if earlier is not None:
        earlier.close()
        if earlier.session.joining is None:  # else its end, which may have to wait for other ranks, is the process's
            finish(earlier.session, show=False)
    _end_of_same_parameters(ddp)
    why = _refusal(ddp)
    if session is None:
        session = _open(ddp, settings, why or _not_the_only_one())
        finish_at_exit(session)
    elif why:
        raise LeftAlone(why)
    else:
        _use_own_group(session, ddp)
    return _measure(ddp, optimizer, session, called)


def _use_own_group(session: Session, ddp: DistributedDataParallel) -> None:
    """Have a session's stock be the model's own process group."""
    own = OwnGroup(ddp.process_group)
    for name in {"stock", BARE} & set(session.arms):
        session.on_close.append(session.arms[name].close)
        session.arms = {**session.arms, name: own}


def _measure(ddp: DistributedDataParallel, optimizer: Any, session: Session, called: torch.nn.Module) -> Measured:
    failures: list[Exception] = []
    group = ReducerGroup(ddp, session.recorder, on_error=failures.append)
    swaps = not set(session.blocks.arms) <= {"stock", BARE}
    process_group, model = ddp.process_group, weakref.ref(ddp)

    def agree() -> bool:
        """Return whether another arm may begin. Under `join` ranks make different numbers of steps."""
        alive = model()
        if alive is not None and getattr(getattr(alive, "_join_config", None), "enable", False):
            session.why_stays = "inside model.join() ranks make different numbers of steps"
            return False
        return session.agree()

    def hooked(said: str) -> None:
        session.notes.append(said)
        if swaps:
            logger.warning("%s No transport takes turns with it.", said)
            session.keep_own_path(OwnGroup(process_group))

    comm_hooks.watch(ddp, group, hooked)
    measured = Measured(
        session,
        group,
        optimizer,
        model=called,
        own_sync=False,
        bare=lambda on: group.leave() if on else group.enter(),
        agree=agree if swaps else None,
        on_forward=group.new_pass,
    )
    group.on_error = measured.failed
    for error in failures:
        measured.failed(error)
    check = Crosscheck(ddp, group, session)

    def between() -> None:
        group.learn_parameters()
        check.look()

    measured.between = between
    session.on_close += [group.close, check.compare]
    _measured[ddp] = measured
    end = weakref.finalize(ddp, _gone, measured)
    end.atexit = False
    return measured


def _gone(measured: Measured) -> None:
    measured.close()
    _sessions_of_gone.append(measured.session)  # a finalizer runs anywhere: what may wait is done later


def _close_sessions_of_gone() -> None:
    """Close the runs of models that are gone: rings and connections. `netbottleneck report` makes their reports."""
    for session in [each for each in _sessions_of_gone if each.joining is None or each.joining.done]:
        _sessions_of_gone.remove(session)
        session.close()
        if session.place.rank == 0:
            logger.info("a measured model is gone: netbottleneck report %s shows its run", session.folder)


def _open(ddp: DistributedDataParallel, settings: Settings, why: str) -> Session:
    """Open a session of all ranks, or begin one of this rank where gradients travel by DDP's own path alone."""
    model = type(ddp.module).__name__
    own = OwnGroup(ddp.process_group)
    if why and (settings.observes or ddp.process_group.size() != dist.get_world_size()):
        raise LeftAlone(why)  # without a vote: ranks outside of the group have no such model
    place = connect.Place(dist.get_rank(), dist.get_world_size())  # that of the group: it has all ranks
    if settings.observes:
        return observe(settings, place, stock=own, arms=settings.arms, model=model)
    same_ranks(settings, place)
    settings = _with_timeout_of(ddp.process_group, settings)
    control = job.start(settings).comm
    votes = run_folder.together(control, b"0" if why else b"1", settings.start_timeout_s)
    if why:
        raise LeftAlone(why)
    others = [rank for rank, vote in enumerate(votes) if vote != b"1"]
    if others:
        raise LeftAlone(f"rank {others[0]} leaves it alone: see that rank's log")
    return open_together(settings, stock=own, model=model)


def _with_timeout_of(group: Any, settings: Settings) -> Settings:
    """Return settings with the process group's timeout for a silent peer, where no other was asked for."""
    if "timeout_s" in settings.sources:
        return settings
    try:
        backend = group._get_backend(torch.device("cpu"))
        limit = getattr(backend, "wrapped_pg", backend).options._timeout
    except (AttributeError, RuntimeError):  # a backend that does not tell, such as MPI's
        return settings
    sources = {**settings.sources, "timeout_s": "process group"}
    return replace(settings, timeout_s=min(limit.total_seconds(), LONGEST_S), sources=sources)


def _refusal(ddp: DistributedDataParallel) -> str:
    """Return why a model must be left alone; "" where it need not be. The remedy is part of it."""
    if not hasattr(reducer_of(ddp), "_update_process_group"):
        return f"torch {torch.__version__} has no way into DDP's reducer: torch 2.3 or later is needed"
    group = ddp.process_group
    if group.size() != dist.get_world_size():
        return (
            f"its process group has {group.size()} of {dist.get_world_size()} ranks: only a model of all ranks can be "
            "measured"
        )
    elsewhere = next(((name, p) for name, p in reduced_parameters(ddp) if p.device.type != "cpu"), None)
    if elsewhere is not None:
        name, parameter = elsewhere
        return (
            f"parameter {name} is on {parameter.device}: gradients travel from host memory only; use a model on the CPU"
        )
    return ""


def _not_the_only_one() -> str:
    if all(each.closed for each in _measured.values()):
        return ""
    return (
        "another DDP model is measured already, and only one model of a step can be; to choose which, start without "
        "NETBOTTLENECK, NETBOTTLENECK_TRANSPORT and netbottleneck run, and call netbottleneck.attach on that one"
    )


def _end_of_same_parameters(ddp: DistributedDataParallel) -> None:
    """End the measuring of a model that was wrapped before and is wrapped anew now."""
    own = {id(parameter) for parameter in ddp.module.parameters()}
    for other, measured in list(_measured.items()):
        if other is not ddp and any(id(parameter) in own for parameter in other.module.parameters()):
            measured.close()
            del _measured[other]


def _ddp_of(model: torch.nn.Module) -> DistributedDataParallel:
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        raise TypeError(
            f"{type(inner).__name__} is no DistributedDataParallel model: netbottleneck.profile takes others"
        )
    return inner


def _name(ddp: DistributedDataParallel) -> str:
    return f"the DDP model of {type(ddp.module).__name__}"
