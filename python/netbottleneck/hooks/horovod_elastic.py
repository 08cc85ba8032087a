"""What scripts take from horovod.common.elastic, where this package has Horovod's place."""

from contextlib import ExitStack
from typing import Any

from netbottleneck.errors import HorovodInternalError, HostsUpdatedInterrupt
from netbottleneck.torch.elastic.loop import run_fn
from netbottleneck.torch.elastic.notices import HostUpdateResult, notices
from netbottleneck.torch.elastic.state import ObjectState, State

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "run_fn",
]


class WorkerNotificationManager:
    """Who wants to know of hosts that come and go, by Horovod's names: objects with on_hosts_updated."""

    def __init__(self) -> None:
        self._listening: dict[int, ExitStack] = {}

    def init(self, *_where: Any, **_named: Any) -> None:
        """Nothing: a source is opened for the first listener."""

    def register_listener(self, listener: Any) -> None:
        """Have listener.on_hosts_updated(timestamp, result) called, from another thread; a second call does nothing."""
        if id(listener) not in self._listening:
            self._listening[id(listener)] = stack = ExitStack()
            stack.enter_context(notices.told(listener.on_hosts_updated))

    def remove_listener(self, listener: Any) -> None:
        """Tell it no more. KeyError for one that was not registered."""
        self._listening.pop(id(listener)).close()


notification_manager = WorkerNotificationManager()
