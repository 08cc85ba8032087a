"""State of elastic training, current and at the last commit, and the loop that restores it."""

import copy
import functools
import logging
import queue
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from netbottleneck.errors import HorovodInternalError, HostsUpdatedInterrupt
from netbottleneck.runtime.ops import broadcast_object, rank
from netbottleneck.torch.elastic.launcher import HostUpdateResult, notices
from netbottleneck.torch.elastic.sampler import ElasticSampler
from netbottleneck.torch.functions import broadcast_optimizer_state, broadcast_parameters
from netbottleneck.torch.optimizer import mark, number_from, renew, rest

# Those of horovod.common.elastic, where this package replaces Horovod, and of horovod.torch.elastic.state.
__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "WorkerNotificationManager",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "get_handler_registry",
    "notification_manager",
    "rank",
    "run_fn",
    "set_handler_registry",
]

logger = logging.getLogger("netbottleneck")

# The values of all ranks.


class Savable:
    """Interface of what can be saved, restored, and broadcast from rank 0."""

    def save(self) -> None:
        """Save the state in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state of the last save()."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcast rank 0's state."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called when the ranks have changed; sync() may follow. Does nothing here."""


class State(Savable):
    """State that can be saved, restored, and broadcast from rank 0.

    bcast_object(obj) returns rank 0's object on every rank, get_rank() this process's rank.
    """

    _saves = 0  # grows with each commit(), and with each save() of an ObjectState

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, HostUpdateResult]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions to call, in order, whenever the ranks have changed, before the state is synchronised."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after the job was restarted."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Record a change of hosts; called from any thread. The next check_host_updates() informs all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state; then check_host_updates()."""
        self.save()
        self._saves += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on every rank if rank 0 received a host change since the last one raised.

        Every rank calls it.
        """
        before = latest = self._last_updated_timestamp
        change = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                change |= update
        before, self._last_updated_timestamp, change = self._bcast_object((before, latest, change))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(change == HostUpdateResult.removed)


class ObjectState(State):
    """Plain values: each keyword argument becomes an attribute. sync() broadcasts rank 0's last save."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()

    def save(self) -> None:
        self._saves += 1
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class StateHandler(Savable):
    """Saves, restores and synchronises one kind of value; see set_handler_registry."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def set_value(self, value: Any) -> None:
        """Replace the handled value."""
        self.value = value
        self.save()


class _ByDict(StateHandler):
    """A value with state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)


class ModelStateHandler(_ByDict):
    """A module: its parameters and buffers."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_ByDict):
    """An optimizer: its state and options."""

    def restore(self) -> None:
        # The optimizer keeps the tensors that it loads, and changes them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_ByDict):
    """An ElasticSampler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))
        self.save()

    def reset(self) -> None:
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the handlers by type of value; the first match applies. Callers may extend the returned list."""
    return _registry


def set_handler_registry(registry: Iterable[tuple[type, type[StateHandler]]]) -> None:
    """Set the handlers by type of value, for each TorchState created from now on."""
    _registry[:] = list(registry)


class TorchState(ObjectState):
    """State of a training loop: models, optimizers, samplers and plain values, as attributes under their names.

    Modules, optimizers and ElasticSamplers have handlers; other values are treated as in ObjectState.
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        plain: dict[str, Any] = {}
        handlers: dict[str, StateHandler] = {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            served = next((handler for kind, handler in _registry if isinstance(value, kind)), None)
            if served is None:
                plain[name] = value
            else:
                handlers[name] = served(value)
        self.__dict__.update({"_handlers": handlers, **{name: handler.value for name, handler in handlers.items()}})
        super().__init__(broadcast_object, rank, **plain)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        # Optimizers first: one without state makes it by a step, which may change the weights of this rank only.
        for handler in sorted(self._handlers.values(), key=lambda h: not isinstance(h.value, torch.optim.Optimizer)):
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)


# Loop around an elastic training function: recovery from failures and from changes of hosts.

S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


# Failures in a row, with no commit() or save() in between, of which the last one is raised.
FAILURES_MAX = 10


def run_fn(func: Callable[Concatenate[S, P], R], reset: Callable[[], None]) -> Callable[Concatenate[S, P], R]:
    """Return `func` in the loop that elastic.run describes; `reset` stops and starts the job.

    Distributed optimizers made before the loop join each job that it starts. Each failure is logged. Raises the last of
    FAILURES_MAX failures in a row with no commit() or save() of the state in between: a restart does not cure them.
    """

    @functools.wraps(func)
    def elastic(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        alike = False  # True if all ranks have the same state
        failures, saves = 0, state._saves
        here = mark()
        with notices.listening(state.on_hosts_updated):
            while True:
                try:
                    if not alike:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    failures = 1 if state._saves != saves else failures + 1
                    saves = state._saves
                    if failures == FAILURES_MAX:
                        logger.error("elastic training ends: %d failures in a row without a commit()", failures)
                        raise
                    logger.warning("elastic training restarts from the last commit(): %s", error)
                    rest()  # else restore() would complete this rank's pass, and other ranks make a step of it
                    state.restore()
                    alike = False
                except HostsUpdatedInterrupt as change:
                    alike = change.skip_sync
                reset()
                number_from(here)
                state.on_reset()
                renew(here)

    # `state` may be passed by its name, which a Concatenate cannot state.
    return cast(Callable[Concatenate[S, P], R], elastic)


class WorkerNotificationManager:
    """Horovod's registry of listeners for host changes: objects with on_hosts_updated."""

    def __init__(self) -> None:
        self._listeners: dict[int, ExitStack] = {}

    def init(self, *_where: Any, **_named: Any) -> None:
        """Do nothing: the first listener opens the source of notices."""

    def register_listener(self, listener: Any) -> None:
        """Call listener.on_hosts_updated(timestamp, result), from another thread, on each change; idempotent."""
        if id(listener) not in self._listeners:
            self._listeners[id(listener)] = stack = ExitStack()
            stack.enter_context(notices.listening(listener.on_hosts_updated))

    def remove_listener(self, listener: Any) -> None:
        """Unregister a listener. KeyError if it is not registered."""
        self._listeners.pop(id(listener)).close()


notification_manager = WorkerNotificationManager()
