"""How a process learns that hosts come or go: from Horovod's elastic launcher, where there is one.

torchrun ends all processes and starts them anew instead: under it, and without a launcher, nothing is ever told.
"""

import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from enum import IntFlag
from typing import Protocol


class HostUpdateResult(IntFlag):
    """What happened to the hosts of a job."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


Tell = Callable[[float, HostUpdateResult], None]


class Source(Protocol):
    """Where news of hosts come from."""

    def close(self) -> None:
        """Tell no more."""


def source(tell: Tell, environ: Mapping[str, str]) -> Source | None:
    """Return what calls `tell` from a thread of its own, whenever hosts come or go; None where nothing does."""
    from netbottleneck.torch.elastic import place, service

    where = place.rendezvous(environ)
    return None if where is None else service.Service(where, place.own_name(environ), tell)


class Notices:
    """Those in this process who want to know of hosts. The source is open while there is one of them."""

    def __init__(self, opens: Callable[[Tell, Mapping[str, str]], Source | None] = source) -> None:
        self._opens = opens
        self._lock = threading.Lock()
        self._listeners: list[Tell] = []
        self._source: Source | None = None

    @contextmanager
    def told(self, listener: Tell, environ: Mapping[str, str] = os.environ) -> Generator[None, None, None]:
        """Have a listener called with each time and change, from another thread, inside the context."""
        with self._lock:
            if not self._listeners:
                self._source = self._opens(self._tell, environ)
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)
                ended, self._source = (self._source, None) if not self._listeners else (None, self._source)
            if ended is not None:
                ended.close()

    def _tell(self, timestamp: float, change: HostUpdateResult) -> None:
        for listener in tuple(self._listeners):
            listener(timestamp, change)


notices = Notices()
