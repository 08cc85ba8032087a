"""Measured runs for loops that a framework runs: Lightning, the Hugging Face Trainer, Accelerate.

`LightningCallback()` and `TransformersCallback()` go into the trainer's list of callbacks; `with accelerate(model,
optimizer):` goes around a loop. A framework is imported when its name here is used, and not before: ImportError says
which package is missing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netbottleneck.hooks.callbacks.for_accelerate import accelerate
    from netbottleneck.hooks.callbacks.for_lightning import LightningCallback
    from netbottleneck.hooks.callbacks.for_transformers import TransformersCallback

_LATER = {
    "LightningCallback": "for_lightning",
    "TransformersCallback": "for_transformers",
    "accelerate": "for_accelerate",
}

__all__ = ["LightningCallback", "TransformersCallback", "accelerate"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"netbottleneck.hooks.callbacks.{_LATER[name]}"), name)
