"""DistributedDataParallel: attaches the measurement to DDP models, and times the user's communication hooks."""

import contextlib
import functools
import gc
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import config
from netbottleneck.config import Settings
from netbottleneck.hooks.collectives import moving
from netbottleneck.hooks.left_alone import left_alone
from netbottleneck.hooks.measured_model import Crosscheck, Measured, follow_device, uncompiled
from netbottleneck.hooks.reducer_group import OwnGroup, ReducerGroup, reduced_parameters, reducer_of
from netbottleneck.hooks.run_end import finish, finish_at_exit, report_at_exit
from netbottleneck.hooks.updates import unfit
from netbottleneck.launch import connect, rendezvous
from netbottleneck.runtime import job, nccl
from netbottleneck.runtime.session import Session, observe, open_together, same_ranks
from netbottleneck.torch.gradients import UNREACHABLE, is_reachable
from netbottleneck.trace.model import HOOKED, NOT_RECORDED, NOT_TIMED
from netbottleneck.trace.transports import BARE, STOCK
from netbottleneck.units import nbytes

# The user's communication hooks on DDP models. They run unchanged; Python hooks are timed.
#
# DDP registers a hook through a function of torch.distributed, which we wrap. A Python hook of a measured model is
# timed around its call. A built-in hook is registered while the model's own process group is in the reducer.

BUILT_IN = "_register_builtin_comm_hook"
PYTHON = "_register_comm_hook"

Note = Callable[[str], None]
T = TypeVar("T")


class _ByModel(Generic[T]):
    """Values of live models, by identity: a model's class may compare by value, or be unhashable."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __setitem__(self, model: Any, value: T) -> None:
        key, found = id(model), self._found
        found[key] = (weakref.ref(model, lambda _: found.pop(key, None)), value)

    def get(self, model: Any) -> T | None:
        """Return a model's value, or None."""
        found = self._found.get(id(model))
        return None if found is None else found[1]

    def pop(self, model: Any) -> T | None:
        """Remove a model's value and return it, or None."""
        found = self._found.pop(id(model), None)
        return None if found is None else found[1]

    def items(self) -> list[tuple[Any, T]]:
        """Return the live models and their values."""
        alive = [(reference(), value) for reference, value in tuple(self._found.values())]
        return [(model, value) for model, value in alive if model is not None]

    def models(self) -> list[Any]:
        """Return the live models."""
        return [model for model, _ in self.items()]

    def values(self) -> list[T]:
        """Return the values of the live models."""
        return [value for _, value in self.items()]


_groups: _ByModel[tuple[ReducerGroup, Note]] = _ByModel()


def watch(ddp: DistributedDataParallel, group: ReducerGroup, note: Note) -> None:
    """Call `note` with a line for the report if the model has a communication hook of the user, or gets one."""
    _wrap()
    _groups[ddp] = (group, note)
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    if name:
        group.hooked = group.unseen = True
        note(f"{_own(name)} It was there before the model was measured, so {NOT_TIMED}.")


def forget(ddp: DistributedDataParallel) -> None:
    """Stop watching a model for communication hooks."""
    _groups.pop(ddp)


def _own(name: str) -> str:
    return f"The model has a communication hook of its own ({name}): {HOOKED}."


def _watched(reducer: Any) -> tuple[ReducerGroup, Note] | None:
    return next((found for ddp, found in _groups.items() if reducer_of(ddp) is reducer), None)


def _wrap() -> None:
    register: Any = getattr(dist, PYTHON)
    if hasattr(register, "_netbottleneck"):
        return
    register_built_in: Any = getattr(dist, BUILT_IN)

    @functools.wraps(register)
    def python(reducer: Any, state: object, comm_hook: Any) -> None:
        found = _watched(reducer)
        if found is None:
            register(reducer, state, comm_hook)
            return
        group, note = found
        register(reducer, state, _timed(comm_hook, weakref.ref(group)))
        group.hooked = True
        note(f"{_own(getattr(comm_hook, '__qualname__', type(comm_hook).__name__))} It is timed.")

    @functools.wraps(register_built_in)
    def built_in(reducer: Any, comm_hook_type: Any) -> None:
        found = _watched(reducer)
        if found is None:
            register_built_in(reducer, comm_hook_type)
            return
        group, note = found
        inside = group.inside
        group.leave()  # the hook keeps the reducer's current process group
        try:
            register_built_in(reducer, comm_hook_type)
            group.hooked = group.unseen = True
        finally:
            if inside:
                group.enter()
        note(f"{_own(str(comm_hook_type))} It is built into torch, so {NOT_TIMED}.")

    update: Any = getattr(DistributedDataParallel, "_update_process_group", None)

    @functools.wraps(update)
    def update_process_group(self: DistributedDataParallel, new_process_group: Any) -> None:
        """Step aside for another group: the model is measured no longer. The same group changes nothing."""
        measured = measured_by(self)
        if measured is None or measured.closed:
            update(self, new_process_group)
            return
        reducer_group = cast("ReducerGroup", measured.gradients)
        same, inside = new_process_group is self.process_group, reducer_group.inside
        reducer_group.leave()
        if not same:
            measured.failed(RuntimeError(f"{_name(self)} got another process group, by which its gradients travel now"))
            measured.close()
        update(self, new_process_group)
        if same and inside:
            reducer_group.enter()

    if update is not None:
        DistributedDataParallel._update_process_group = update_process_group  # type: ignore[method-assign]
    python._netbottleneck = True  # type: ignore[attr-defined]
    setattr(dist, PYTHON, python)
    setattr(dist, BUILT_IN, built_in)


def _timed(hook: Any, reference: "weakref.ref[ReducerGroup]") -> Any:
    @functools.wraps(hook)
    def call(state: Any, bucket: Any) -> Any:
        group = reference()
        done = None if group is None else group.hook_begins(bucket)
        if group is None or done is None:
            return hook(state, bucket)
        future, moved = moving(hook, state, bucket)
        group.hook_returned(done, future, moved)
        return future

    return call


# Measured models.


logger = logging.getLogger("netbottleneck")

LONGEST_S = 86400.0  # upper limit of the timeout that a process group gives us
OF_GROUP = "process group"  # source of a setting

# The measurement of each model. Not an attribute of the model, because copies and pickles would include it.
_measured: _ByModel[Measured] = _ByModel()


_of_gone: list[Measured] = []


class LeftAlone(ValueError):
    """The model cannot be measured, or its gradients cannot be moved. It runs without our hooks."""


def attach(
    model: torch.nn.Module, optimizer: Any = None, *, session: Session | None = None, settings: Settings | None = None
) -> Measured | None:
    """Measure a DDP model and move its buckets by the transports of the settings.

    model: the DDP model, or the result of torch.compile on it. optimizer: its updates end the steps; None: the first
    optimizer that steps parameters of the model. Every rank calls it, between two steps. An earlier measurement of the
    model ends. If the model cannot be measured, logs one line with the reason and returns None; with
    NETBOTTLENECK_STRICT=1, raises the error, a ValueError for such a model. Raises TypeError for a model without DDP.
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
        for other, measured in _measured.items():
            if not measured.closed:
                _note_other(measured.session, other, ddp)
        logger.debug("left alone", exc_info=error)
        return None


def measured_by(model: torch.nn.Module) -> Measured | None:
    """Return the measurement of a DDP model that goes on, or None."""
    measured = _measured.get(model)
    return None if measured is None or measured.closed else measured


def _attach(
    ddp: DistributedDataParallel,
    optimizer: Any,
    session: Session | None,
    settings: Settings,
    called: torch.nn.Module,
) -> Measured:
    _close_sessions_of_gone()
    earlier = _measured.pop(ddp)
    if earlier is not None:
        earlier.close()
        earlier.session.followed = True
        if earlier.session.joining is None:  # else it ends at process exit, as it may wait for other ranks
            finish(earlier.session, show=False)
    _end_of_same_parameters(ddp)
    reason = unfit(optimizer) or _refusal(ddp, settings)
    if session is None:
        session = _open(ddp, settings, reason or _not_the_only_one(ddp))
        finish_at_exit(session)
    elif reason:
        raise LeftAlone(reason)
    else:
        _use_own_group(session, ddp)
    try:
        return _measure(ddp, optimizer, session, called)
    except Exception:
        session.reported = True  # the log says why it has no step
        raise


def _use_own_group(session: Session, ddp: DistributedDataParallel) -> None:
    """Use the model's own process group as the session's "stock" and "bare" arms."""
    own = OwnGroup(ddp.process_group)
    for arm in {STOCK, BARE} & set(session.arms):
        session.on_close.append(session.arms[arm].close)
        session.arms = {**session.arms, arm: own}


def _follow_device(ddp: DistributedDataParallel, session: Session) -> None:
    follow_device(session, (parameter for _, parameter in reduced_parameters(ddp)))
    session.stamps_gradients = session.recorder.device_stream is not None  # in passes that send no bucket


def _measure(ddp: DistributedDataParallel, optimizer: Any, session: Session, called: torch.nn.Module) -> Measured:
    failures: list[Exception] = []
    _follow_device(ddp, session)
    group = ReducerGroup(ddp, session.recorder, failures.append, _limit_of(ddp, session.settings))
    swaps = session.switches
    process_group, model = ddp.process_group, weakref.ref(ddp)

    def agree() -> bool:
        """Return whether the arm may change. Under `join` it may not: ranks make different numbers of steps."""
        alive = model()
        if alive is not None and getattr(getattr(alive, "_join_config", None), "enable", False):
            session.why_stays = "inside model.join() ranks make different numbers of steps"
            return False
        return session.agree()

    def hooked(note: str) -> None:
        session.notes.append(note)
        if swaps:
            logger.warning("%s No transport takes turns with it.", note)
            try:
                session.keep_own_path(OwnGroup(process_group))
            except OSError as error:  # of the run folder: the disk may be full
                group.on_error(error)

    watch(ddp, group, hooked)
    measured = Measured(
        session,
        group,
        optimizer,
        model=called,
        own_sync=False,
        bare=lambda on: group.leave() if on else group.enter(),
        agree=agree if swaps else None,
        on_forward=group.forward_begins,
    )
    group.on_error = measured.failed
    for error in failures:
        measured.failed(error)
    session.on_close.append(group.close)
    check = None
    if session.recorder.device_stream is None:  # DDP's own times are the host's
        check = Crosscheck(ddp, group, session)
        session.on_close.append(check.compare)

    others = _Others(ddp, session)

    def between() -> None:
        group.learn_parameters()
        if check is not None:
            check.look()
        others.step_ends()

    measured.between, measured.ending = between, others.ending
    _measured[ddp] = measured
    weakref.finalize(ddp, _gone, measured).atexit = False
    # The session stays open and holds the group, which would keep the process group's threads and sockets.
    weakref.finalize(reducer_of(ddp), group.close).atexit = False
    return measured


def _gone(measured: Measured) -> None:
    measured.close(in_finalizer=True)
    _of_gone.append(measured)  # a finalizer must not block: close the session later


def _close_sessions_of_gone() -> None:
    """Close the sessions of freed models: rings and connections. Their reports are made at process exit."""
    for gone in list(_of_gone):
        gone.remove_hooks()
        session = gone.session
        if session.joining is None or session.joining.done:
            _of_gone.remove(gone)
            session.close()
            if session.error is None:
                report_at_exit(session)


def _open(ddp: DistributedDataParallel, settings: Settings, reason: str) -> Session:
    """Open a session of all ranks, or one of this rank alone if gradients use only DDP's own path.

    reason: the reason to leave the model alone, or "". Raises LeftAlone if this rank or another one has a reason.
    """
    model = type(ddp.module).__name__
    beside = any(arm.over_nccl for arm in settings.transports)
    own = OwnGroup(ddp.process_group, ddp.device if beside else None)
    if reason and (settings.observes or ddp.process_group.size() != dist.get_world_size()):
        raise LeftAlone(reason)  # without a vote: ranks outside the group do not have this model
    place = connect.Place(dist.get_rank(), dist.get_world_size())  # equal to the group's, which has all ranks
    if settings.observes:
        return observe(settings, place, stock=own, arms=settings.arms, model=model)
    settings = connect.with_known_place(settings, place)
    _same_ranks_on_all(settings, place)
    settings = _with_timeout_of(ddp.process_group, settings, ddp.device)
    control = job.start(settings).comm
    votes = job.together(control, b"0" if reason else b"1", settings.start_timeout_s)
    if reason:
        raise LeftAlone(reason)
    others = [rank for rank, vote in enumerate(votes) if vote != b"1"]
    if others:
        raise LeftAlone(f"rank {others[0]} leaves it alone: see that rank's log")
    try:
        return open_together(settings, ready=functools.partial(_follow_device, ddp), stock=own, model=model)
    finally:
        own.close()  # the arms are open: it needs the model's group no longer


# How long a rank waits to learn of a rank that cannot join. Ranks build a DDP model together, within moments.
LEARN_S = 10.0
_openings = itertools.count()  # in step on all ranks, as every rank attaches the same models


def _same_ranks_on_all(settings: Settings, place: connect.Place) -> None:
    """Raise ValueError on every rank if one of them cannot join, as same_ranks says.

    The ranks tell each other through torch.distributed's store: such a rank has no other way to reach them. If some
    ranks do not come in time, or there is no store, the job's start names who is missing.
    """
    mine: ValueError | None = None
    try:
        same_ranks(settings, place)
    except ValueError as error:
        mine = error
    key = f"netbottleneck/{place.size}/ranks/{next(_openings)}"
    come, all_come, why = f"{key}/come", f"{key}/all", f"{key}/why"
    found = b""
    with contextlib.suppress(RuntimeError):  # of the store: the MPI backend has none
        store: Any = dist.distributed_c10d._get_default_store()
        if mine is not None:
            store.set(why, f"rank {place.rank} leaves it alone: {mine}")
        if store.add(come, 1) == place.size:
            store.set(all_come, "1")
        if mine is None:
            deadline = time.monotonic() + min(LEARN_S, settings.start_timeout_s)
            rendezvous.poll(lambda: b"1" if store.check([all_come]) else None, deadline)
            found = bytes(store.get(why)) if store.check([why]) else b""
    if mine is not None:
        raise mine
    if found:
        raise LeftAlone(found.decode(errors="replace"))


def _with_timeout_of(group: Any, settings: Settings, device: Any) -> Settings:
    """Return settings whose timeout for a silent peer is the process group's, unless the user set one."""
    limit_s = timeout_of(group, device)
    if "timeout_s" in settings.sources or not limit_s:
        return settings
    return replace(settings, timeout_s=limit_s, sources={**settings.sources, "timeout_s": OF_GROUP})


def timeout_of(group: Any, device: Any) -> float:
    """Return the timeout of a process group in s; 0 for a backend that does not report one, such as MPI."""
    try:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        limit = backend.options._timeout if hasattr(backend, "options") else backend.timeout
    except (AttributeError, RuntimeError):
        return 0.0
    return float(min(limit.total_seconds(), LONGEST_S))


def _limit_of(ddp: DistributedDataParallel, settings: Settings) -> float:
    """Return for how long a bucket waits for a rank that has not submitted it, in s; 0: for ever.

    It is the timeout of the model's process group, or the user's timeout for a silent peer if that is longer.
    """
    limit_s = timeout_of(ddp.process_group, ddp.device)
    own = settings.sources.get("timeout_s", OF_GROUP) != OF_GROUP
    return max(limit_s, settings.timeout_s) if own and limit_s else limit_s


def _refusal(ddp: DistributedDataParallel, settings: Settings) -> str:
    """Return the reason to leave a model alone, with the remedy; "" if the model can be measured."""
    if getattr(ddp, "_delay_all_reduce_all_params", False):
        return "delay_all_reduce_named_params has all its parameters: DDP sends them itself, and makes no reducer"
    if not hasattr(reducer_of(ddp), "_update_process_group"):
        return f"torch {torch.__version__} has no way into DDP's reducer: torch 2.3 or later is needed"
    if getattr(ddp, "_use_python_reducer", False):
        return (
            'torch._dynamo.config.optimize_ddp is "python_reducer": functional collectives send its gradients, not '
            'DDP\'s reducer; set it to "ddp_optimizer", its default'
        )
    group = ddp.process_group
    if group.size() != dist.get_world_size():
        return (
            f"its process group has {group.size()} of {dist.get_world_size()} ranks: only a model of all ranks can be "
            "measured"
        )
    over_nccl = [arm.transport for arm in settings.transports if arm.over_nccl]
    reason = nccl.refusal(over_nccl, settings) if over_nccl else ""
    if not reason and over_nccl and (why := nccl.stock_refusal(group, ddp.device)):
        reason = f"{over_nccl[0]}: {why}"
    if reason:
        return reason
    return _refusal_by_device(reduced_parameters(ddp))


STREAM_PER_THREAD = 2  # the driver's handle, CU_STREAM_PER_THREAD


def _refusal_by_device(parameters: Sequence[tuple[str, torch.Tensor]]) -> str:
    for name, parameter in parameters:
        if not is_reachable(parameter.device):
            return f"parameter {name} is on {parameter.device}: {UNREACHABLE}"
        if parameter.device != parameters[0][1].device:
            return (
                f"parameter {name} is on {parameter.device}, {parameters[0][0]} on {parameters[0][1].device}: only a "
                "model on one device can be measured"
            )
    if any(parameter.device.type != "cpu" for _, parameter in parameters) and config.shares_a_queue():
        return (
            f"{config.CONNECTIONS}=1 puts all streams into one queue of the GPU, where our wait for the end of a "
            f"bucket would delay the backward pass: unset {config.CONNECTIONS}, or set it to 2 or more"
        )
    device = parameters[0][1].device if parameters else torch.device("cpu")
    if device.type == "cuda" and torch.cuda.current_stream(device).cuda_stream == STREAM_PER_THREAD:
        return (
            "its current stream is CUDA's per-thread default stream, which is another stream on each thread: use a "
            "stream of torch.cuda"
        )
    return ""


def measures() -> bool:
    """Return True while a DDP model is measured."""
    return not all(each.closed for each in _measured.values())


def _not_the_only_one(ddp: DistributedDataParallel) -> str:
    other = next((model for model, measured in _measured.items() if not measured.closed), None)
    if other is None:
        return ""
    return (
        f"another DDP model is measured already ({_contents(other)}; this one: {_contents(ddp)}), and only one model "
        "of a step can be; to choose which, start without NETBOTTLENECK, NETBOTTLENECK_TRANSPORT and netbottleneck "
        "run, and call netbottleneck.attach on that one"
    )


LOOK_STEP = 5  # the first look of _Others, before the first step that is usually recorded


class _Others:
    """Finds the other DDP models that are trained in the steps of the measured one, and notes them in its record.

    Searches all live objects, as a model may be older than our hooks: at the begin, after LOOK_STEP steps and at the
    end. Looks at the models found after twice as many steps each time.
    """

    def __init__(self, ddp: DistributedDataParallel, session: Session) -> None:
        self._measured = weakref.ref(ddp)
        self._session = session
        self._known: _ByModel[tuple[int, int]] = _ByModel()
        self._steps, self._next = 0, LOOK_STEP
        self._begun_ns = self._stepped_ns = time.time_ns()  # as DDP's log has it
        self._search()

    def step_ends(self) -> None:
        """Look, if it is time."""
        self._steps += 1
        self._stepped_ns = time.time_ns()
        if self._steps < self._next:
            return
        if self._next == LOOK_STEP:
            self._search()
        self._next *= 2
        for ddp, before in self._known.items():
            now = _training(ddp)
            if now[0] and now != before:
                self._note(ddp)

    def ending(self) -> None:
        """Look for the last time, for models that reduced gradients before the last step ended."""
        self._search()
        for ddp in self._known.models():
            if self._begun_ns <= _training(ddp)[0] <= self._stepped_ns:
                self._note(ddp)

    def _search(self) -> None:
        measured = self._measured()
        if measured is None:
            return
        own = {id(parameter) for parameter in measured.module.parameters()}
        for ddp in _alive():
            same = any(id(parameter) in own for parameter in ddp.module.parameters())  # it was wrapped again
            if ddp is not measured and not same and self._known.get(ddp) is None:
                self._known[ddp] = _training(ddp)

    def _note(self, ddp: DistributedDataParallel) -> None:
        measured = self._measured()
        if measured is not None:
            _note_other(self._session, measured, ddp)


def _alive() -> list[DistributedDataParallel]:
    """Return the live DDP models of this process, also of classes that are derived from DDP."""
    kinds: list[type] = [DistributedDataParallel]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    found = (thing for thing in gc.get_referrers(*kinds) if issubclass(type(thing), DistributedDataParallel))
    return [ddp for ddp in found if ddp.__dict__.get("_modules", {}).get("module") is not None]


def _training(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Return the time of the last reduction that DDP has logged, 0 for none, and the number of updates."""
    try:
        data: Any = ddp._get_ddp_logging_data()
        return int(data.get("backward_comm_time_end", 0)), sum(p._version for p in ddp.module.parameters())
    except Exception:  # code of the script's class, or a model without a reducer
        return 0, 0


def _note_other(session: Session, measured: DistributedDataParallel, other: DistributedDataParallel) -> None:
    """Note once that another DDP model than the measured one communicates."""
    note = (
        f"a DDP model ({_contents(other)}) was left alone: {NOT_RECORDED}, and what it computes counts as "
        f'"other". The measured one is {_contents(measured)}.'
    )
    if note not in session.notes:
        session.notes.append(note)


def _end_of_same_parameters(ddp: DistributedDataParallel) -> None:
    """End the measurement of other DDP wrappers around the same parameters: the model was wrapped again.

    A wrapper inside of this model goes on to move its gradients, and is measured on.
    """
    own = {id(parameter) for parameter in ddp.module.parameters()}
    inside = {id(ddp), *map(id, ddp.module.modules())}  # a class derived from DDP may have no hash
    for other, measured in _measured.items():
        if id(other) not in inside and any(id(parameter) in own for parameter in other.module.parameters()):
            measured.close()
            _measured.pop(other)


def _ddp_of(model: torch.nn.Module) -> DistributedDataParallel:
    whole = uncompiled(model)
    if not isinstance(whole, DistributedDataParallel):
        name, ddp = inner_ddp(whole)
        instead = "netbottleneck.profile takes others" if ddp is None else f"pass the one that it contains, {name}"
        raise TypeError(f"{type(whole).__name__} is no DistributedDataParallel model: {instead}")
    return whole


def inner_ddp(model: torch.nn.Module) -> tuple[str, DistributedDataParallel | None]:
    """Return the name of a module's first part that is a DDP model, and the part; ("", None) without one."""
    parts = model.named_modules()
    return next(((name, part) for name, part in parts if isinstance(part, DistributedDataParallel)), ("", None))


def has_ddp(model: torch.nn.Module) -> bool:
    """Return whether a model, or a part of it, is a DDP model."""
    return inner_ddp(uncompiled(model))[1] is not None


def _name(ddp: DistributedDataParallel) -> str:
    return f"the DDP model of {type(ddp.module).__name__}"


def _contents(ddp: DistributedDataParallel) -> str:
    """Return what tells a model from another one of its class: "Sequential, 4 parameters, 1.5 MiB"."""
    own = list(ddp.module.parameters())
    size = nbytes(sum(parameter.numel() * parameter.element_size() for parameter in own))
    return f"{type(ddp.module).__name__}, {len(own)} parameters, {size}"
