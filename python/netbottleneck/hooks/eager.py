"""Functions that torch.compile neither traces nor compiles, nor what they call. Imports nothing of the compiler."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_F = TypeVar("_F", bound=Callable[..., Any])


def eager(function: _F) -> _F:
    """Return a function for torch to call back: it runs as it is, also inside a program that torch.compile runs.

    As torch.compiler.disable does, which would import the compiler.
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
