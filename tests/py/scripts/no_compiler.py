"""Importing this keeps torch.optim from loading torch's compiler: a second and more of a processor in each rank.

An optimizer loads it only to say that it is not to be compiled, and nothing here is compiled. Not for scripts that use
torch.distributed, which asks more of it.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch


class _Absent(types.ModuleType):
    """What torch.optim asks of torch._dynamo."""

    def disable(self, function: Any, *_: Any, **__: Any) -> Any:
        return function

    def graph_break(self) -> None:
        """Nothing is compiled."""


if "torch._dynamo" not in sys.modules:
    torch._dynamo = sys.modules["torch._dynamo"] = _Absent("torch._dynamo")
