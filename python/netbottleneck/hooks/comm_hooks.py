"""Communication hooks of the user's own on DDP models: called exactly as without us, and timed where that is possible.

DDP registers a hook by a function of torch.distributed. While a measured model lives, that function is wrapped: a
Python hook is timed around its call, and a built-in one is registered with the model's own process group in place.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netbottleneck.hooks.reducer_group import ReducerGroup, reducer_of
from netbottleneck.trace.model import NOT_TIMED

BUILT_IN = "_register_builtin_comm_hook"
PYTHON = "_register_comm_hook"

Told = Callable[[str], None]

_groups: "weakref.WeakKeyDictionary[DistributedDataParallel, tuple[ReducerGroup, Told]]" = weakref.WeakKeyDictionary()


def watch(ddp: DistributedDataParallel, group: ReducerGroup, told: Told) -> None:
    """Have `told` called with what the report must say, where the model has a hook of the user's, or gets one."""
    if not _groups:
        _wrap()
    _groups[ddp] = (group, told)
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    if name:
        group.hooked = True
        told(f"{_own(name)} It was there before the model was measured, so {NOT_TIMED}.")


def forget(ddp: DistributedDataParallel) -> None:
    """Leave the hooks of a model alone from now on."""
    _groups.pop(ddp, None)


def _own(name: str) -> str:
    return f"The model has a communication hook of its own ({name}): its buckets travel as that hook sends them."


def _watched(reducer: Any) -> tuple[ReducerGroup, Told] | None:
    return next((found for ddp, found in _groups.items() if reducer_of(ddp) is reducer), None)


def _wrap() -> None:
    register: Any = getattr(dist, PYTHON)
    if hasattr(register, "_netbottleneck"):
        return
    register_built_in: Any = getattr(dist, BUILT_IN)

    @functools.wraps(register)
    def python(reducer: Any, state: object, hook: Any) -> None:
        found = _watched(reducer)
        if found is None:
            register(reducer, state, hook)
            return
        group, told = found
        group.hooked = True
        register(reducer, state, _timed(hook, weakref.ref(group)))
        told(f"{_own(getattr(hook, '__qualname__', type(hook).__name__))} It is timed.")

    @functools.wraps(register_built_in)
    def built_in(reducer: Any, kind: Any) -> None:
        found = _watched(reducer)
        if found is None:
            register_built_in(reducer, kind)
            return
        group, told = found
        group.leave()  # the hook keeps the process group that the reducer has now
        group.hooked = True
        register_built_in(reducer, kind)
        group.enter()
        told(f"{_own(str(kind))} It is built into torch, so {NOT_TIMED}.")

    python._netbottleneck = True  # type: ignore[attr-defined]
    setattr(dist, PYTHON, python)
    setattr(dist, BUILT_IN, built_in)


def _timed(hook: Any, reference: "weakref.ref[ReducerGroup]") -> Any:
    @functools.wraps(hook)
    def call(state: Any, bucket: Any) -> Any:
        group = reference()
        done = None if group is None else group.hook_begins(bucket)
        future = hook(state, bucket)
        if group is not None and done is not None:
            group.hook_returned(done, future)
        return future

    return call
