"""Calls: have functions called before and after every call of one module, with nothing left on the module.

Hooks of a module are part of what deepcopy and pickle take along. This wraps `__call__` of the module's class instead,
for as long as one of its modules is watched. Calls inside what torch.compile has compiled are not seen.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

Around = tuple[Callable[[], object], Callable[[], object]]


class _Watched(dict[int, Around]):
    """By id of the module. cloudpickle takes a script's own classes along by value, with what `__call__` names."""

    def __reduce__(self) -> Any:
        return dict, ()


_WATCHED = _Watched()
_CLASSES: dict[Any, int] = {}  # classes, with the number of their modules that are watched
_WRAPPERS: dict[Any, Any] = {}  # what stands in the place of a class's `__call__`, or below what others put there since


class Calls:
    """Calls `before` and `after` around each call of a module, until `remove`. `after` follows an exception, too."""

    def __init__(self, module: torch.nn.Module, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._class = type(module)
        self._key = id(module)
        self._around = (before, after)
        _WATCHED[self._key] = self._around
        _wrap(self._class)
        self._end = weakref.finalize(module, _forget, self._class, self._key, self._around)
        self._end.atexit = False

    def remove(self) -> None:
        """Call nothing any more."""
        self._end()


def _forget(cls: Any, key: int, around: Around) -> None:
    if _WATCHED.get(key) is around:
        del _WATCHED[key]
    _CLASSES[cls] -= 1
    if _CLASSES[cls] == 0:
        del _CLASSES[cls]
        if vars(cls).get("__call__") is not _WRAPPERS[cls][0]:
            return  # somebody has wrapped it: it stays where it is, and lets calls through
        _, original = _WRAPPERS.pop(cls)
        if original is None:
            del cls.__call__
        else:
            cls.__call__ = original


def _wrap(cls: Any) -> None:
    _CLASSES[cls] = _CLASSES.get(cls, 0) + 1
    if cls in _WRAPPERS:
        return
    own, former = vars(cls).get("__call__"), cls.__call__

    @functools.wraps(former)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile traces this function: what it compiles must be what it compiles without us.
        if torch.compiler.is_compiling():
            return former(self, *args, **kwargs)
        # An inherited one is looked up anew: torch.fx puts another into Module while it traces.
        original = super(cls, self).__call__ if own is None else functools.partial(own, self)
        around = _WATCHED.get(id(self))
        if around is None:
            return original(*args, **kwargs)
        around[0]()
        try:
            return original(*args, **kwargs)
        finally:
            around[1]()

    _WRAPPERS[cls] = (call, own)
    cls.__call__ = call
