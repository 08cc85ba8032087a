"""Models whose gradients other code moves: FSDP2, FSDP, DeepSpeed, tensor parallelism, or calls of the script.

Their communication stays as it is, and is observed at its process groups.
"""

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from netbottleneck import config
from netbottleneck.hooks import ddp as ddp_hooks
from netbottleneck.hooks.calls import EachCall
from netbottleneck.hooks.left_alone import DEEPSPEED as PACKAGE
from netbottleneck.hooks.left_alone import are_spread, held, left_alone
from netbottleneck.hooks.measured_model import Measured, follow_device, uncompiled
from netbottleneck.hooks.reducer_group import OwnGroup
from netbottleneck.hooks.run_end import finish_at_exit
from netbottleneck.hooks.updates import unfit
from netbottleneck.launch import connect
from netbottleneck.runtime import job
from netbottleneck.runtime.session import observe
from netbottleneck.torch.gradients import Bucket, GradientSink, Stamps

if TYPE_CHECKING:
    from netbottleneck import _core

# What moves the gradients of a model.

FSDP2, FSDP, DEEPSPEED, TENSOR_PARALLEL, SCRIPT = "FSDP2", "FSDP", "DeepSpeed", "tensor parallelism", "the script"


def mover(model: torch.nn.Module) -> str:
    """Return what moves the gradients of a module that is neither DDP's nor compiled; SCRIPT if nothing known does."""
    kinds = sys.modules.get("torch.distributed.fsdp")
    for name, kind in ((FSDP2, "FSDPModule"), (FSDP, "FullyShardedDataParallel")):
        cls = getattr(kinds, kind, None)
        if cls is not None and any(isinstance(module, cls) for module in model.modules()):
            return name
    if _is_engine(model):
        return DEEPSPEED
    return TENSOR_PARALLEL if are_spread(model.parameters()) else SCRIPT


def _is_engine(model: torch.nn.Module) -> bool:
    """Return True for DeepSpeed's engine around a model."""
    return hasattr(model, "basic_optimizer") and any(
        cls.__module__.partition(".")[0] == PACKAGE for cls in type(model).__mro__
    )


def is_moved(model: torch.nn.Module) -> bool:
    """Return True if other code than the script moves the gradients of a module that is neither DDP's nor compiled."""
    return mover(model) != SCRIPT


class Observed(GradientSink):
    """The gradients of a model that other code moves: they are stamped when they are ready.

    Autograd accumulates into FSDP2's unsharded parameters, which exist from the first forward pass on. On a GPU, a step
    that is not sampled has the time of one gradient of each of FSDP2's groups: of its first trained parameter, as
    backward reaches that last. Other models have none in such a step.
    """

    buckets: Sequence[Bucket] = ()
    own_streams = True

    def __init__(self, model: torch.nn.Module, recorder: "_core.Recorder") -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = tuple(name for name, _ in named)
        self._tensors = [(name, p.numel() * p.element_size(), p.dtype) for name, p in named]
        # No reference to a parameter: torch swaps a sharded one in model.to(), and refuses if one has a weak reference.
        self._model = weakref.ref(model)
        self._forwards = 0
        self._on_device = recorder.device_stream is not None
        self._stamps = Stamps(recorder, len(named))
        self._all = True  # are stamped
        self._complete = True  # all parts of the model have run

    @property
    def tensors(self) -> Sequence[tuple[str, int, torch.dtype]]:
        """Name, bytes and type of each gradient, whole."""
        return self._tensors

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """The parameters that the model still has under their names."""
        model = self._model()
        return () if model is None else tuple(p for p in self._named(model) if p is not None)

    def _named(self, model: torch.nn.Module) -> list[torch.nn.Parameter | None]:
        """Return the parameter of each name; None if the model has none of that name by now."""
        found = dict(model.named_parameters())
        return [found.get(name) for name in self.names]

    @property
    def pending(self) -> int:
        """Return 0: other code waits for its own operations."""
        return 0

    def to_own_group(self) -> None:
        """Do nothing: other code alone moves the gradients."""

    def rest(self, on: bool) -> None:
        """Stop stamping, or allow it again at the next forward pass."""
        if on:
            self.close()

    def forward_begins(self) -> None:
        """Stamp the gradients of this step, if it is not the first. AttributeError: this torch is not known."""
        self._forwards += 1
        model = self._model()
        if self.paused or model is None or self._forwards == 1:
            return
        each = self.detailed or not self._on_device
        if each != self._all or not self._complete:
            self.close()
        if self._stamps.on:
            return
        self._all = each
        self._stamps.start(self._stamped(model, each))

    def _stamped(self, model: torch.nn.Module, each: bool) -> list[torch.Tensor | None]:
        """Return what autograd accumulates into, of every parameter or of each group's first; None for the others.

        None too for a part of the model that has not run yet.
        """
        whole: dict[int, torch.Tensor | None] = {}
        firsts: set[int] = set()
        for group in _groups(model):
            whole |= {key: getattr(one, "_unsharded_param", None) for one in group.fsdp_params for key in _ids(one)}
            firsts |= set(next((_ids(one) for one in group.fsdp_params if one.sharded_param.requires_grad), ()))
        self._complete = all(parameter is not None for parameter in whole.values())
        return [whole.get(id(p), p) if each or id(p) in firsts else None for p in self._named(model)]

    def close(self) -> None:
        """Remove the hooks."""
        self._stamps.stop()


def _groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters."""
    for module in model.modules():
        state: Any = getattr(type(module), "_get_fsdp_state", lambda _: None)(module)
        if hasattr(state, "_fsdp_param_groups"):  # one for each mesh
            yield from state._fsdp_param_groups
        elif (group := getattr(state, "_fsdp_param_group", None)) is not None:  # of an earlier torch
            yield group


def _ids(parameter: Any) -> list[int]:
    """Return the ids of the tensors that stand for a parameter of FSDP2's between its passes.

    With a number as reshard_after_forward, that is another one after a forward pass without a backward pass.
    """
    kept = (parameter.sharded_param, getattr(parameter, "_sharded_post_forward_param", None))
    return [id(one) for one in kept if one is not None]


# Ways to observe a model.

_observed: list[Measured] = []  # the one that was measured last


def _measures() -> bool:
    """Return True if a model is measured that DDP synchronises, or whose gradients other code moves."""
    return ddp_hooks.measures() or any(not measured.closed for measured in _observed)


def attach_when_known(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Observe the model of an optimizer from its next forward pass on, if FSDP, FSDP2 or DeepSpeed moves its gradients.

    So too for parameters that are DTensors. Does nothing if a model is measured. Returns what ends the search for the
    model. While it goes on, each forward pass of a module is looked at.
    """
    if _measures():
        return lambda: None
    own = {id(parameter) for parameter in held(optimizer)}
    chosen = weakref.ref(optimizer)

    def holds_all(module: torch.nn.Module) -> bool:
        if _is_engine(module):
            return cast(Any, module).basic_optimizer is chosen()
        of_groups = (key for group in _groups(module) for one in group.fsdp_params for key in _ids(one))
        return own <= {*(id(parameter) for parameter in module.parameters()), *of_groups}

    def found(module: torch.nn.Module) -> None:
        seeking.remove()
        alive = chosen()
        # Another optimizer of the model may have been first.
        if alive is not None and is_moved(module) and not _measures():
            attach(module, alive)

    seeking = EachCall(holds_all, found)
    return seeking.remove


def attach(
    model: torch.nn.Module, optimizer: Any = None, *, settings: config.Settings | None = None
) -> Measured | None:
    """Observe a model whose gradients other code moves: its steps, and its communication, which stays as it is.

    model: not DDP's. optimizer: its updates end the steps; None: the first one that steps parameters of the model, or
    that of DeepSpeed's engine. Every rank calls it, between two steps. If the model cannot be measured, logs one line
    with the reason and returns None; with NETBOTTLENECK_STRICT=1, raises the error. Raises TypeError for a module of a
    DDP model, and ValueError without a process group.
    """
    whole = uncompiled(model)
    if around := _ddp_around(whole):
        raise TypeError(f"{type(whole).__name__} is a part of a DistributedDataParallel model, {around}: pass that one")
    if not distributed.is_initialized():
        raise ValueError(
            "netbottleneck.attach observes the communication of a process group, and there is none: call it after "
            "torch.distributed.init_process_group"
        )
    chosen = settings or config.settings()
    who = mover(whole)
    if who == DEEPSPEED:
        engine: Any = whole
        model, optimizer = engine.module, engine.basic_optimizer
    name = _name(uncompiled(model))
    place = connect.Place(distributed.get_rank(), distributed.get_world_size())
    try:
        job.set_up_log(chosen, place)
        if reason := unfit(optimizer) or _refusal(model, who, chosen):
            raise ValueError(reason)
        return _observe(model, optimizer, chosen, place, name)
    except Exception as error:
        if chosen.strict:
            raise
        left_alone(f"the {'' if who == SCRIPT else who + ' '}model of {name}", str(error))
        return None


def _ddp_around(model: torch.nn.Module) -> str:
    """Return the name of the class of the DDP model that holds a module; "" if there is none."""
    kept = (thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel))
    return next((type(ddp).__name__ for ddp in kept if any(module is model for module in ddp.modules())), "")


def _name(model: torch.nn.Module) -> str:
    """Return the name of the class that the script has written."""
    inside = getattr(model, "module", None) if type(model).__name__ == "FullyShardedDataParallel" else None
    return type(inside or model).__name__.removeprefix("FSDP")


def _refusal(model: torch.nn.Module, who: str, settings: config.Settings) -> str:
    """Return why a model cannot be observed, with the remedy; "" if it can be."""
    if not settings.observes:
        more = ". netbottleneck.profile averages the gradients of a model that all ranks train" if who == SCRIPT else ""
        return (
            f"{who} communicates by its own process groups, which no transport replaces: leave out "
            f"{settings.source_of('transports')}, or set it to stock{more}"
        )
    places = {p.device for p in model.parameters()} | {group.device for group in _groups(model)}
    if len(places) > 1:
        return (
            f"it is on {' and '.join(sorted(map(str, places)))}, and one clock is read: leave out the"
            " CPUOffloadPolicy, or record it with torch.profiler, and call netbottleneck report on the traces"
        )
    return ""


def _observe(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: config.Settings,
    place: connect.Place,
    name: str,
) -> Measured:
    own = OwnGroup(cast(distributed.ProcessGroup, distributed.group.WORLD))
    session = observe(settings, place, stock=own, arms=settings.arms, model=name)
    try:
        follow_device(session, model.parameters())
    except Exception:
        session.reported = True  # the log says why it has no step
        raise
    finish_at_exit(session)
    session.stamps_gradients = session.recorder.device_stream is not None
    gradients = Observed(model, session.recorder)
    measured = Measured(session, gradients, optimizer, model=model, own_sync=False, bare=gradients.rest)
    measured.on_forward = functools.partial(measured.guarded, gradients.forward_begins)
    _observed[:] = [measured]
    weakref.finalize(model, measured.close, in_finalizer=True).atexit = False
    return measured
