"""What elastic training keeps: the values of all ranks, as they are and as they were at the last commit."""

import copy
import queue
from collections.abc import Callable, Iterable
from typing import Any

import torch

from netbottleneck.errors import HostsUpdatedInterrupt
from netbottleneck.runtime.ops import broadcast_object, rank
from netbottleneck.torch.elastic.notices import HostUpdateResult
from netbottleneck.torch.elastic.sampler import ElasticSampler
from netbottleneck.torch.functions import broadcast_optimizer_state, broadcast_parameters


class State:
    """What can be saved, restored, and given by rank 0 to all.

    bcast_object(obj) returns rank 0's object on every rank, get_rank() this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, HostUpdateResult]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have these called, in order, whenever the ranks have changed, before the state is synchronised."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The job was started anew."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Hosts came or went; called from any thread. The next check_host_updates() tells all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state; then check_host_updates()."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on every rank where rank 0 was told of other hosts since it last was raised.

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

    def save(self) -> None:
        """Keep the state as it is, in this process's memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what save() kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give rank 0's state to all."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks have changed; sync() may follow. Nothing to do here."""


class ObjectState(State):
    """Plain values: each keyword argument becomes an attribute. sync() gives out what rank 0 saved last."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()

    def save(self) -> None:
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


class StateHandler:
    """How one kind of value is saved, restored and synchronised; see set_handler_registry."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep the value's state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what save() kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give rank 0's state to all."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks have changed; sync() may follow. Nothing to do here."""

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
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
    """Return which handler serves which type of value, the first that fits; the list itself, to be added to."""
    return _registry


def set_handler_registry(registry: Iterable[tuple[type, type[StateHandler]]]) -> None:
    """Say which handler serves which type of value, in each TorchState that is made from now on."""
    _registry[:] = list(registry)


class TorchState(ObjectState):
    """The state of a training loop: models, optimizers, samplers and plain values, each an attribute of its name.

    Modules, optimizers and ElasticSamplers are served by handlers, everything else as ObjectState does.
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
        # Optimizers first: one that has no state makes it by a step, which may change the weights of this rank alone.
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
