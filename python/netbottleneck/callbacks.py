"""Callbacks for Lightning, the Hugging Face Trainer and Accelerate: measured runs for loops of a framework.

Add `LightningCallback()` or `TransformersCallback()` to the trainer's list of callbacks; put `with accelerate(model,
optimizer):` around a loop. The first use of a name imports its framework. Raises ImportError, which names the missing
package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netbottleneck.hooks.loop import LightningCallback, TransformersCallback, accelerate

__all__ = ["LightningCallback", "TransformersCallback", "accelerate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from netbottleneck.hooks import loop  # late, because it imports torch

    return getattr(loop, name)
