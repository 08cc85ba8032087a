"""Callbacks around the calls of one module or of all, and functions that torch.compile skips.

deepcopy and pickle copy a module's hooks. So `Calls` wraps `__call__` of the module's class instead, while any module
of that class is watched. It does not see calls inside code that torch.compile compiled.
"""

import functools
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

from netbottleneck.errors import of_handler

# Callbacks around calls.

Around = tuple[Callable[[], object], Callable[[], object], type]  # the class whose `__call__` calls them


class _Watched(dict[int, Around]):
    """Callbacks by id of the module. Pickles as an empty dict, as cloudpickle copies the globals of `__call__`."""

    def __reduce__(self) -> Any:
        return dict, ()


_WATCHED = _Watched()
_CLASSES: dict[Any, int] = {}  # class -> number of its watched modules
_WRAPPERS: dict[Any, Any] = {}  # class -> our `__call__`, which others may have wrapped, and the class's own or None


class Calls:
    """Calls `before` and `after` around each call of a module, until `remove`. `after` also runs on an exception."""

    def __init__(self, module: torch.nn.Module, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._class = type(module)
        self._key = id(module)
        self._around = (before, after, self._class)
        _WATCHED[self._key] = self._around
        _wrap(self._class)
        self._end = weakref.finalize(module, _forget, self._class, self._key, self._around)
        self._end.atexit = False

    def remove(self) -> None:
        """Stop calling `before` and `after`."""
        self._end()


def watched(module: torch.nn.Module) -> bool:
    """Return whether there are callbacks around a module's calls."""
    return id(module) in _WATCHED


def _forget(cls: Any, key: int, around: Around) -> None:
    if _WATCHED.get(key) is around:
        del _WATCHED[key]
    _CLASSES[cls] -= 1
    if _CLASSES[cls] == 0:
        del _CLASSES[cls]
        if vars(cls).get("__call__") is not _WRAPPERS[cls][0]:
            return  # other code wrapped it: it stays in place and passes calls through
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
        # torch.compile traces this function: the compiled code must be the same as without our wrapper.
        if torch.compiler.is_compiling():
            return former(self, *args, **kwargs)
        # Look up an inherited `__call__` on each call: torch.fx replaces Module's while it traces.
        original = super(cls, self).__call__ if own is None else functools.partial(own, self)
        around = _WATCHED.get(id(self))
        if around is None or around[2] is not cls:
            return original(*args, **kwargs)
        around[0]()
        try:
            return original(*args, **kwargs)
        finally:
            around[1]()

    _WRAPPERS[cls] = (call, own)
    cls.__call__ = call


# Calls of any module, while a model is searched for.

_modules: Any = torch.nn.modules.module
_PRE_HOOKS, _ANY = "_global_forward_pre_hooks", "_has_any_global_hook"
_OURS: set[int] = set()  # ids of our hooks among torch's


class EachCall:
    """Calls `found` before each call of a module that is `sought`, until `remove`.

    sought: asked about each module that is called. It may run code of the module's class: if it raises an exception,
    the module is not sought. A compiled model warns while there is a hook of this kind. Ours does not count, as the
    script did not make it.
    """

    def __init__(self, sought: Callable[[torch.nn.Module], bool], found: Callable[[torch.nn.Module], None]) -> None:
        def before(module: torch.nn.Module, _args: Any) -> None:
            try:
                is_it = sought(module)
            except Exception as error:
                if of_handler(error):
                    raise
                return
            if is_it:
                found(module)

        self._handle: Any = _modules.register_module_forward_pre_hook(eager(before))
        if not _OURS and hasattr(_modules, _ANY):
            setattr(_modules, _ANY, _Others(getattr(_modules, _ANY)))
        _OURS.add(self._handle.id)

    def remove(self) -> None:
        """Stop calling `before`. A second call does nothing."""
        self._handle.remove()
        _OURS.discard(self._handle.id)
        former = getattr(_modules, _ANY, None)
        if not _OURS and isinstance(former, _Others):
            setattr(_modules, _ANY, former.counted)


class _Others:
    """Replaces torch's test for hooks of all modules, by the same code without our hooks."""

    def __init__(self, counted: Any) -> None:
        self.counted = counted

    def __call__(self) -> Any:
        others = {key: hook for key, hook in getattr(_modules, _PRE_HOOKS).items() if key not in _OURS}
        names = {**vars(_modules), _PRE_HOOKS: others}
        return FunctionType(self.counted.__code__, names, closure=self.counted.__closure__)()


# Functions that torch.compile skips, with all functions that they call. This part does not import the compiler.

_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_F = TypeVar("_F", bound=Callable[..., Any])


def eager(function: _F) -> _F:
    """Return a callback for torch that runs uncompiled, also inside a program that torch.compile runs.

    Does the same as torch.compiler.disable, which would import the compiler.
    """
    code: Any = function.__code__
    if hasattr(_frames, "set_code_exec_strategy"):  # torch 2.6 and later
        _frames.set_code_exec_strategy(
            code, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
        )
        return function
    if not hasattr(_frames, "skip_code"):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        before = _frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            _frames.set_eval_frame(before)

    _frames.skip_code(call.__code__)
    return cast(_F, functools.wraps(function)(call))
